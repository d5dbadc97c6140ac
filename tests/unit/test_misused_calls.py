"""What public functions say when they are given something else: one sentence, before a model is asked for anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from toy_policy import Bigram
from typeguard import suppress_type_checks

import areno_fn as af
from areno_fn.contracts.errors import DataError, JoinError, ModelError, RecordError, SpecError
from areno_fn.contracts.spec import AdamWSpec, SGDSpec

POLICY = Bigram()
PARAMS = POLICY.init()
SAMPLING = af.Sampling(max_tokens=4)
PROMPTS = af.Prompts(tokens=torch.tensor([[1, 2], [3, 0]]), lengths=torch.tensor([2, 1]), ids=torch.arange(2))
DRAWN = af.sampler(POLICY, (0,))(PARAMS, PROMPTS, af.Key.of(0), SAMPLING, samples=2)
(BATCH,) = af.experience(DRAWN, torch.arange(4.0), micro_tokens=1 << 10)
HEAD = "a TokenPolicy has vocab_size, max_positions, hidden"


@attrs.frozen
class Blind:
    """A policy that does not know how to draw."""

    vocab_size: int = 11
    max_positions: int = 64
    hidden = Bigram.hidden
    logits = Bigram.logits


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: af.act(object(), SAMPLING), f"the policy object has no 'hidden'; {HEAD}"),
        (lambda: af.score(object(), SAMPLING), "the policy object has no 'hidden'"),
        (lambda: af.compare(object(), SAMPLING), "the policy object has no 'hidden'"),
        (lambda: af.estimate(object()), "the policy object has no 'hidden'"),
        (lambda: af.sampler(object(), ()), "the policy object has no 'vocab_size'"),
        (lambda: af.sampler(Blind(), ()), "the policy Blind has no 'prefill'"),
        (lambda: af.act(Bigram, SAMPLING), r"the policy Bigram is a class; make one of it, as in Bigram\(\.\.\.\)"),
    ],
)
def test_a_policy_that_is_none_is_refused_where_a_stage_is_made(make: Callable[[], Any], words: str) -> None:
    with suppress_type_checks(), pytest.raises(SpecError, match=words):
        make()


@attrs.frozen
class Folded(Bigram):
    """Hidden states of another shape."""

    def hidden(self, params, tokens, positions, segments, *, bounds=None):
        return super().hidden(params, tokens, positions, segments)[None]


def test_hidden_states_are_one_a_token() -> None:
    count = BATCH.packed.tokens.shape[0]
    sentence = rf"hidden of the policy Folded gave \[1, {count}, 11\] for {count} tokens; it must be \[{count}, D\]"
    with pytest.raises(ModelError, match=sentence):
        af.act(Folded(), SAMPLING)(PARAMS, BATCH)


@attrs.frozen
class Counted(Bigram):
    """A cache that is a dict."""

    def prefill(self, params, tokens, lengths, capacity):
        logits, _ = super().prefill(params, tokens, lengths, capacity)
        return logits, {"read": lengths}

    def decode(self, params, tokens, cache):
        return self.logits(params, params.table[tokens]), {"read": cache["read"] + 1}


def test_a_cache_is_any_tree_of_rows() -> None:
    again = af.sampler(Counted(), (0,))(PARAMS, PROMPTS, af.Key.of(0), SAMPLING, samples=2)
    assert af.tree.first_difference(again, DRAWN) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: af.act(SAMPLING, POLICY), "act: sampling must be a Sampling, received a Bigram"),
        (lambda: af.score(POLICY, 1.0), "score: sampling must be a Sampling, received 1.0"),
        (
            lambda: af.sampler(POLICY, 0),
            "sampler: stop must be a collection, of which each is a whole number, received 0",
        ),
        (
            lambda: af.sampler(POLICY, (0,))(PARAMS, [[1, 2]], af.Key.of(0), SAMPLING),
            "rollout: prompts must be a Prompts, received the list",
        ),
        (lambda: af.sampler(POLICY, (0,))(PARAMS, PROMPTS, 0, SAMPLING), "rollout: key must be a Key, received 0"),
        (
            lambda: af.experience(DRAWN, [1.0] * 4, micro_tokens=64),
            r"experience: advantages must be a Tensor, received the list \[4 x 1.0\]",
        ),
        (lambda: af.gae([1.0], [0.0], [True]), "gae: rewards must be a Tensor, received the list"),
        (lambda: af.whiten(torch.ones(2), [True, True]), "whiten: mask must be a Tensor, received the list"),
        (lambda: af.terminal_rewards(1.0, torch.ones(1, 2)), "terminal_rewards: scores must be a Tensor, received 1.0"),
        (lambda: af.value_and_grad(3), "value_and_grad takes a function, received 3"),
        (lambda: af.remat(None), "remat takes a function, received None"),
        (lambda: af.custom_vjp(torch.sin, 4), "custom_vjp takes a function, received 4"),
        (lambda: af.onload(PARAMS, "zzz"), "onload: 'zzz' is no device; write 'cpu' or 'cuda'"),
        (
            lambda: af.ema_update(af.ema_begin({"a": torch.ones(2)}), {"b": torch.ones(2)}, 0.5),
            r"the average is not one of these parameters: .*at a: only in the first tree; begin it with ema_begin\(params\)",
        ),
        (lambda: af.sgd(0.1, 10), "sgd: spec must be a SGDSpec, received 0.1"),
        (lambda: af.muon(AdamWSpec(), 10), "muon: spec must be a MuonSpec, received an AdamWSpec"),
        (lambda: af.adamw8bit(SGDSpec(), 10), "adamw8bit: spec must be an AdamW8bitSpec, received a SGDSpec"),
        (lambda: af.pack("abc"), "pack: examples must be a sequence, of which each is an Example, received 'abc'"),
        (
            lambda: af.aggregate(torch.ones(3), torch.ones(4), torch.zeros(4, dtype=torch.int64), 1, "token_mean"),
            r"aggregate takes values, weight and segments \[M\], received \[3\], \[4\] and \[4\]; give one of each a decision",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(call: Callable[[], Any], words: str) -> None:
    with suppress_type_checks(), pytest.raises(RecordError, match=words):
        call()


@pytest.mark.parametrize("of", [str, Path])
def test_a_run_takes_a_specification_and_not_its_file(of: Callable[[str], Any], tmp_path: Path) -> None:
    file = of(str(tmp_path / "mine.toml"))
    for take in (af.plan, af.train):
        with (
            suppress_type_checks(),
            pytest.raises(SpecError, match=r"^a run takes a RunSpec, received '.*'; read_spec\('"),
        ):
            take(file)
        with (
            suppress_type_checks(),
            pytest.raises(SpecError, match="^a run takes a RunSpec, as read_spec reads one, "),
        ):
            take({"name": "mine"})


@pytest.mark.parametrize("path", [None, 5, [], b"x"])
def test_a_specification_is_read_from_a_path(path: Any) -> None:
    with (
        suppress_type_checks(),
        pytest.raises(SpecError, match="a specification is read from the path of a file, received"),
    ):
        af.read_spec(path)


def test_overrides_come_in_a_list() -> None:
    with (
        suppress_type_checks(),
        pytest.raises(SpecError, match=r"overrides come in a list, \['seed=1'\], received"),
    ):
        af.read_spec("specs/quickstart.toml", "seed=1")


@pytest.mark.parametrize(("token", "place"), [(11, 1), (-1, 0)])
def test_a_token_that_the_model_does_not_know_is_named(token: int, place: int) -> None:
    tokens = torch.tensor([[1, 2], [3, 0]])
    tokens[1 - place, place] = token  # the second prompt has one token: what stands behind it is nothing
    given = af.Prompts(tokens=tokens, lengths=torch.tensor([2, 1]), ids=torch.tensor([7, 8]))
    sentence = (
        rf"prompt {8 - place} has the token {token} at place {place}, but the model knows 0 to 10; encode it with"
    )
    with pytest.raises(DataError, match=sentence):
        af.sampler(POLICY, (0,))(PARAMS, given, af.Key.of(0), SAMPLING)
    unread = af.replace(PROMPTS, tokens=torch.tensor([[1, 2], [3, 99]]))
    again = af.sampler(POLICY, (0,))(PARAMS, unread, af.Key.of(0), SAMPLING, samples=2)
    assert torch.equal(again.tokens, DRAWN.tokens)


def test_a_record_says_how_another_one_is_made() -> None:
    for change in (lambda: setattr(PROMPTS, "ids", None), lambda: delattr(PROMPTS, "ids")):
        with pytest.raises(
            AttributeError, match=r"^Prompts is immutable; make another one, replace\(value, ids=\.\.\.\)$"
        ):
            change()


# ------------------------------------------------------------------------------------------ a loss that moves nothing


def detached(actions: af.Actions) -> af.Sums:
    total, weight = af.aggregate(
        actions.logp.detach(), actions.weight, actions.segments, actions.documents, "token_mean"
    )
    return af.Sums(total=total, weight=weight, stats={}, peaks={})


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_without_a_gradient_is_refused(parts: int) -> None:
    objective = af.pipeline(af.act(POLICY, SAMPLING), detached)
    with pytest.raises(
        JoinError, match=r"the total of pipeline\(act, detached\) has no gradient, so a step would move nothing"
    ):
        af.accumulate(objective)(PARAMS, (BATCH,) * parts)


def test_where_nothing_counts_there_is_nothing_to_move() -> None:
    (nothing,) = af.experience(
        af.replace(DRAWN, finished=torch.zeros_like(DRAWN.finished)),
        torch.ones(4),
        micro_tokens=1 << 10,
        mask_truncated=True,
    )
    gradient, sums = af.accumulate(af.pipeline(af.act(POLICY, SAMPLING), detached))(PARAMS, (nothing,))
    assert float(sums.weight) == 0 and float(gradient.table.abs().max()) == 0
