"""Cases of `token_logp`. Sizes are (M, V).

The variant says which logits are -inf: none, a part of each row, a part and in the first row all,
or all but the target (a greedy choice).
"""

from __future__ import annotations

from functools import partial

import attrs
import torch
from hypothesis import strategies as st

from areno_fn import random
from areno_fn.contracts.key import Key
from areno_fn.kernels.law import Arguments, Case, Cases, Floor, of_result, size_of
from areno_fn.kernels.token_logp import token_logp

VARIANTS = ("open", "truncated", "closed row", "greedy")


def build(case: Case, device: torch.device | str) -> Arguments:
    """The logits [M, V] and the targets [M]."""
    count, size = case.sizes
    logits = case.normal("logits", count, size, device=device) * case.magnitude
    targets = (random.uniform(Key.of(case.seed).fold("targets"), torch.arange(count)) * size).long().to(device)
    if case.variant in ("truncated", "closed row"):
        logits = logits.masked_fill(case.normal("closed", count, size, device=device) > 0.5, -torch.inf)
    if case.variant == "closed row":
        logits[:1] = -torch.inf
    if case.variant == "greedy":
        logits = logits.masked_fill(torch.arange(size, device=device) != targets.unsqueeze(1), -torch.inf)
    return Arguments(positional=(case.lay(logits), targets), moving=(0,))


def oracle(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula over the tokens that can be chosen; a row without any has logp -inf and entropy 0."""
    possible = logits > -torch.inf
    finite = torch.where(possible, logits, 0.0)
    shifted = finite - torch.where(possible, logits, -1e300).amax(-1, keepdim=True).detach()
    weight = torch.where(possible, shifted.exp(), 0.0)
    total = weight.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1.0)
    logp = shifted - total.log()
    entropy = -(weight / total * torch.where(possible, logp, 0.0)).sum(-1)
    barred = torch.where(possible, 0.0, -torch.inf)
    chosen = (logp + barred).gather(1, targets.unsqueeze(1)).squeeze(1)
    return chosen, entropy


def noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """All three are differences of terms that may be equal: in a row with one choice they are."""
    logits, targets = arguments.positional
    (dlogp,) = cotangents
    if not len(targets):
        return 0.0, 0.0, 0.0
    dlogits = dlogp.square().mean().sqrt().item() / logits.shape[1] ** 0.5
    return 1.0, 1.0, dlogits


def entropic_noise(arguments: Arguments, cotangents: tuple[torch.Tensor, ...]) -> tuple[float, ...]:
    """The same, and for the slope of the entropy the terms p_j log p_j and p_j H, which are equal where all p_j are."""
    logits, targets = arguments.positional
    dlogp, dentropy = cotangents
    first, second, dlogits = noise(arguments, (dlogp,))
    if not len(targets):
        return first, second, dlogits
    every = logits.log_softmax(-1).nan_to_num(nan=-torch.inf)
    weight, distance = every.exp(), torch.where(every > -torch.inf, every.abs(), 0.0)
    bends = weight * (distance + oracle(logits, targets)[1].unsqueeze(1)) * (1 + distance)
    return first, second, dlogits + size_of(dentropy.unsqueeze(1) * bends)


def forward_floor(case: Case) -> Floor:
    """Reads the logits and the targets, writes two numbers a row."""
    count, size = case.sizes
    return Floor(bytes=count * size * case.dtype.itemsize + count * 16, flops=5 * count * size)


def backward_floor(case: Case) -> Floor:
    """Reads the logits, the targets and three numbers a row, writes the gradient."""
    count, size = case.sizes
    return Floor(bytes=2 * count * size * case.dtype.itemsize + count * 20, flops=4 * count * size)


CASES = Cases(
    name="token_logp",
    function=token_logp,
    oracle=oracle,
    answered=(0,),
    build=build,
    strategy=st.builds(
        Case,
        sizes=st.tuples(st.integers(0, 6), st.integers(1, 300)),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        strided=st.booleans(),
        magnitude=st.sampled_from([1.0, 1e-3, 30.0, 1e4]),
        variant=st.sampled_from(VARIANTS),
        seed=st.integers(0, 9),
    ),
    wide=tuple(
        Case(sizes=(3, 9001), dtype=dtype, variant=variant, magnitude=3.0, strided=dtype == torch.float32)
        for dtype in (torch.float32, torch.bfloat16)
        for variant in VARIANTS
    ),
    hot=(
        Case(sizes=(4096, 151936), dtype=torch.bfloat16, variant="open", magnitude=3.0),
        Case(sizes=(2048, 151936), dtype=torch.bfloat16, variant="truncated", magnitude=3.0),
    ),
    tolerance=of_result,
    noise=noise,
    forward_floor=forward_floor,
    backward_floor=backward_floor,
)

ENTROPIC = attrs.evolve(CASES, function=partial(token_logp, entropic=True), answered=(0, 1), noise=entropic_noise)
"""Those of the entropy with a gradient."""
