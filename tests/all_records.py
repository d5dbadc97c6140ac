"""Specifications in which every record stands that a specification can hold, sound up to the files that they name."""

from __future__ import annotations

from typing import Any

_FUNCTION = {"kind": "function", "function": "m:f", "name": "f"}
_HTTP = {"kind": "http", "url": "http://h/", "name": "far"}
_PAIRS = [{"kind": "jsonl", "path": "p"}]
_FORGETS = {"start": 0.1}


def _optimizer(kind: str, role: str = "actor", **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "role": role, "schedule": {}, "groups": []} | fields


def _phase(name: str, algorithm: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "algorithm": {"kind": name} | algorithm, "steps": 8, "batch": {}} | fields


_GROUPS = [{"name": "own", "paths": ["embed"], "lr": 1e-3, "weight_decay": 0.0}]

TOKENS: dict[str, Any] = {
    "model": {"kind": "scratch", "family": "qwen3", "config": {}},
    "finetune": {"kind": "lora", "targets": ["q_proj"]},
    "phases": [
        _phase("sft", {}, data=[{"kind": "arithmetic"}], optimizers=[_optimizer("adamw", groups=_GROUPS)]),
        _phase("dpo", {}, data=_PAIRS, optimizers=[_optimizer("adamw8bit")]),
        _phase(
            "grpo",
            {"kl_coef": 0.1, "sampling": {}},
            data=[{"kind": "parquet", "path": "p"}, {"kind": "hf", "path": "p"}],
            optimizers=[_optimizer("sgd")],
            rewards=[_FUNCTION, _HTTP, {"kind": "model", "path": "p", "name": "m"}],
        ),
        _phase(
            "gspo",
            {"kl_coef": 0.1, "sampling": {}},
            data=_PAIRS,
            optimizers=[_optimizer("muon", adamw={"groups": []})],
            rewards=[_FUNCTION],
        ),
        _phase(
            "ppo",
            {"samples": 2, "kl_coef": 0.1, "kl_target": 0.1, "sampling": {}, "critic": {}},
            data=_PAIRS,
            optimizers=[_optimizer("adamw"), _optimizer("adamw", "critic")],
            rewards=[_FUNCTION],
            ema={},
        ),
    ],
    "evaluation": {"data": _PAIRS, "rewards": [_FUNCTION], "sampling": {}, "denoising": {}, "every": 1},
    "checkpoint": {},
    "export": {},
    "log": {},
}

_DIGITS = [{"kind": "digits"}]
_ROLES = {
    "flow_dmd2": ("actor", "fake"),
    "flow_tdm": ("actor", "fake"),
    "flow_tdm_r1": ("actor", "fake", "surrogate"),
}
_FLOWS: dict[str, dict[str, Any]] = {
    "flow_sft": {},
    "flow_dpo": {},
    "flow_grpo": {"kl_coef": 0.1, "denoising": {"noisy": [0, 1], "count": 1}},
    "flow_grpo_guard": {"kl_coef": 0.1},
    "flow_dppo": {"kl_coef": 0.1},
    "flow_nft": {"kl_coef": 0.1, "old": _FORGETS},
    "flow_awm": {"kl_coef": 0.1, "ema_coef": 0.1},
    "flow_dgpo": {},
    "flow_crd": {},
    "flow_online_dpo": {},
    "flow_dmd2": {},
    "flow_tdm": {},
    "flow_tdm_r1": {"teacher_guidance": 2.0},
    "flow_distill": {"teacher_guidance": 2.0},
}
_UNREWARDED = ("flow_sft", "flow_dpo", "flow_dmd2", "flow_tdm", "flow_distill")


def _flow(kind: str, algorithm: dict[str, Any]) -> dict[str, Any]:
    return _phase(
        kind,
        algorithm,
        data=[{"kind": "digit_pairs"}] if kind == "flow_dpo" else _DIGITS,
        optimizers=[_optimizer("adamw", role) for role in _ROLES.get(kind, ("actor",))],
        rewards=[] if kind in _UNREWARDED else [{"kind": "clip", "path": "p", "name": "fit"}],
        ema={"export": False} if kind == "flow_awm" else None,
        denoising={"steps": 4},
    )


FLOWS: dict[str, Any] = {
    "model": {"kind": "hf", "path": "p", "pipeline": {"streams": {"blocks": [28]}}},
    "phases": [_flow(kind, algorithm) for kind, algorithm in _FLOWS.items()],
    "evaluation": {"data": _DIGITS, "rewards": [_HTTP], "every": 1},
}
