"""What a specification to start from does not show, because models that make what its model makes refuse it."""

from __future__ import annotations

from typing import get_args

from msgspec import Struct

from areno_fn.contracts.spec import (
    AlgorithmSpec,
    ArithmeticData,
    Batch,
    ClipReward,
    DigitPairsData,
    DigitsData,
    Evaluation,
    FlowAlgorithm,
    HFModel,
    Medium,
    ModelReward,
    Phase,
    RunSpec,
    StoredData,
)

FIELDS: dict[Medium, dict[type[Struct], tuple[str, ...]]] = {
    "text": {
        HFModel: ("pipeline",),
        Phase: ("denoising",),
        Batch: ("micro_rows",),
        Evaluation: ("denoising",),
    },
    "pictures": {
        RunSpec: ("tokenizer", "consistency"),
        Phase: ("capture",),
        Batch: ("micro_tokens", "max_length", "overlong"),
        Evaluation: ("sampling",),
    },
}
"""By medium of the model, fields that `areno_fn.engine.media` and its neighbours let stand at their default alone."""

_CLASSES = (DigitsData, DigitPairsData)


def medium_of(spec: RunSpec) -> Medium:
    """What the model makes, by the algorithms that train it."""
    return "pictures" if any(isinstance(phase.algorithm, FlowAlgorithm) for phase in spec.phases) else "text"


def kinds_of_others(spec: RunSpec) -> tuple[type[Struct], ...]:
    """Algorithms, data and rewards of other models than this specification's."""
    algorithms = get_args(AlgorithmSpec)
    flow = tuple(kind for kind in algorithms if issubclass(kind, FlowAlgorithm))
    if medium_of(spec) == "text":
        return (*flow, *_CLASSES, ClipReward)
    prompted = isinstance(spec.model, HFModel) and spec.model.pipeline is not None
    data = _CLASSES if prompted else (StoredData,)
    return (*(kind for kind in algorithms if kind not in flow), ArithmeticData, ModelReward, *data)
