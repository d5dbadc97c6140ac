"""How fast a policy that samples, or is compared with, forgets: decays as functions of the step."""

from __future__ import annotations

from areno_fn.contracts.errors import SpecError


def ramped_decay(step: int, *, rate: float, cap: float, start: float = 0.0, flat: int = 0) -> float:
    """The decay d of s <- d s + (1 - d) p at a step: 0 before `flat`, then min(cap, start + rate (step - flat)).

    | copy | start | flat | rate | cap |
    | --- | --- | --- | --- | --- |
    | sampler of DiffusionNFT (arXiv 2509.16117), two published ones | 0 | 0 | .001 | .5 |
    | | 0 | 75 | .0075 | .999 |
    | old policy of DGPO (2510.08425) | 0 | 0 | .001 | .3 |
    | old policy of CRD (2603.14128) | .25 | 0 | .005 | .999 |
    | sampler of CRD | 0 | 75 | .0075 | .999 |
    | slow surrogate of TDM-R1 (2603.07700) | .001 | 0 | .001 | .3 |

    Args:
        step: counted from 0, in optimizer steps or iterations as the algorithm has it.
        rate: what a step adds.
        cap: the largest decay, at most 1.
        start: the decay where the ramp begins.
        flat: the step where it begins; before, the copy is the policy itself.

    Raises:
        SpecError: a number is out of range.
    """
    if step < 0 or flat < 0 or rate < 0 or not 0 <= start <= cap <= 1:
        raise SpecError(
            f"a ramped decay needs step, flat and rate at least 0 and 0 <= start <= cap <= 1, "
            f"received step={step}, flat={flat}, rate={rate}, start={start}, cap={cap}"
        )
    return 0.0 if step < flat else min(cap, start + rate * (step - flat))
