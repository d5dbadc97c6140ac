"""`linear_token_loss` in bfloat16, whose logits are never written: each row against float64, wherever its target lies."""

from __future__ import annotations

import pytest
import torch

from areno_fn.kernels.backend import BACKENDS
from areno_fn.kernels.linear_token_loss import linear_token_loss, powers
from areno_fn.kernels.ordered_linear.triton import Tile

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # as a GPU does not either

SCALE = 0.7
COUNT, WIDTH, SIZE = 40, 32, 200


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, the last ones ragged, by the Triton kernels."""
    monkeypatch.setitem(BACKENDS, "cpu", "triton")
    monkeypatch.setattr(powers, "MADE", Tile(16, 32, 16, 4, 2))


def drawn(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, targets and slopes."""
    source = torch.Generator().manual_seed(seed)
    hidden = torch.randn(COUNT, WIDTH, generator=source).bfloat16()
    weight = (torch.randn(SIZE, WIDTH, generator=source) * 3 / WIDTH**0.5).bfloat16()
    targets = torch.randint(SIZE, (COUNT,), generator=source)
    return hidden, weight, targets, torch.randn(COUNT, generator=source)


def compare(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, slopes: torch.Tensor, scale: float = SCALE
) -> None:
    """Everything that comes out, row by row, against float64."""
    given = tuple(x.detach().requires_grad_() for x in (hidden, weight))
    lever, logp, entropy = linear_token_loss(
        *given, targets, lambda first, logp, _: slopes[first : first + len(logp)], scale, chunk=16 * SIZE
    )
    got = torch.autograd.grad(lever, given)
    exact = tuple(x.detach().double().requires_grad_() for x in (hidden, weight))
    every = (exact[0] @ exact[1].t() * scale).log_softmax(-1)
    want_logp = every.gather(1, targets[:, None])[:, 0]
    want = torch.autograd.grad((want_logp * slopes.double()).sum(), exact)
    size = 1 + want_logp.detach().abs().max()
    assert (logp.double() - want_logp).abs().max() <= 1.6e-5 + 1e-6 * size
    torch.testing.assert_close(entropy.double(), -(every.exp() * every).sum(-1).detach(), rtol=1e-4, atol=2e-4)
    rows = (got[0].double() - want[0]).norm(dim=1) / (want[0].norm(dim=1) + 1e-9)
    # the interpreter cuts float32 off to bfloat16, where a GPU rounds
    assert rows.max() < 1.2e-2
    assert (got[1].double() - want[1]).norm() <= 1.2e-2 * want[1].norm()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whether rows had to be made again, part by part."""
    seen: list[int] = []
    write = powers.write

    def watched(*arguments: object) -> torch.Tensor:
        made: torch.Tensor = write(*arguments)  # type: ignore[arg-type]
        (parts,) = (x for x in arguments if isinstance(x, powers.Parts))
        seen.append(int(parts.far))
        return made

    monkeypatch.setattr(powers, "write", watched)
    return seen


@pytest.mark.parametrize("scale", [0.7, -0.7, 3.0])
def test_rows_of_any_target_are_those_of_float64(ranges: list[int], scale: float) -> None:
    compare(*drawn(), scale=scale)
    assert ranges == [0, 0, 0]


def test_a_target_that_is_nearly_certain_keeps_its_gradient(ranges: list[int]) -> None:
    """Its slope is 1 - p, which would be nothing if p were rounded first."""
    hidden, weight, targets, slopes = drawn()
    hidden[::3] = (weight[targets[::3]].float() * 3).bfloat16()
    sure = (hidden.double() @ weight.double().t() * SCALE).softmax(-1).gather(1, targets[:, None])[::3]
    assert sure.max() > 0.999
    compare(hidden, weight, targets, slopes)
    assert ranges == [0, 0, 0]


def test_a_target_that_is_nearly_impossible_is_made_again(ranges: list[int]) -> None:
    """Its row holds logits hundreds above its own, out of any range that begins there; rows beside it keep their bits."""
    hidden, weight, targets, slopes = drawn()
    alone = linear_token_loss(hidden, weight, targets, lambda first, logp, _: slopes[first : first + len(logp)])
    far = hidden.clone()
    far[5] *= 100
    far[17] *= 30
    worst = (far.double() @ weight.double().t() * SCALE).log_softmax(-1).gather(1, targets[:, None]).min()
    assert worst < -200
    compare(far, weight, targets, slopes)
    assert ranges[-3:] == [1, 1, 0]
    beside = linear_token_loss(far, weight, targets, lambda first, logp, _: slopes[first : first + len(logp)])
    kept = [i for i in range(COUNT) if i not in (5, 17)]
    assert torch.equal(alone[1][kept], beside[1][kept]) and torch.equal(alone[2][kept], beside[2][kept])


def test_logits_that_are_all_one_number_are_even_odds() -> None:
    hidden, weight, targets, slopes = drawn()
    weight[:] = weight[0]
    _, logp, entropy = linear_token_loss(
        hidden, weight, targets, lambda first, logp, _: slopes[first : first + len(logp)]
    )
    even = torch.full((COUNT,), float(SIZE)).log()
    torch.testing.assert_close(logp, -even)
    torch.testing.assert_close(entropy, even)


def test_a_vocabulary_of_one_and_rows_of_weight_zero() -> None:
    hidden, weight, targets, slopes = drawn()
    given = hidden.requires_grad_(), weight[:1].clone().requires_grad_()
    lever, logp, entropy = linear_token_loss(*given, targets * 0, lambda first, logp, _: logp + 1)
    assert not logp.any() and entropy.abs().max() < 1e-5
    assert not any(x.any() for x in torch.autograd.grad(lever, given))
    slopes[:] = 0
    compare(hidden.detach(), weight, targets, slopes)


def test_what_is_no_number_stays_in_its_row() -> None:
    hidden, weight, targets, slopes = drawn()
    hidden[3, 2] = torch.nan
    given = hidden.requires_grad_(), weight
    lever, logp, _ = linear_token_loss(*given, targets, lambda first, logp, _: slopes[first : first + len(logp)])
    (into_hidden,) = torch.autograd.grad(lever, given[:1])
    rows = [i for i in range(COUNT) if i != 3]
    assert logp[3].isnan() and not logp[rows].isnan().any() and not into_hidden[rows].isnan().any()


def test_a_target_outside_the_vocabulary_is_no_number() -> None:
    hidden, weight, targets, slopes = drawn()
    targets[4], targets[7] = -100, SIZE
    _, logp, entropy = linear_token_loss(
        hidden, weight, targets, lambda first, logp, _: slopes[first : first + len(logp)]
    )
    assert logp[[4, 7]].isnan().all() and logp.isnan().sum() == 2
    every = (hidden.double() @ weight.double().t()).log_softmax(-1)
    torch.testing.assert_close(entropy.double(), -(every.exp() * every).sum(-1), rtol=1e-4, atol=2e-4)
