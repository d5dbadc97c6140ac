"""Rollouts on pages against `sampler`, which knows no pages; what is read, and when pages are taken and given back."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import attrs
import pytest
import torch
from serving import STOP, tiny

from areno_fn import tree
from areno_fn.contracts.batch import Prompts, Rollout
from areno_fn.contracts.errors import DataError, ModelError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.pages import PagedPolicy, Pages
from areno_fn.contracts.spec import Sampling
from areno_fn.models.decoder_forward import forward
from areno_fn.steps.token.batching import Batch
from areno_fn.steps.token.graphs import Steps, buckets
from areno_fn.steps.token.lanes import Lanes
from areno_fn.steps.token.paged_rollout import PagedSampler
from areno_fn.steps.token.rollout import sampler
from areno_fn.steps.token.sequences import Prompt, Sample

POLICY, PARAMS = tiny("qwen3")
KEY = Key.of(1)
PLAIN = Sampling(max_tokens=12)
CUT = Sampling(max_tokens=12, temperature=0.7, top_k=30, top_p=0.95, min_p=0.01)


def prompts(lengths: tuple[int, ...] = (7, 1, 3, 5, 2)) -> Prompts:
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, POLICY.vocab_size, (len(lengths), max(lengths)), generator=source)
    ids = torch.tensor([5, 2, 90, 11, 4][: len(lengths)])
    return Prompts(tokens=tokens, lengths=torch.tensor(lengths), ids=ids)


@attrs.frozen
class Noted:
    """A paged policy that notes what it is asked to read."""

    inner: Any
    texts: list[list[int]] = attrs.field(factory=list)
    rows: list[int] = attrs.field(factory=list)
    made: list[int] = attrs.field(factory=list)

    @property
    def vocab_size(self) -> int:
        return int(self.inner.vocab_size)

    @property
    def max_positions(self) -> int:
        return int(self.inner.max_positions)

    def hidden(self, *args: Any, **fields: Any) -> torch.Tensor:
        raise AssertionError("a rollout does not score")

    def logits(self, params: Any, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a rollout does not score")

    def prefill(self, *args: Any) -> Any:
        raise AssertionError("a rollout on pages has no plain cache")

    def decode(self, *args: Any) -> Any:
        raise AssertionError("a rollout on pages has no plain cache")

    def pages(self, params: Any, count: int, size: int) -> Pages:
        self.made.append(count)
        pages: Pages = self.inner.pages(params, count, size)
        for leaf in tree.leaves(pages):
            leaf.fill_(3e3)  # what was there before must not matter
        return pages

    def page_bytes(self, params: Any, size: int) -> int:
        return int(self.inner.page_bytes(params, size))

    def read_into(
        self, params: Any, tokens: Any, lengths: Any, table: Any, pages: Any, stored: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.texts.append(lengths.tolist())
        out: torch.Tensor = self.inner.read_into(params, tokens, lengths, table, pages, stored)
        return out

    def read_next(
        self, params: Any, tokens: Any, stored: Any, table: Any, pages: Any, longest: int | None = None
    ) -> torch.Tensor:
        self.rows.append(tokens.shape[0])
        out: torch.Tensor = self.inner.read_next(params, tokens, stored, table, pages, longest)
        return out


def same_bits(got: Rollout, want: Rollout) -> None:
    assert tree.first_difference(got, want) is None


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
@pytest.mark.parametrize("page_size", [1, 3, 32])
def test_a_rollout_on_pages_is_the_plain_one_bit_for_bit(family: str, sampling: Sampling, page_size: int) -> None:
    policy, params = tiny(family)
    want = sampler(policy, STOP)(params, prompts(), KEY, sampling, samples=4)
    assert want.lengths.unique().shape[0] > 3
    paged = PagedSampler(policy, STOP, page_size=page_size)
    same_bits(paged(params, prompts(), KEY, sampling, samples=4), want)
    same_bits(paged(params, prompts(), KEY, sampling, samples=4, max_rows=3), want)


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_a_cache_that_holds_one_sequence_is_enough(page_size: int) -> None:
    pages = 1 + -(-19 // page_size)
    memory = pages * POLICY.page_bytes(PARAMS, page_size)
    want = sampler(POLICY, STOP)(PARAMS, prompts(), KEY, CUT, samples=4)
    noted = Noted(POLICY)
    same_bits(
        PagedSampler(noted, STOP, page_size=page_size, memory=memory)(PARAMS, prompts(), KEY, CUT, samples=4), want
    )
    assert noted.made == [pages]
    with pytest.raises(
        SpecError, match=f"{pages} pages, which hold one sequence of 19 tokens, received 20 and {pages - 1}"
    ):
        PagedSampler(POLICY, STOP, page_size=page_size, memory=memory - 1)(PARAMS, prompts(), KEY, CUT, samples=4)


def test_a_prompt_is_read_once_for_its_samples_and_lanes_close_up() -> None:
    noted = Noted(POLICY)
    out = PagedSampler(noted, STOP, page_size=4)(PARAMS, prompts((7, 5)), KEY, PLAIN, samples=8)
    assert noted.texts == [[7, 5]]
    assert noted.rows[0] == 16 and noted.rows[-1] < 16 and set(noted.rows) <= set(buckets(16))
    assert len(noted.rows) <= int(out.lengths.max())


def test_a_prompt_is_read_once_also_when_its_samples_come_one_after_the_other() -> None:
    noted = Noted(POLICY)
    want = sampler(POLICY, STOP)(PARAMS, prompts((7, 5)), KEY, PLAIN, samples=6)
    same_bits(PagedSampler(noted, STOP, page_size=4)(PARAMS, prompts((7, 5)), KEY, PLAIN, samples=6, max_rows=2), want)
    assert sorted(n for texts in noted.texts for n in texts) == [5, 7]


def test_the_cache_is_made_once_and_made_again_for_longer_sequences() -> None:
    noted = Noted(POLICY)
    paged = PagedSampler(noted, STOP, page_size=4)
    for count in (5, 3, 5):
        lengths = (7, 1, 3, 5, 2)[:count]
        want = sampler(POLICY, STOP)(PARAMS, prompts(lengths), KEY, PLAIN)
        same_bits(paged(PARAMS, prompts(lengths), KEY, PLAIN), want)
    assert len(noted.made) == 1
    paged(PARAMS, prompts((20,)), KEY, PLAIN)
    assert len(noted.made) == 2
    paged.release()
    paged(PARAMS, prompts((20,)), KEY, PLAIN)
    assert len(noted.made) == 3


@pytest.mark.parametrize("after", [1, 2, 6])
def test_a_call_that_was_interrupted_leaves_nothing_for_the_next_one(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = prompts((3, 2))
    want = PagedSampler(POLICY, (0,))(PARAMS, few, KEY, PLAIN, 2, 3)
    drawing, launch, left = PagedSampler(POLICY, (0,)), Batch._launch, iter(range(after))

    def interrupted(self: Batch) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        launch(self)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Batch, "_launch", interrupted)
        drawing(PARAMS, prompts(), KEY, PLAIN, 3, 3)
    assert tree.first_difference(drawing(PARAMS, few, KEY, PLAIN, 2, 3), want) is None


def test_R3_after_an_update_nothing_of_the_old_weights_is_left() -> None:
    paged = PagedSampler(POLICY, STOP, page_size=4)
    paged(PARAMS, prompts(), KEY, PLAIN, samples=2)
    moved = tree.map(lambda x: x * 1.5, PARAMS)
    want = sampler(POLICY, STOP)(moved, prompts(), KEY, PLAIN, samples=2)
    same_bits(paged(moved, prompts(), KEY, PLAIN, samples=2), want)
    row = int(want.lengths.argmax())
    tokens = torch.cat([want.prompts.tokens[row, : want.prompts.lengths[row]], want.tokens[row, : want.lengths[row]]])
    n = tokens.shape[0]
    logits = forward(moved, POLICY.config, tokens, torch.arange(n), torch.zeros(n, dtype=torch.int64))
    fresh = logits.double().log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)[-int(want.lengths[row]) :]
    torch.testing.assert_close(want.logp[row, : want.lengths[row]].double(), fresh, rtol=0, atol=1e-5)


def small(rows: int, pages: int, page_size: int = 2, stop: tuple[int, ...] = ()) -> tuple[Batch, Noted]:
    noted = Noted(POLICY)
    fields = {"rows": rows, "pages": pages, "page_size": page_size, "longest": 16, "device": torch.device("cpu")}
    batch = Batch(noted, stop, Sampling(max_tokens=8), PARAMS, **fields)
    batch.load(PARAMS, KEY)
    return batch, noted


def asked(batch: Batch, prompt: list[int], count: int, limit: int = 8) -> list[Sample]:
    shared = Prompt(tokens=prompt)
    made = [Sample(name=i, prompt=shared, limit=limit) for i in range(count)]
    for sequence in made:
        batch.add(sequence)
    return made


def test_pages_are_taken_as_sequences_grow_and_shared_until_they_are_written() -> None:
    batch, _ = small(rows=3, pages=40)
    asked(batch, [1, 2, 3, 4, 5], 3)
    used = []
    while not batch.idle:
        batch.advance()
        used.append(39 - batch.free_pages)
    # 3 pages of the prompt, of which the last one is written by each: 2 + 3; place 6 opens another page for each, and so on
    assert used == [5, 8, 8, 11, 11, 14, 0]


def test_the_sequence_that_came_last_waits_when_no_page_is_left_and_is_read_again() -> None:
    batch, noted = small(rows=2, pages=1 + 10)
    old = asked(batch, [1, 2, 3], 1)
    young = asked(batch, [4, 5, 6, 7, 8], 1)
    order = []
    while not batch.idle:
        order += [sequence for finished in batch.advance() for sequence in finished.sequences]
    assert order == [*old, *young]
    assert noted.texts[0] == [3, 5] and len(noted.texts) == 2 and 5 < noted.texts[1][0] < 13


def test_cancelling_frees_pages_at_once_and_the_prompt_is_forgotten_with_its_last_sample() -> None:
    batch, noted = small(rows=2, pages=40)
    running = asked(batch, [1, 2, 3], 4)
    batch.advance()
    held = batch.free_pages
    batch.cancel(running[0])
    assert batch.free_pages > held
    batch.cancel(running[3])
    batch.cancel(running[2])
    batch.cancel(running[1])
    assert batch.free_pages == 39 and batch.idle
    batch.cancel(running[1])
    assert batch.free_pages == 39 and noted.texts == [[3]]


def drawn_alone(prompt: list[int], name: int, limit: int, stop: tuple[int, ...] = ()) -> list[int]:
    given = Prompts(tokens=torch.tensor([prompt]), lengths=torch.tensor([len(prompt)]), ids=torch.tensor([name]))
    out = sampler(POLICY, stop)(PARAMS, given, KEY, Sampling(max_tokens=limit))
    return out.tokens[0, : out.lengths[0]].tolist()


def results(batch: Batch, steps: int = 60) -> dict[int, list[int]]:
    done = {}
    for _ in range(steps):
        for finished in batch.advance():
            for row, sequence in enumerate(finished.sequences):
                done[sequence.name] = finished.columns.tokens[row, : finished.columns.lengths[row]].tolist()
    assert batch.idle, "it has not come to its end"
    return done


def test_a_sequence_that_ends_with_its_first_token_and_loses_its_page_at_once_has_ended() -> None:
    old, young = [1] * 12, [4, 5]
    name = next(n for n in range(100, 200) if drawn_alone(young, n, 1)[0] not in drawn_alone(old, 0, 4))
    stop = tuple(drawn_alone(young, name, 1))
    batch, noted = small(rows=2, pages=9, stop=stop)
    for prompt, called, limit in ((old, 0, 4), (young, name, 8)):
        batch.add(Sample(name=called, prompt=Prompt(tokens=prompt), limit=limit))
    assert results(batch) == {0: drawn_alone(old, 0, 4), name: list(stop)}
    assert noted.texts == [[12, 2]]


def test_what_is_cancelled_writes_to_nobodys_pages() -> None:
    batch, _ = small(rows=4, pages=20, page_size=4)
    prompts_of = {n: [n + 1, n + 2, n + 3] for n in range(4)}
    made = [Sample(name=n, prompt=Prompt(tokens=prompt), limit=8) for n, prompt in prompts_of.items()]
    for sequence in made:
        batch.add(sequence)
    batch.advance()
    batch.advance()
    batch.cancel(made[0])
    batch.cancel(made[1])  # whose lane stays empty, while its pages hold the next prompt
    prompts_of[9] = [7, 6, 5, 4, 3, 2, 1, 8]
    batch.add(Sample(name=9, prompt=Prompt(tokens=prompts_of[9]), limit=8))
    assert results(batch) == {n: drawn_alone(prompts_of[n], n, 8) for n in (2, 3, 9)}
    assert batch.free_pages == 19


def test_a_prompt_that_fills_the_cache_is_read_again_for_its_next_sample() -> None:
    batch, noted = small(rows=1, pages=9)
    asked(batch, [1] * 15, 3, limit=1)
    assert results(batch) == {n: drawn_alone([1] * 15, n, 1) for n in range(3)}
    assert noted.texts == [[15]] * 3 and batch.free_pages == 8


def test_a_sequence_that_does_not_fit_a_batch_is_refused() -> None:
    batch, _ = small(rows=1, pages=9)
    with pytest.raises(
        SpecError, match="draws 1 to 8 tokens and has at most 16 with its prompt, received one that draws 8 after 9"
    ):
        asked(batch, [1] * 9, 1)
    with pytest.raises(SpecError, match="received one that draws 9 after 1"):
        asked(batch, [1], 1, limit=9)


def test_what_sampler_refuses_is_refused_here() -> None:
    with pytest.raises(ModelError, match="stop token 61 is not among the model's 61 tokens"):
        PagedSampler(POLICY, (61,))
    with pytest.raises(SpecError, match="needs page_size of at least 1, received 0"):
        PagedSampler(POLICY, (), page_size=0)
    with pytest.raises(SpecError, match="needs memory of at least 1, received 0"):
        PagedSampler(POLICY, (), memory=0)
    with pytest.raises(SpecError, match="samples of at least 1, received 0"):
        PagedSampler(POLICY, ())(PARAMS, prompts(), KEY, PLAIN, samples=0)
    with pytest.raises(DataError, match="model's 64 positions"):
        PagedSampler(POLICY, ())(PARAMS, prompts(), KEY, Sampling(max_tokens=60))


def test_a_policy_with_pages_is_known_by_its_functions() -> None:
    assert isinstance(POLICY, PagedPolicy) and isinstance(Noted(POLICY), PagedPolicy)


class Recorded:
    """Stands for a CUDA graph: what is captured is called again at every replay."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> int:
        return 1


