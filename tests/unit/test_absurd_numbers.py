"""Numbers that no run could work with are refused in words, whatever field they stand in, before a file is opened."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from all_records import FLOWS, TOKENS
from field_values import Place, changed, numbers
from msgspec import inspect

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import RunSpec
from areno_fn.engine.composition import check_composition
from areno_fn.engine.specfile import check
from areno_fn.engine.specfile.formats import require_plain
from areno_fn.engine.specfile.sentences import explain
from areno_fn.engine.specfile.types import choose, locate, plain_copy, root, structs

WHOLE = (0, -1, 10**9, 10**18, 2**64)
REAL = (0.0, -1.0, 1e9, 1e18, math.nan, math.inf, -math.inf, 1e-300, 1e300)

ACCEPTED: dict[str, set[str]] = {
    "a step, a row or a state that is never reached, or one of a number line": {
        "Checkpoint.every", "Checkpoint.keep", "DPO.reference_every", "DigitPairsData.limit", "DigitsData.limit", "EMA.every",
        "EMA.start", "Evaluation.every", "Evaluation.limit", "FlowAWM.reference_every", "FlowCRD.reference_every",
        "FlowDGPO.draw_old", "FlowDGPO.reference_every", "FlowDPO.reference_every", "FlowDPPO.reference_every",
        "FlowGRPO.reference_every", "FlowGRPOGuard.reference_every", "FlowNFT.reference_every",
        "FlowOnlineDPO.reference_every", "Forgetting.flat", "GRPO.reference_every", "GSPO.reference_every", "HFData.limit",
        "JsonlData.limit", "Log.samples", "Log.samples_every", "PPO.kl_horizon", "PPO.reference_every",
        "ParquetData.limit", "Phase.remat", "Phase.steps", "Schedule.warmup_steps",
    },
    "all at once": {
        "Batch.micro_rows", "Batch.micro_tokens", "ClipReward.batch", "Evaluation.batch", "Export.shard_bytes",
        "HttpReward.batch", "ModelReward.micro_tokens",
    },
    "a bound that the vocabulary sets": {"Sampling.top_k"},
}  # fmt: skip
"""Where a thousand million is no mistake, by what it means there."""

UNBOUNDED: dict[str, set[str]] = {
    "a name of a random stream": {"ArithmeticData.seed", "RunSpec.seed"},
    "a threshold that nothing reaches": {
        "AdamW8bitSpec.max_grad_norm", "AdamWSpec.max_grad_norm", "Critic.clip", "FlowAWM.clip_high",
        "FlowAWM.max_advantage", "FlowCRD.max_advantage", "FlowDGPO.clip", "FlowDGPO.max_advantage",
        "FlowDPPO.max_advantage", "FlowDPPO.threshold", "FlowGRPO.clip_high", "FlowGRPO.max_advantage",
        "FlowGRPOGuard.clip_high", "FlowGRPOGuard.max_advantage", "FlowNFT.max_advantage", "FlowTDM.snr_cap",
        "FlowTDMR1.max_advantage", "FlowTDMR1.runaway", "FlowTDMR1.snr_cap", "FlowTDMR1.trust", "Forgetting.rate",
        "GRPO.dual_clip", "GRPO.importance_cap", "GSPO.importance_cap", "ModelReward.clip", "MuonSpec.max_grad_norm",
        "PPO.dual_clip", "PPO.importance_cap", "PPO.kl_target", "Phase.stop_at", "SGDSpec.max_grad_norm",
    },
    "a share among others of its kind": {
        "ArithmeticData.weight", "DigitPairsData.weight", "DigitsData.weight", "JsonlData.weight",
    },
}  # fmt: skip
"""Where a million million times a million is none either."""


def spelled(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = plain_copy(msgspec.convert(table, RunSpec))
    return found


BASES = (spelled(TOKENS), spelled(FLOWS))


def record_of(plain: Any, place: Place) -> str:
    """`Record.field` of a place."""
    for depth in range(len(place) - 1, -1, -1):
        _, raw, info = locate(plain, place[:depth])
        if isinstance(raw, dict) and structs(info):
            name = next(key for key in place[depth:] if isinstance(key, str))
            return f"{choose(info, raw)[0].cls.__name__}.{name}"
    raise AssertionError(place)


def alone(plain: dict[str, Any], place: Place) -> tuple[dict[str, Any], Place]:
    """The specification without the other phases than that of a place, and the place there."""
    if place[0] != "phases":
        return plain | {"phases": plain["phases"][-1:]}, place
    return plain | {"phases": [plain["phases"][int(place[1])]]}, ("phases", 0, *place[2:])


def refusal(plain: dict[str, Any]) -> str:
    """What is said of plain data before a file is opened; nothing where it may be meant."""
    try:
        require_plain(plain, "the specification")
        check_composition(check(msgspec.convert(plain, RunSpec)))
    except SpecError as error:
        return str(error)
    except msgspec.ValidationError as error:
        return explain(str(error), plain, "")[1]
    return ""


def tried() -> Iterator[tuple[str, str, Any, str]]:
    """Record and field, the place in words, a value and what is said of it, for all numbers of all records, each once."""
    seen = set[tuple[str, str]]()
    for whole in BASES:
        for place, info in numbers(whole):
            sort = (record_of(whole, place), str(place[0]))
            if sort in seen:
                continue
            seen.add(sort)
            plain, at = alone(whole, place)
            for value in WHOLE if isinstance(info, inspect.IntType) else REAL:
                field = record_of(whole, place)
                yield field, str(at[-1 if isinstance(at[-1], str) else -2]), value, refusal(changed(plain, at, value))


def declared(info: inspect.Type, seen: set[type]) -> Iterator[str]:
    """`Record.field` of every number that a type can hold."""
    if isinstance(info, inspect.ListType):
        yield from declared(info.item_type, seen)
    for struct in structs(info):
        if struct.cls in seen:
            continue
        seen.add(struct.cls)
        for field in struct.fields:
            parts = field.type.item_types if isinstance(field.type, inspect.TupleType) else (field.type,)
            inner = [part.item_type if isinstance(part, inspect.ListType) else part for part in parts]
            if any(isinstance(part, inspect.IntType | inspect.FloatType) for part in inner):
                yield f"{struct.cls.__name__}.{field.name}"
            yield from declared(field.type, seen)


def test_every_number_of_every_record_is_tried() -> None:
    assert {record_of(plain, place) for plain in BASES for place, _ in numbers(plain)} == set(declared(root(), set()))
    for plain in BASES:
        assert [refusal(alone(plain, ("phases", place))[0]) for place in range(len(plain["phases"]))] == [""] * len(
            plain["phases"]
        )


def test_what_is_absurd_is_refused_in_a_sentence_that_names_the_field() -> None:
    accepted: dict[Any, set[str]] = defaultdict(set)
    for field, name, value, said in tried():
        if said:
            assert all(re.match(r"[a-z_.0-9]+:? ", line) for line in said.splitlines()), (field, value, said)
            assert name in said, (field, value, said)
        else:
            accepted[value].add(field)
    large = set().union(*ACCEPTED.values())
    unbounded = set().union(*UNBOUNDED.values())
    assert accepted[10**18] == unbounded
    assert accepted[10**9] == large | unbounded
    assert accepted.keys() <= {0, -1, 10**9, 10**18}, (
        "what is not a number, or not one of 32 bits, is refused everywhere"
    )


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (
            "phases.2.algorithm.samples",
            10**9,
            "phases.grpo.algorithm.samples must be an integer from 1 to 65536, received the number 1000000000",
        ),
        (
            "phases.2.algorithm.samples",
            65_536 + 65_536 // 16,
            "phases.grpo.algorithm.samples must be an integer from 1 to 65536, received the number 69632",
        ),
        (
            "phases.2.batch.rows",
            200_000,
            "phases.grpo.algorithm.samples: 200,000 rows x 8 samples are 1,600,000 in one step, and at most 1,048,576 are held at "
            "once; lower it, or batch.rows",
        ),
        (
            "phases.2.algorithm",
            {"kind": "grpo", "minibatches": 128, "epochs": 1000},
            "phases.grpo.algorithm.epochs: 1,000 x 128 mini-batches are more than the 100,000 updates that a step may make; lower "
            "it, or minibatches",
        ),
        (
            "phases.0.optimizers.0.eps",
            1e-300,
            "phases.sft.optimizers.actor.eps: 1e-300 is nearer to 0 than the smallest number of 32 bits, about 1.2e-38, and would "
            "be taken for 0",
        ),
        (
            "evaluation.denoising.shift",
            1e-6,
            "evaluation.denoising.shift: a shift of 1e-06 leaves no noise in any step; use at least 0.001, or 0 for the model's "
            "own",
        ),
    ],
)  # fmt: skip
def test_the_sentence_says_the_limit(place: str, value: Any, sentence: str) -> None:
    at = tuple(int(key) if key.isdigit() else key for key in place.split("."))
    assert refusal(changed(BASES[0], at, value)) == sentence


def test_pictures_times_levels_are_held_at_once() -> None:
    plain = alone(BASES[1], ("phases", 5))[0]
    plain = changed(plain, ("phases", 0, "batch", "rows"), 1024)
    assert refusal(changed(plain, ("phases", 0, "algorithm", "terms"), 200)) == (
        "phases.flow_nft.algorithm.samples: 1,024 rows x 8 samples x 200 terms are 1,638,400 in one step, and at most 1,048,576 "
        "are held at once; lower it, or batch.rows"
    )
