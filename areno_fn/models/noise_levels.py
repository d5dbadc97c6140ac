"""How the flow-match Euler scheduler of a pipeline spaces noise levels, read strictly from its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from areno_fn.contracts.flow_adapter import NoiseLevels
from areno_fn.models.fields import Fields

_TRAINED = 1000


def euler_levels(
    config: Mapping[str, Any], tokens: int, *, even: bool, max_shift: float = 1.15, base_shift: float = 0.5
) -> NoiseLevels:
    """The levels of a FlowMatchEulerDiscreteScheduler.

    Args:
        config: scheduler_config.json.
        tokens: of one output, which a dynamic shift depends on.
        even: the pipeline hands over a grid from 1 to 1 / steps; else the scheduler's own ends at its lowest level.
        max_shift, base_shift: of the pipeline, where the configuration has none.

    Raises:
        ModelError: a field asks for what is not supported.
    """
    fields = Fields(config, "scheduler_config.json")
    shift = fields.number("shift", default=1.0, above=0)
    dynamic = fields.boolean("use_dynamic_shifting", default=False)
    low, high = fields.number("base_shift", default=base_shift), fields.number("max_shift", default=max_shift)
    short, long = (fields.integer(f"{name}_image_seq_len", default=n) for name, n in (("base", 256), ("max", 4096)))
    terminal = fields.number("shift_terminal", default=None)
    fields.expect("_class_name", "FlowMatchEulerDiscreteScheduler")
    fields.expect("num_train_timesteps", _TRAINED)
    fields.expect("time_shift_type", "exponential")
    for name in (
        "invert_sigmas",
        "use_karras_sigmas",
        "use_exponential_sigmas",
        "use_beta_sigmas",
        "stochastic_sampling",
    ):
        fields.expect(name, False)
    fields.skip(())
    fields.finish()
    trained = 1 / _TRAINED if dynamic else shift / _TRAINED / (1 + (shift - 1) / _TRAINED)
    if dynamic:
        shift = math.exp(low + (high - low) / (long - short) * (tokens - short))
    return NoiseLevels(shift=shift, lowest=None if even else trained, terminal=terminal)