def test_a_step_is_captured_the_second_time_and_reads_weights_that_are_copied_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Recorded] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Recorded()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **fields: nullcontext())
    lanes = Lanes(POLICY, (), PLAIN, 4, 2, torch.device("cpu"))
    steps = Steps(lanes, POLICY.pages(PARAMS, 3, 16))
    steps.captures = True
    steps.load(PARAMS)
    mine = tree.leaves(steps.params)
    assert not {x.data_ptr() for x in mine} & {x.data_ptr() for x in tree.leaves(PARAMS)}
    for _ in range(3):
        steps.run(4, 0)
    steps.run(2, 0)
    assert [graph.replays for graph in made] == [2]
    moved = tree.map(lambda x: x * 1.5, PARAMS)
    steps.load(moved)
    assert tree.equal(steps.params, moved)
    assert all(a is b for a, b in zip(tree.leaves(steps.params), mine, strict=True))
    steps.run(4, 0)
    assert [graph.replays for graph in made] == [3]
    steps.load(tree.map(lambda x: x.double(), PARAMS))
    steps.pages = POLICY.pages(steps.params, 3, 16)
    steps.run(4, 0)
    assert [graph.replays for graph in made] == [3], "a graph of other weights is forgotten"


def test_buckets_are_powers_of_two_and_all() -> None:
    assert [buckets(n) for n in (1, 2, 3, 8, 9)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8), (1, 2, 4, 8, 9)]
