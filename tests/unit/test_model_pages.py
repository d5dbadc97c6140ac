"""The decoder on pages: against the one-shot forward pass, and what is refused."""

from __future__ import annotations

import pytest
import torch
from serving import tiny

from areno_fn.contracts.errors import KernelError, ModelError
from areno_fn.contracts.pages import Pages
from areno_fn.kernels.paged_attention import paged_attention
from areno_fn.models import decoder_pages
from areno_fn.models.decoder_forward import forward

POLICY, PARAMS = tiny("qwen3")
TABLE = torch.tensor([[4, 1, 7], [2, 9, 3], [5, 6, 8]])


def cache() -> Pages:
    pages = POLICY.pages(PARAMS, 10, 4)
    for leaf in (*pages.keys, *pages.values):
        leaf.fill_(1e3)
    return pages


def one_shot(tokens: torch.Tensor) -> torch.Tensor:
    n = tokens.shape[0]
    return forward(PARAMS, POLICY.config, tokens, torch.arange(n), torch.zeros(n, dtype=torch.int64))


@pytest.mark.parametrize("filler", [0, -1, 10**9])
def test_reading_on_pages_equals_the_one_shot_forward(filler: int) -> None:
    tokens = torch.randint(0, 61, (3, 12), generator=torch.Generator().manual_seed(0))
    lengths, pages = torch.tensor([5, 1, 8]), cache()
    given = tokens[:, :8].masked_fill(torch.arange(8) >= lengths[:, None], filler)
    answers = [POLICY.read_into(PARAMS, given, lengths, TABLE[:, :2], pages)]
    for step in range(4):
        at = lengths + step
        answers.append(POLICY.read_next(PARAMS, tokens[torch.arange(3), at], at, TABLE, pages, None if step else 8))
    for row, length in enumerate((5, 1, 8)):
        wanted = one_shot(tokens[row, : length + 4])[length - 1 :]
        torch.testing.assert_close(torch.stack([x[row] for x in answers]), wanted, atol=1e-5, rtol=1e-5)
    for leaf in (*pages.keys, *pages.values):
        assert bool((leaf[3] == 1e3).all()), "page 3 holds places that were never written"
        assert bool((leaf[0, 1:] == 1e3).all()), "only the first place of page 0 is written"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_layers_in_fewer_passes_give_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, params = tiny(family)
    tokens, lengths = torch.randint(0, 61, (3, 8), generator=torch.Generator().manual_seed(0)), torch.tensor([5, 1, 8])
    answers = []
    for fused in (False, True):
        monkeypatch.setattr(decoder_pages, "takes", lambda x, size, fused=fused: fused)
        pages = policy.pages(params, 10, 4)
        first = policy.read_into(params, tokens, lengths, TABLE, pages)
        answers.append((first, policy.read_next(params, first.argmax(-1), lengths, TABLE, pages), *pages.keys))
    for plain, few in zip(*answers, strict=True):
        torch.testing.assert_close(few, plain, atol=1e-5, rtol=1e-5)


def test_the_bytes_of_a_page_are_what_it_occupies() -> None:
    pages = POLICY.pages(PARAMS, 10, 4)
    assert POLICY.page_bytes(PARAMS, 4) * 10 == sum(x.nbytes for x in (*pages.keys, *pages.values))


def test_what_cannot_be_read_is_refused() -> None:
    pages, tokens = cache(), torch.ones(3, 4, dtype=torch.int64)
    lengths = torch.tensor([4, 4, 4])
    with pytest.raises(ModelError, match=r"received \[3, 4\], \[2\] and \[3, 3\]"):
        POLICY.read_into(PARAMS, tokens, lengths[:2], TABLE, pages)
    with pytest.raises(ModelError, match=r"lengths must lie in \[1, 4\] and fit the 3 pages of 4"):
        POLICY.read_into(PARAMS, tokens, torch.tensor([4, 0, 4]), TABLE, pages)
    with pytest.raises(ModelError, match=r"fit the 1 pages of 4 tokens a row has, received \[5, 4, 4\]"):
        POLICY.read_into(PARAMS, torch.ones(3, 5, dtype=torch.int64), torch.tensor([5, 4, 4]), TABLE[:, :1], pages)
    with pytest.raises(ModelError, match="token 61 is outside the vocabulary"):
        POLICY.read_into(PARAMS, tokens * 61, lengths, TABLE, pages)
    with pytest.raises(
        ModelError, match=r"stored must be \[B\] and table \[B, W\] for 3 rows, received \[2\] and \[3, 3\]"
    ):
        POLICY.read_next(PARAMS, tokens[:, 0], lengths[:2], TABLE, pages)
    with pytest.raises(ModelError, match="a row has no room for its next token, the table holds 12 places a row"):
        POLICY.read_next(PARAMS, tokens[:, 0], torch.tensor([4, 12, 4]), TABLE, pages)


def test_attention_refuses_what_does_not_fit() -> None:
    q, keys = torch.zeros(3, 4, 8), torch.zeros(10, 4, 2, 8)
    lengths = torch.ones(3, dtype=torch.int64)
    assert paged_attention(q[:0], keys, keys, TABLE[:0], lengths[:0], 1.0).shape == (0, 4, 8)
    for wrong in (
        (q[0], keys, keys, TABLE, lengths),
        (q, keys, keys[..., :4], TABLE, lengths),
        (q[:, :3], keys, keys, TABLE, lengths),
        (q.double(), keys, keys, TABLE, lengths),
        (q, keys, keys, TABLE.int(), lengths),
        (q, keys, keys, TABLE, lengths[:2]),
    ):
        with pytest.raises(KernelError, match=r"paged_attention: q must be \[B, H, head_dim\]"):
            paged_attention(*wrong, 1.0)
    with pytest.raises(KernelError, match="neither the window nor the soft cap negative"):
        paged_attention(q, keys, keys, TABLE, lengths, 1.0, window=-1)
