"""Texts that are read in parts, under a budget of tokens a step: the same bits, bounded parts, and nothing that is left over."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import STOP, VOCAB, Request, Shape, expected, same, served, tiny

from areno_fn import tree
from areno_fn.contracts.batch import Prompts
from areno_fn.contracts.errors import ModelError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import Pages
from areno_fn.contracts.spec import Sampling
from areno_fn.engine.serve import Server
from areno_fn.models import decoder_pages
from areno_fn.models.decoder import DecoderConfig, init
from areno_fn.models.decoder_forward import forward
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.token.batching import Batch
from areno_fn.steps.token.paged_rollout import PagedSampler
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.sequences import Prompt, Sample, Status

POLICY, PARAMS = tiny("qwen3")
KEY, SAMPLING = Key.of(5), Sampling(max_tokens=8)
CPU = torch.device("cpu")


def text(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@attrs.frozen
class Watched(DecoderPolicy):
    """A paged policy that counts the tokens, padding included, that are read at once, and the real ones."""

    sizes: list[int] = attrs.field(factory=list)
    parts: list[list[int]] = attrs.field(factory=list)

    def read_into(
        self,
        params: Any,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        pages: Pages,
        stored: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.sizes.append(tokens.numel())
        self.parts.append(lengths.tolist())
        return DecoderPolicy.read_into(self, params, tokens, lengths, table, pages, stored)


def batch_of(budget: int, rows: int = 2, pages: int = 60, page_size: int = 2) -> tuple[Batch, Watched]:
    watched = Watched(POLICY.config)
    fields = {"rows": rows, "pages": pages, "page_size": page_size, "longest": 40, "device": CPU}
    batch = Batch(watched, (), SAMPLING, PARAMS, read_tokens=budget, **fields)
    batch.load(PARAMS, KEY)
    return batch, watched


def asked(batch: Batch, prompt: list[int], names: tuple[int, ...], limit: int = 8) -> list[Sample]:
    shared = Prompt(tokens=prompt)
    made = [Sample(name=name, prompt=shared, limit=limit) for name in names]
    for sequence in made:
        batch.add(sequence)
    return made


def ended(batch: Batch) -> dict[int, list[int]]:
    """Steps to the end; the tokens of each sequence that did not end before."""
    done = {}
    for _ in range(300):
        for finished in batch.advance():
            for row, sequence in enumerate(finished.sequences):
                done[sequence.name] = finished.columns.tokens[row, : finished.columns.lengths[row]].tolist()
    assert batch.idle, "it has not come to its end"
    return done


def alone(prompt: list[int], name: int, limit: int = 8, params: Any = PARAMS) -> list[int]:
    prompts = Prompts(tokens=torch.tensor([prompt]), lengths=torch.tensor([len(prompt)]), ids=torch.tensor([name]))
    out = sampler(POLICY, ())(params, prompts, KEY, Sampling(max_tokens=limit))
    return out.tokens[0, : out.lengths[0]].tolist()


# ---------------------------------------------------------------------------------------- the model


@settings(max_examples=12, deadline=None)
@given(data=st.data(), family=st.sampled_from(["qwen3", "llama"]), page_size=st.sampled_from([1, 3, 4, 16]))
def test_parts_of_texts_side_by_side_give_the_logits_of_the_whole(
    data: st.DataObject, family: str, page_size: int
) -> None:
    policy, params = tiny(family)
    ends = data.draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
    texts = [text(sum(parts), seed) for seed, parts in enumerate(ends)]
    width = -(-max(map(len, texts)) // page_size)
    pages = policy.pages(params, 1 + width * len(texts), page_size)
    for leaf in (*pages.keys, *pages.values):
        leaf.fill_(1e3)
    table = 1 + torch.randperm(width * len(texts), generator=torch.Generator().manual_seed(1)).view(-1, width)
    stored = torch.zeros(len(texts), dtype=torch.int64)
    for turn in range(max(map(len, ends))):
        rows = torch.tensor([row for row, parts in enumerate(ends) if turn < len(parts)])
        lengths = torch.tensor([ends[row][turn] for row in rows.tolist()])
        tokens = torch.full((len(rows), int(lengths.max())), -1)
        for i, row in enumerate(rows.tolist()):
            begin = int(stored[row])
            tokens[i, : lengths[i]] = torch.tensor(texts[row][begin : begin + int(lengths[i])])
        got = policy.read_into(params, tokens, lengths, table[rows], pages, stored[rows])
        stored[rows] += lengths
        for i, row in enumerate(rows.tolist()):
            n = int(stored[row])
            whole = forward(
                params, policy.config, torch.tensor(texts[row][:n]), torch.arange(n), torch.zeros(n, dtype=torch.int64)
            )
            torch.testing.assert_close(got[i], whole[-1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [(1, 699), (190, 200, 310), (500, 12, 188)])
@pytest.mark.parametrize("mode", ["ordinary", "bitwise"])
def test_a_long_text_has_the_same_bits_in_parts(cuts: tuple[int, ...], mode: Any) -> None:
    config = DecoderConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16,
        tie_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    params, policy = init(config, Key.of(1)), DecoderPolicy(config, consistency=mode)
    tokens, table = torch.tensor([text(sum(cuts), 2, 97)]), torch.arange(1, 24)[None]
    whole, parts = policy.pages(params, 24, 32), policy.pages(params, 24, 32)
    want = policy.read_into(params, tokens, torch.tensor([sum(cuts)]), table, whole)
    begin = 0
    for cut in cuts:
        stored, length = torch.tensor([begin]), torch.tensor([cut])
        got = policy.read_into(params, tokens[:, begin : begin + cut], length, table, parts, stored)
        begin += cut
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    at_once = forward(params, config, tokens[0], torch.arange(begin), torch.zeros_like(tokens[0]))
    if torch.equal(want[0], at_once[-1]):  # where the BLAS adds up rows alike, so must parts
        assert torch.equal(got, want)
        assert all(torch.equal(a[1:], b[1:]) for a, b in zip(parts.keys, whole.keys, strict=True))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_layers_in_fewer_passes_read_parts_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, params = tiny(family)
    monkeypatch.setattr(decoder_pages, "takes", lambda x, size: True)
    tokens, table = torch.tensor([text(11)]), torch.tensor([[3, 1, 2]])
    pages = policy.pages(params, 4, 4)
    for begin, end in ((0, 5), (5, 6), (6, 11)):
        stored, length = torch.tensor([begin]), torch.tensor([end - begin])
        got = policy.read_into(params, tokens[:, begin:end], length, table, pages, stored)
    want = forward(params, policy.config, tokens[0], torch.arange(11), torch.zeros_like(tokens[0]))
    torch.testing.assert_close(got[0], want[-1], atol=2e-5, rtol=1e-5)


def test_parts_that_do_not_fit_are_refused() -> None:
    pages, tokens, table = POLICY.pages(PARAMS, 4, 4), torch.ones(1, 3, dtype=torch.int64), torch.tensor([[1, 2]])
    lengths = torch.tensor([3])
    with pytest.raises(ModelError, match=r"stored must be \[B\] for 1 rows, received \[2\]"):
        POLICY.read_into(PARAMS, tokens, lengths, table, pages, torch.tensor([1, 1]))
    for stored in (-1, 6):
        with pytest.raises(
            ModelError, match=rf"must fit the 2 pages of 4 tokens .* received \[{stored}\] before \[3\]"
        ):
            POLICY.read_into(PARAMS, tokens, lengths, table, pages, torch.tensor([stored]))


# ---------------------------------------------------------------------------------------- rollouts


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    budget=st.integers(1, 50),
    page_size=st.sampled_from([1, 3, 8]),
    rows=st.sampled_from([1, 2, 5, None]),
    tight=st.booleans(),
)
def test_a_rollout_is_the_plain_one_bit_for_bit_and_no_step_reads_more_than_its_budget(
    lengths: list[int], budget: int, page_size: int, rows: int | None, tight: bool
) -> None:
    tokens = torch.tensor([[*text(n, n), *[0] * (30 - n)] for n in lengths])
    prompts = Prompts(tokens=tokens, lengths=torch.tensor(lengths), ids=torch.arange(len(lengths)) * 3)
    watched = Watched(POLICY.config)
    longest = max(lengths) + SAMPLING.max_tokens
    memory = POLICY.page_bytes(PARAMS, page_size) * (2 + -(-longest // page_size)) if tight else None
    paged = PagedSampler(watched, STOP, page_size=page_size, memory=memory, read_tokens=budget)
    got = paged(PARAMS, prompts, KEY, SAMPLING, samples=2, max_rows=rows)
    want = sampler(POLICY, STOP)(PARAMS, prompts, KEY, SAMPLING, samples=2)
    assert tree.first_difference(got, want) is None
    assert max(watched.sizes) <= budget
    if rows is None and not tight:
        assert sum(map(sum, watched.parts)) == sum(lengths), "a prompt is read once for its samples"


def test_the_others_go_on_while_a_long_prompt_is_read() -> None:
    batch, watched = batch_of(budget=4)
    asked(batch, [1, 2], (1,))
    batch.advance()
    asked(batch, text(18), (2, 3))
    done = {}
    while not done:
        done = {s.name: f.columns.tokens[0].tolist() for f in batch.advance() for s in f.sequences}
    assert done == {1: alone([1, 2], 1)}
    assert watched.parts == [[2], [4], [4], [4], [4], [2]]
    assert ended(batch) == {name: alone(text(18), name) for name in (2, 3)}
    assert watched.parts == [[2], [4], [4], [4], [4], [2]]


def test_texts_that_do_not_fit_beside_the_first_come_with_the_next_step() -> None:
    batch, watched = batch_of(budget=10, rows=8)
    for name, length in enumerate((3, 3, 3, 3, 23, 2, 2)):
        asked(batch, text(length), (name,))
    want = {name: alone(text(length), name) for name, length in enumerate((3, 3, 3, 3, 23, 2, 2))}
    assert ended(batch) == want
    assert watched.parts == [[3, 3, 3], [3], [10], [10], [3, 2, 2]]
    assert max(watched.sizes) <= 10


# ---------------------------------------------------------------------------------------- who leaves


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_cancelling_a_prompt_that_is_half_read_frees_its_pages(steps: int) -> None:
    batch, watched = batch_of(budget=5)
    first, second = asked(batch, text(18), (1, 2))
    for _ in range(steps):
        assert batch.advance() == []
    assert batch.free_pages == 59 - 9 and watched.parts == [[5]] * steps
    batch.cancel(first)
    assert batch.free_pages == 59
    assert ended(batch) == {2: alone(text(18), 2)}
    assert batch.free_pages == 59 and second.pages == []


def test_R3_new_weights_while_a_prompt_is_half_read_leave_nothing_of_the_old() -> None:
    moved = tree.map(lambda x: x * 1.3, PARAMS)
    batch, watched = batch_of(budget=5)
    asked(batch, text(18), (1, 2))
    batch.advance()
    batch.advance()
    batch.load(moved, KEY)
    assert batch.free_pages == 59
    assert ended(batch) == {name: alone(text(18), name, params=moved) for name in (1, 2)}
    assert watched.parts == [[5], [5], [5], [5], [5], [3]]


def test_an_older_sequence_that_grows_takes_the_pages_of_a_text_that_is_half_read() -> None:
    batch, watched = batch_of(budget=3, pages=1 + 21)
    (old,) = asked(batch, text(20), (1,))
    (young,) = asked(batch, text(18, 7), (2,))
    held = []
    while old.status is not Status.DONE:
        batch.advance()
        held.append(len(young.pages))
    assert 9 in held and held[-1] == 0, "it was half read, and lost its pages"
    assert ended(batch)[2] == alone(text(18, 7), 2)
    assert watched.parts[-6:] == [[3]] * 6 and sum(map(sum, watched.parts)) > 38


def test_a_prompt_may_be_cancelled_and_asked_for_again_on_a_server() -> None:
    serving = Server(POLICY, STOP, SAMPLING, PARAMS, KEY, rows=2, pages=40, page_size=2, longest=40, read_tokens=3)
    serving.submit(text(20), (1,))
    serving.step()
    serving.cancel(1)
    assert serving.free_pages == 39
    serving.submit(text(9), (1, 2))
    wanted = expected(POLICY, PARAMS, KEY, SAMPLING, [((*text(9),), 1, 8), ((*text(9),), 2, 8)])
    done = {completion.name: completion for completion in serving.drain()}
    assert all(same(done[want.name], want) for want in wanted) and serving.free_pages == 39


@settings(max_examples=12, deadline=None)
@given(data=st.data(), budget=st.integers(1, 40), page_size=st.sampled_from([1, 2, 8]), spare=st.integers(0, 12))
def test_requests_that_come_and_go_get_what_they_get_alone(
    data: st.DataObject, budget: int, page_size: int, spare: int
) -> None:
    requests, named = [], 0
    for _ in range(data.draw(st.integers(1, 6))):
        names = tuple(range(named, named + data.draw(st.integers(1, 3))))
        named += len(names)
        cancelled = {name: data.draw(st.integers(0, 10)) for name in names if data.draw(st.booleans())}
        prompt = tuple(text(data.draw(st.integers(1, 24)), named))
        requests.append(
            Request(prompt=prompt, names=names, limit=8, arrives=data.draw(st.integers(0, 6)), cancelled=cancelled)
        )
    shape = Shape(rows=3, page_size=page_size, spare=spare, read_tokens=budget)
    done = served(POLICY, PARAMS, KEY, SAMPLING, shape, requests)
    for want in expected(POLICY, PARAMS, KEY, SAMPLING, [(r.prompt, n, 8) for r in requests for n in r.names]):
        assert want.name in done or any(want.name in r.cancelled for r in requests)
        assert want.name not in done or same(done[want.name], want)


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="needs read_tokens of at least 1, received 0"):
        PagedSampler(POLICY, (), read_tokens=0)
    with pytest.raises(SpecError, match="needs read_tokens of at least 1, received 0"):
        batch_of(budget=0)
