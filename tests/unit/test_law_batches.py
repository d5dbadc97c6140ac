"""What the laws of batches and masks do with rows, and what they refuse to call a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults.law_cases import PARAMS, POLICY, packed, planted_step, state
from hypothesis import given
from hypothesis import strategies as st
from typeguard import suppress_type_checks

from areno_fn import tree
from areno_fn.contracts.actions import Scores, Sums
from areno_fn.contracts.batch import Experience, PackedTokens, Pairs, Prompts
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import replace
from areno_fn.contracts.spec import Sampling
from areno_fn.random import permutation
from areno_fn.steps.compose import pipeline
from areno_fn.steps.objectives.cross_entropy import cross_entropy
from areno_fn.steps.token.score import score
from areno_fn.testing import laws, strategies
from areno_fn.testing.rows import count, take

PROMPTS = Prompts(tokens=torch.tensor([[1, 2]]), lengths=torch.tensor([2]), ids=torch.tensor([0]))
OBJECTIVE = pipeline(score(POLICY, Sampling()), cross_entropy())


@given(st.data())
def test_rows_taken_are_those_documents_packed(data: st.DataObject) -> None:
    rows = data.draw(strategies.documents())
    order = data.draw(st.permutations(range(len(rows))))
    chosen = order[: data.draw(st.integers(1, len(rows)))]
    expected = strategies.packed([rows[row] for row in chosen])
    assert tree.first_difference(take(strategies.packed(rows), chosen), expected) is None


@given(strategies.experiences(), st.data())
def test_what_a_decision_carries_goes_with_it(batch: Experience, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(count(batch))))
    back = [order.index(row) for row in range(len(order))]
    assert tree.equal(take(take(batch, order), back), batch)
    alone = [take(batch, [row]) for row in order]
    assert torch.equal(torch.cat([one.advantage for one in alone]), take(batch, order).advantage)


@given(strategies.pairs(), st.data())
def test_pairs_stay_together(batch: Pairs, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(count(batch))))
    documents = [number for row in order for number in (2 * row, 2 * row + 1)]
    taken = take(batch, order)
    assert tree.equal(taken.packed, take(batch.packed, documents))
    assert torch.equal(torch.cat([take(batch, [row]).reference for row in order]), taken.reference)


def test_truncated_distributions_are_taken_along() -> None:
    made = packed()
    kept = replace(made, kept=torch.arange(made.targets.shape[0]))
    assert take(kept, [1]).kept.tolist() == [4]
    assert isinstance(take(kept, [2, 0]), PackedTokens)


def test_batches_of_another_type_bring_their_own_rows() -> None:
    def objective(params: torch.Tensor, batch: torch.Tensor) -> Sums:
        return Sums(total=(params * batch).sum(), weight=batch.new_tensor(batch.numel()), stats={}, peaks={})

    batch, params = torch.arange(1.0, 9.0), torch.tensor(0.5)
    chosen: dict[str, Any] = {"take": lambda values, rows: values[torch.tensor(rows)], "rows": 8}
    assert laws.accumulation_invariant(objective, params, batch, **chosen) <= 1e-6
    assert laws.permutation_invariant(objective, params, batch, **chosen) <= 1e-6
    with pytest.raises(TypeError, match="the rows of a Tensor are not known; give `rows`, their number, and `take`"):
        laws.accumulation_invariant(objective, params, batch)


def test_a_law_that_would_compare_nothing_is_refused() -> None:
    few = take(packed(), [0, 1])
    with pytest.raises(ValueError, match="a batch of 2 rows cannot be cut into 3 parts; give it at least 3 rows"):
        laws.accumulation_invariant(OBJECTIVE, PARAMS, few)
    with pytest.raises(ValueError, match="a batch of 1 rows has no other order; give it at least 2"):
        laws.permutation_invariant(OBJECTIVE, PARAMS, take(packed(), [0]))
    nothing = strategies.packed([((1, 2), (1.0,))])
    empty = replace(nothing, index=nothing.index[:0], targets=nothing.targets[:0], weight=nothing.weight[:0])
    for batch in (empty, {"x": torch.ones(3)}):
        with pytest.raises(ValueError, match="has no decisions with a weight at 'weight'; there is nothing to mask"):
            laws.mask_blind(OBJECTIVE, PARAMS, batch)


def _weightless(params: Any, batch: PackedTokens) -> Sums:
    return replace(OBJECTIVE(params, batch), weight=torch.zeros(()))


MADE = packed()
NOTHING: dict[str, tuple[Callable[[], Any], str]] = {
    "no split": (lambda: laws.accumulation_invariant(OBJECTIVE, PARAMS, MADE, ()), r"splits=\(\) cuts nothing"),
    "one part": (lambda: laws.accumulation_invariant(OBJECTIVE, PARAMS, MADE, (1,)), r"splits=\(1,\) cuts nothing"),
    "no parts": (lambda: laws.exact_under_split(OBJECTIVE, PARAMS, MADE), "no split was given but the whole itself"),
    "the whole": (lambda: laws.exact_under_split(OBJECTIVE, PARAMS, MADE, [MADE]), "no split was given but the whole"),
    "no order": (lambda: laws.permutation_invariant(OBJECTIVE, PARAMS, MADE, orders=0), "orders=0 tries none"),
    "no direction": (lambda: laws.gradient(OBJECTIVE, PARAMS, MADE, directions=0), "directions=0 tries none"),
    "nothing trained": (lambda: laws.gradient(OBJECTIVE, {"n": 3}, MADE), "params hold no floating-point element"),
    "no parameters": (
        lambda: laws.accumulation_invariant(lambda p, b: OBJECTIVE(PARAMS, b), {"n": torch.tensor(3)}, MADE),
        "params hold no floating-point tensor",
    ),
    "no weight": (lambda: laws.accumulation_invariant(_weightless, PARAMS, MADE), "the weight of the whole batch is 0"),
    "no weight in any order": (
        lambda: laws.permutation_invariant(_weightless, PARAMS, MADE),
        "the weight of the whole batch is 0",
    ),
    "no junk": (lambda: laws.mask_blind(OBJECTIVE, PARAMS, MADE, junk=()), "junk is empty"),
    "no completion": (
        lambda: laws.rollout_matches_training(POLICY, PARAMS, PROMPTS, Key.of(0), Sampling(), samples=0),
        "no completion is drawn",
    ),
}


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_compare_is_no_pass(name: str) -> None:
    call, sentence = NOTHING[name]
    with pytest.raises(ValueError, match=rf"^{sentence}.*so that nothing would be compared; give"):
        call()


def test_nan_is_not_told_from_nan_and_fails() -> None:
    def stage(scores: Scores) -> Sums:
        return Sums(total=scores.logp.sum() / 0 * 0, weight=scores.weight.sum(), stats={}, peaks={})

    broken = pipeline(score(POLICY, Sampling()), stage)
    for call in (laws.accumulation_invariant, laws.permutation_invariant):
        with pytest.raises(AssertionError, match="^total is nan before anything is changed; it must be finite$"):
            call(broken, PARAMS, packed())
    with pytest.raises(AssertionError, match="^loss is nan before anything is changed; it must be finite$"):
        laws.mask_blind(broken, PARAMS, packed())


def test_a_loss_that_returns_a_mean_is_told_what_to_return() -> None:
    scores = score(POLICY, Sampling())(PARAMS, packed())
    calls: list[Callable[[], Any]] = [
        lambda: laws.mask_blind(lambda s: s.logp.mean(), scores),
        lambda: laws.mask_blind(lambda p, b: p.table.mean(), PARAMS, packed()),
        lambda: laws.accumulation_invariant(lambda p, b: p.table.mean(), PARAMS, packed()),
        lambda: laws.permutation_invariant(lambda p, b: p.table.mean(), PARAMS, packed()),
    ]
    for call in calls:
        with (
            suppress_type_checks(),
            pytest.raises(AssertionError, match="^the loss returned a Tensor; it must return Sums"),
        ):
            call()
    for result, told in (((1, 2), r"\(1, 2\)"), (torch.ones(2), r"f32\[2\]"), (3.0, "3.0")):
        with pytest.raises(
            AssertionError, match=f"^the function returned {told}; it must return a scalar tensor or Sums$"
        ):
            laws.gradient(lambda params, result=result: result, {"w": torch.ones(2)})


def test_what_counts_masked_decisions_is_named() -> None:
    def counting(name: str, value: Callable[[Scores], torch.Tensor]) -> Callable[[Scores], Sums]:
        def stage(scores: Scores) -> Sums:
            return replace(cross_entropy()(scores), **{name: value(scores)})

        return stage

    scores = score(POLICY, Sampling())(PARAMS, packed())
    for value in (
        lambda s: torch.tensor(float(s.weight.numel())),
        lambda s: s.weight.numel() * (s.weight.sum() > 0).float(),
    ):
        loss = counting("weight", value)
        for one in ((loss, scores), (pipeline(score(POLICY, Sampling()), loss), PARAMS, packed())):
            with pytest.raises(
                AssertionError, match=r"without the decisions of weight 0 weight changes by 0\..* aggregate"
            ):
                laws.mask_blind(*one)
    documents = counting("weight", lambda s: torch.tensor(float(s.documents)))
    with pytest.raises(AssertionError, match=r"^where every decision has weight 0, weight is 8\.0; a batch in which"):
        laws.mask_blind(documents, scores)

    def one_at_least(params: torch.Tensor, batch: dict[str, torch.Tensor]) -> Sums:
        total = (torch.where(batch["weight"] != 0, batch["x"], 0.0) * params).sum()
        return Sums(total=total, weight=batch["weight"].sum().clamp(min=1), stats={}, peaks={})

    with pytest.raises(AssertionError, match=r"^where every decision has weight 0, weight is 1\.0; a batch in which"):
        laws.mask_blind(one_at_least, torch.tensor(2.0), {"x": torch.ones(5), "weight": torch.ones(5)})


def test_a_single_decision_is_not_masked_away() -> None:
    """Every third one begins with the first; a loss that ignores it would have passed."""
    scores = score(POLICY, Sampling())(PARAMS, strategies.packed([((1, 2), (1.0,))]))
    laws.mask_blind(cross_entropy(), scores)
    with pytest.raises(AssertionError, match=r"^where every decision has weight 0, loss is 1\.0"):
        laws.mask_blind(lambda s: replace(cross_entropy()(s), total=s.logp.sum() * 0 + 1), scores)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_keep_the_laws_of_sums(dtype: torch.dtype) -> None:
    """The gradient of every part would be rounded by itself; what is compared is in float32."""
    low = tree.map(lambda x: x.to(dtype), PARAMS)
    assert laws.accumulation_invariant(OBJECTIVE, low, packed()) <= 1e-6
    assert laws.permutation_invariant(OBJECTIVE, low, packed()) <= 1e-6
    laws.exact_under_split(OBJECTIVE, low, packed(), [take(packed(), [0]), take(packed(), range(1, 8))], tolerance=1e-6)
    laws.mask_blind(OBJECTIVE, low, packed())

    def mean(params: Any, batch: PackedTokens) -> Sums:
        sums = OBJECTIVE(params, batch)
        return replace(sums, total=sums.total * (1 + 1e-4 * batch.documents))

    with pytest.raises(AssertionError, match="changes total by"):
        laws.accumulation_invariant(mean, low, packed())


def test_a_gradient_under_a_mask_is_named() -> None:
    def leaking(scores: Scores) -> Sums:
        return Sums(total=scores.logp.sum(), weight=scores.weight.sum(), stats={}, peaks={})

    scores = score(POLICY, Sampling())(PARAMS, packed())
    with pytest.raises(AssertionError, match=r"decision 0 has weight 0, but its gradient is 1\.0; leave it out"):
        laws.mask_blind(leaking, scores)


def test_a_masked_target_is_not_read_either() -> None:
    def by_targets(params: Any, batch: PackedTokens) -> Sums:
        sums = OBJECTIVE(params, batch)
        return replace(sums, stats={**sums.stats, "target": batch.targets.sum().float().reshape(1)})

    with pytest.raises(AssertionError, match=r"under weight 0 changes stats\.target"):
        laws.mask_blind(by_targets, PARAMS, packed())


def test_masks_over_truncated_distributions() -> None:
    sampling = Sampling(top_k=2)
    made = packed()
    logits = POLICY.logits(PARAMS, PARAMS.table[made.tokens[made.index]])
    made = replace(made, targets=logits.argmax(-1), kept=torch.full_like(made.targets, 2))
    laws.mask_blind(pipeline(score(POLICY, sampling), cross_entropy()), PARAMS, made)


def test_the_law_of_masks_takes_a_batch_of_another_type() -> None:
    def objective(params: torch.Tensor, batch: dict[str, torch.Tensor]) -> Sums:
        values = torch.where(batch["weight"] != 0, batch["x"], 0.0) * params
        return Sums(total=(values * batch["weight"]).sum(), weight=batch["weight"].sum(), stats={}, peaks={})

    def careless(params: torch.Tensor, batch: dict[str, torch.Tensor]) -> Sums:
        return objective(params, {**batch, "weight": batch["weight"] + 1e-3})

    batch = {"x": torch.ones(5), "weight": torch.ones(5)}
    laws.mask_blind(objective, torch.tensor(2.0), batch)
    with pytest.raises(
        AssertionError, match=r"nan under weight 0 changes loss: 1 of 1 elements differ; select what counts"
    ):
        laws.mask_blind(careless, torch.tensor(2.0), batch)


def test_sentences_name_what_changed_and_where() -> None:
    def mean(params: Any, batch: PackedTokens) -> Sums:
        sums = OBJECTIVE(params, batch)
        return replace(sums, total=sums.total / sums.weight)

    with pytest.raises(AssertionError, match="a split into 2 micro-batches changes total by .* never divides"):
        laws.accumulation_invariant(mean, PARAMS, packed(), (1, 2))

    def by_place(params: Any, batch: PackedTokens) -> Sums:
        return OBJECTIVE(params, replace(batch, weight=batch.weight * (1 + torch.arange(batch.weight.shape[0]))))

    with pytest.raises(
        AssertionError, match=r"the order \[\d, .*\] in 1 parts changes total by .*, never by its place"
    ):
        laws.permutation_invariant(by_place, PARAMS, packed())


def test_a_step_says_which_roles_it_moves_and_which_snapshots_it_renews() -> None:
    follows = planted_step("snapshot follows the role")
    after, _ = laws.step_is_pure(follows, state(), (packed(),), renews=("reference",))
    assert after.snapshots["reference"] is after.params["actor"]
    both = planted_step("moves the critic too")
    laws.step_is_pure(both, state(), (packed(),), moves=("actor", "critic"))
    for moves, sentence in (
        (("actor",), r"params\.critic\.table: .* after the step; the step moves actor and nothing else"),
        (("critic",), r"params\.actor\.table: .* the step moves critic and nothing else"),
        (("actor", "critic", "judge"), r"params\.judge is what it was before the step, which should move it"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            laws.step_is_pure(both, state(), (packed(),), moves=moves)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"moves": ("actor", "jugde")}, "moves names 'jugde', .* it has actor, critic, judge$"),
        ({"renews": ("ema",)}, "renews names 'ema', .* it has reference$"),
        ({"sets": ("beta",)}, "sets names 'beta', .* it has kl$"),
    ],
)
def test_a_name_that_the_state_does_not_know_is_no_pass(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        laws.step_is_pure(planted_step(None), state(), (packed(),), **given)


def test_a_step_says_which_controls_it_sets_and_whether_it_moves_the_cursor() -> None:
    sets, moves = planted_step("control set"), planted_step("cursor moved")
    laws.step_is_pure(sets, state(), (packed(),), sets="kl", moves="actor")
    laws.step_is_pure(moves, state(), (packed(),), advances=True)
    for fault, sentence in (
        ("control set", r"controls\.kl: 0\.1 against 0\.2 after the step; the step does not say that it sets it"),
        ("control added", r"controls\.more is new after the step; the step does not say that it sets it"),
        ("control forgotten", r"controls\.kl is gone after the step"),
        ("cursor moved", r"the step changed cursor\.step: 0 against 1; the loop moves it"),
        ("another clock set back", r"counters\.data_epoch was 2 and is 0; a clock never goes back"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            laws.step_is_pure(planted_step(fault), state(), (packed(),))
    with pytest.raises(AssertionError, match=r"the step returned TrainState; it must return \(state, metrics\)$"):
        laws.step_is_pure(lambda value, batch: value, state(), (packed(),))  # type: ignore[arg-type,return-value]


def test_two_rows_are_tried_in_their_other_order() -> None:
    """Also where the first order drawn for two rows is the one they are in."""
    assert [permutation(Key.of(k), 2).tolist() for k in range(2)].count([0, 1]) > 0

    def first_row_alone(params: Any, batch: PackedTokens) -> Sums:
        place = batch.segments[batch.index]
        return OBJECTIVE(params, replace(batch, weight=(place == 0).float()))

    for orders in (1, 2):
        with pytest.raises(AssertionError, match=r"the order \[1, 0\] in 1 parts changes"):
            laws.permutation_invariant(first_row_alone, PARAMS, take(packed(), [0, 2]), orders=orders)


def test_a_total_of_terms_that_cancel_is_held_to_the_size_of_its_terms() -> None:
    """As that of GRPO, which begins at 0 where the policy is the one that drew."""
    batch, params = torch.linspace(-1, 1, 64) * 0.1, torch.tensor(0.3)

    def objective(params: torch.Tensor, batch: torch.Tensor) -> Sums:
        return Sums(total=(params.exp() * batch).sum(), weight=batch.new_tensor(batch.numel()), stats={}, peaks={})

    chosen: dict[str, Any] = {"take": lambda values, rows: values[torch.tensor(rows)], "rows": 64}
    # the gradient cancels as well here, so that of a second term is beside it
    laws.permutation_invariant(lambda p, b: _beside(objective(p, b), p, b), params, batch, **chosen)
    whole = _beside(objective(params, batch), params, batch).total
    assert abs(float(whole)) < 1e-5


def _beside(sums: Sums, params: torch.Tensor, batch: torch.Tensor) -> Sums:
    """With a term of value 0 and gradient 1 for every element."""
    return replace(sums, total=sums.total + (params - params.detach()) * batch.numel())


def test_one_tensor_at_two_paths_is_one_in_what_a_step_is_given() -> None:
    shared = torch.ones(2)
    assert laws.pure(lambda value: value["reference"] is value["actor"], {"actor": shared, "reference": shared})
