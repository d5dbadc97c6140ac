"""How the scheduler of a pipeline spaces noise levels, read strictly from its configuration."""

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


def unipc_levels(config: Mapping[str, Any]) -> NoiseLevels:
    """The levels of a UniPCMultistepScheduler of second order that predicts velocities, as Wan is sampled.

    Args:
        config: scheduler_config.json.

    Raises:
        ModelError: a field asks for what is not supported.
    """
    fields = Fields(config, "scheduler_config.json")
    shift = fields.number("flow_shift", default=1.0, above=0)
    for name, value in _UNIPC.items():
        fields.expect(name, value)
    fields.expect("num_train_timesteps", _TRAINED)
    fields.skip(_NOT_READ)
    fields.finish()
    if not (config.get("use_flow_sigmas") and config.get("prediction_type")):
        raise fields.error(
            'use_flow_sigmas must be true and prediction_type "flow_prediction", which are not its defaults'
        )
    return NoiseLevels(shift=shift, solver="unipc")


_UNIPC: dict[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "predict_x0": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "final_sigmas_type": "zero",
    "lower_order_final": True,
    "thresholding": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_dynamic_shifting": False,
    "rescale_betas_zero_snr": False,
    "solver_p": None,
    "disable_corrector": [],
    "shift_terminal": None,
}
_NOT_READ = (
    "beta_start", "beta_end", "beta_schedule", "trained_betas", "dynamic_thresholding_ratio", "sample_max_value",
    "timestep_spacing", "steps_offset", "time_shift_type", "sigma_min", "sigma_max",
)  # fmt: skip
"""Fields without a meaning where sigmas are those of flow matching."""
