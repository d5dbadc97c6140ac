"""The public names, frozen. A change here is a change of the product: say so in the commit and in the README."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import areno_fn

NAMES = """
Actions Comparisons Counters Cursor Estimates Example Experience FAMILIES JudgedRollout Key Optimizer PackedTokens
Pair Pairs Plan Prompts Rollout RunSpec Sampling Scores Sums TokenPolicy TrainState Transform Turn Valued accumulate act adamw
adamw8bit aggregate chain clipped compare cross_entropy custom_vjp donate ema_begin ema_update estimate experience gae
group_advantages in_turns load_hf merge muon offload onload pack pair_batches partition pipeline plan preference random
read_spec record remat replace sampler save_hf score sequence_clipped sgd snapshot static terminal_rewards train
train_step tree unmerge value_and_grad value_clipped whiten
""".split()
TESTING = {
    "laws": "accumulation_invariant batch_invariant donation_agrees exact_under_split gradient kernel_agrees mask_blind no_alias "
    "optimizer_matches permutation_invariant pure roles_disjoint_exhaustive rollout_matches_training step_is_pure",
    "strict": "strict",
    "strategies": "actions comparisons documents estimates experiences keys packed packed_tokens pairs prompts role_trees "
    "sampling scores split_batches tensors trees",
}


def test_the_names_are_frozen() -> None:
    assert sorted(areno_fn.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(areno_fn))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_exists_and_is_documented(name: str) -> None:
    value = getattr(areno_fn, name)
    assert value is getattr(areno_fn, name)
    if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismodule(value):
        assert inspect.getdoc(value)


def test_type_checkers_see_the_names_that_exist_at_run_time() -> None:
    tree = ast.parse(Path(str(areno_fn.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            home = importlib.import_module(str(node.module))
            expected = getattr(home, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
            assert getattr(areno_fn, str(alias.asname)) is expected
    assert sorted(str(a.asname) for node in block.body for a in node.names) == sorted(NAMES)  # type: ignore[attr-defined]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'areno_fn' has no attribute 'trainer'"):
        _ = areno_fn.trainer  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", TESTING)
def test_the_public_names_of_testing(module: str) -> None:
    home = importlib.import_module(f"areno_fn.testing.{module}")
    assert all(inspect.getdoc(getattr(home, name)) for name in TESTING[module].split())
