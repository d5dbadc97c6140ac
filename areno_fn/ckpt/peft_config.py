"""What the configuration of a PEFT adapter says, and the scale of each adapted module.

A field is supported, or without influence on what an adapter computes, or refused by name. A field that is not known
here is refused too, unless it is off (null, false, empty): PEFT writes every option that it has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from areno_fn.contracts.errors import CheckpointError

_WITHOUT_INFLUENCE = ("auto_mapping", "eva_config", "megatron_core", "peft_version", "qalora_group_size")
_REFUSED = {
    "use_dora": "weight-decomposed adapters (DoRA) are not supported",
    "use_qalora": "adapters of pooled inputs (QA-LoRA) are not supported",
    "use_bdlora": "block-diagonal adapters are not supported",
    "lora_bias": "a bias beside B is not supported",
    "modules_to_save": "modules that are trained whole are not supported",
    "layers_to_transform": "a choice of layers is not supported, name their modules in target_modules",
    "layers_pattern": "a choice of layers is not supported, name their modules in target_modules",
    "exclude_modules": "exclusions are not supported, name the modules that are meant in target_modules",
    "layer_replication": "replicated layers are not supported",
    "target_parameters": "adapters of parameters that are no module's weight are not supported",
    "trainable_token_indices": "single trained tokens are not supported",
    "loftq_config": "it belongs to a quantised base, which is not supported",
    "alora_invocation_tokens": "adapters that begin in the middle of a text are not supported",
}
# others ("pissa", "olora", "corda") take a part out of the weights of the base, so that the adapter alone is not enough
_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
_PATTERN = re.compile(r"[\w.\\^|-]{1,1000}")


@attrs.frozen(kw_only=True)
class AdapterConfig:
    """The part of an `adapter_config.json` that says what an adapter computes and where it came from.

    Attributes:
        r: rank of a module that no pattern names.
        lora_alpha: numerator of the scale of a module that no pattern names.
        target_modules: the adapted modules by name or by the end of it, in whole parts; or one regular expression,
            which is kept but never evaluated, because the tensors say which modules are adapted.
        use_rslora: the scale is alpha / sqrt(r) instead of alpha / r.
        fan_in_fan_out: the base stores its weights as [in, out].
        rank_pattern, alpha_pattern: other ranks and alphas by the end of a module's name; the first that fits counts.
        lora_dropout: probability of dropping an input of A in training.
        base_model_name_or_path, revision, task_type, inference_mode: notes for PEFT.

    Raises:
        CheckpointError: lists every field that is not what it must be.
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: Mapping[str, int] = attrs.field(factory=dict)
    alpha_pattern: Mapping[str, float] = attrs.field(factory=dict)
    lora_dropout: float = 0.0
    base_model_name_or_path: str | None = None
    revision: str | None = None
    task_type: str | None = None
    inference_mode: bool = True

    def __attrs_post_init__(self) -> None:
        problems = _wrong(attrs.asdict(self, recurse=False))
        if problems:
            raise CheckpointError(f"an adapter cannot have this configuration: {'; '.join(problems)}")

    def rank(self, module: str) -> int:
        """The rank of a module, which is named as in the base model."""
        return next((rank for end, rank in self.rank_pattern.items() if _ends(module, end)), self.r)

    def alpha(self, module: str) -> float:
        """The alpha of a module, which is named as in the base model."""
        return next((alpha for end, alpha in self.alpha_pattern.items() if _ends(module, end)), self.lora_alpha)

    def scale(self, module: str) -> float:
        """What B A is multiplied with: alpha / r, or alpha / sqrt(r)."""
        rank = self.rank(module)
        return self.alpha(module) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Whether `target_modules` names a module; a regular expression is believed to."""
        if isinstance(self.target_modules, str):
            return True
        return any(module == target or module.endswith(f".{target}") for target in self.target_modules)


def config_from_json(values: Mapping[str, Any], where: str) -> AdapterConfig:
    """Reads the contents of an `adapter_config.json`; `where` is its name in messages.

    Raises:
        CheckpointError: lists every field that is missing, of a wrong type or value, or not supported.
    """
    known = {field.name: field.default is attrs.NOTHING for field in attrs.fields(AdapterConfig)}
    given = {name: value for name, value in values.items() if name in known and value is not None}
    if isinstance(given.get("target_modules"), list):
        given["target_modules"] = tuple(given["target_modules"])
    missing = [f"{name!r} is missing" for name, needed in known.items() if needed and name not in given]
    problems = [*missing, *_wrong(given), *_unsupported({n: v for n, v in values.items() if n not in known})]
    if problems:
        raise CheckpointError(f"{where} cannot be used: {'; '.join(problems)}")
    return AdapterConfig(**given)


def config_to_json(config: AdapterConfig) -> dict[str, Any]:
    """The contents of an `adapter_config.json` that PEFT reads; `config_from_json` is the inverse."""
    targets = config.target_modules
    values = {
        **attrs.asdict(config),
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "peft_type": "LORA",
        "bias": "none",
        "init_lora_weights": True,
        "use_dora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    return dict(sorted(values.items()))


def _ends(module: str, pattern: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, value in sorted(values.items()):
        if name == "peft_type":
            allowed, why = value == "LORA", "only LORA is supported"
        elif name == "bias":
            allowed, why = value == "none", "trained biases are not supported, it must be 'none'"
        elif name == "init_lora_weights":
            allowed, why = value in _INIT, "it may have changed the weights of the base, which are not here"
        else:
            allowed = name in _WITHOUT_INFLUENCE or _is_off(value)
            why = _REFUSED.get(name, "this option is not known here")
        if not allowed:
            problems.append(f"{name!r} is {value!r}, but {why}")
    if "peft_type" not in values:
        problems.append("'peft_type' is missing")
    return problems


def _is_off(value: Any) -> bool:
    """A zero is not off: it may be the number of a layer or a token."""
    return value is None or value is False or value in ("", [], {})


def _wrong(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name!r} is {value!r}, it must be {wanted}"
        for name, value in values.items()
        for fits, wanted in [_FIELDS[name]]
        if not fits(value)
    ]


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e30


def _is_pattern_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, Mapping) and all(_is_pattern(key) and fits(inner) for key, inner in value.items())
    )


def _is_pattern(value: Any) -> bool:
    """Whether a text is a regular expression without groups and repetitions, so that matching takes no time."""
    if not isinstance(value, str) or not _PATTERN.fullmatch(value):
        return False
    try:
        re.compile(f"({value})")
    except re.error:
        return False
    return True


def _is_targets(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) and name for name in value)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_probability(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


_TEXT = (_is_text, "a text or null")
_FLAG = (_is_flag, "true or false")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "an integer of at least 1"),
    "lora_alpha": (_is_alpha, "a number above 0 and below 1e30"),
    "target_modules": (_is_targets, "a list of module names that is not empty, or a regular expression"),
    "use_rslora": _FLAG,
    "fan_in_fan_out": _FLAG,
    "rank_pattern": (
        _is_pattern_of(_is_rank),
        "a table from patterns without groups and repetitions to ranks of at least 1",
    ),
    "alpha_pattern": (
        _is_pattern_of(_is_alpha),
        "a table from patterns without groups and repetitions to numbers above 0 and below 1e30",
    ),
    "lora_dropout": (_is_probability, "a number of at least 0 and less than 1"),
    "base_model_name_or_path": _TEXT,
    "revision": _TEXT,
    "task_type": _TEXT,
    "inference_mode": _FLAG,
}
