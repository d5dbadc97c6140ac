"""`consistency = "bitwise"`: who may ask for it, which primitives a policy takes, and what a draw records."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch
from toy_policy import Bigram

from areno_fn.contracts.errors import CheckpointError, ModelError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.policy import is_bitwise
from areno_fn.contracts.spec import SFT, HFModel, Lora, RunSpec, Sampling
from areno_fn.engine.composition import check_composition
from areno_fn.engine.consistency import consistent
from areno_fn.engine.identity import identity_of, require_same_run
from areno_fn.engine.model import ModelPlan, from_scratch
from areno_fn.engine.plan import plan
from areno_fn.engine.specfile import starters
from areno_fn.kernels import consistency
from areno_fn.kernels.consistency import BITWISE, ORDINARY, Primitives, primitives
from areno_fn.models.decoder import DecoderConfig, init
from areno_fn.models.decoder_layer import require_ordered
from areno_fn.models.decoder_policy import DecoderPolicy
from areno_fn.steps.token.head import decision_log_probs
from areno_fn.steps.token.sampling import draw, log_probs
from areno_fn.testing import laws

CUDA = torch.device("cuda")
CONFIG = DecoderConfig(
    vocab_size=37, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    tie_embeddings=True, initializer_range=0.3,
)  # fmt: skip


def asked(**changes: Any) -> RunSpec:
    """A run that draws, in the mode; its folder is not read here."""
    return msgspec.structs.replace(
        starters.quickstart(), model=HFModel(path="folder", dtype="bfloat16"), consistency="bitwise", **changes
    )


def planned(**changes: Any) -> ModelPlan:
    """A small model as if a folder of bfloat16 had been read."""
    made = from_scratch(starters.quickstart().model)  # type: ignore[arg-type]
    made = attrs.evolve(made, config=attrs.evolve(made.config, **changes))
    narrow = attrs.evolve(made.family, shapes=lambda config: init(config, Key.of(0), torch.bfloat16, "meta"))
    return attrs.evolve(made, family=narrow)


@pytest.fixture(autouse=True)
def a_gpu_of_the_right_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


# ---------------------------------------------------------------------------------------- who may ask


def test_a_run_that_draws_from_a_folder_may_ask_and_an_ordinary_one_always() -> None:
    check_composition(asked())
    check_composition(starters.quickstart())


def test_the_policy_of_the_plan_is_the_only_thing_that_changes() -> None:
    model = planned()
    assert consistent(starters.quickstart(), model, torch.device("cpu")) is model
    made = consistent(asked(), model, CUDA)
    assert made.policy == attrs.evolve(model.policy, consistency="bitwise") and is_bitwise(made.policy)
    assert attrs.evolve(made, policy=model.policy) == model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phases": [p for p in starters.quickstart().phases if isinstance(p.algorithm, SFT)]}, "no phase draws any"),
        ({"finetune": Lora(merge_rollouts=True)}, "finetune.merge_rollouts exclude each other"),
        ({"model": starters.quickstart().model}, "a model from scratch has float32; use a folder"),
    ],
)
def test_what_stands_against_it_is_said_before_a_file_is_opened(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        check_composition(msgspec.structs.replace(asked(), **changes))


def test_the_cpu_a_chip_a_dtype_a_family_and_a_head_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SpecError, match="on the CPU 'ordinary' gives equal bits already wherever the BLAS adds up rows alike"
    ):
        consistent(asked(), planned(), torch.device("cpu"))
    wide = from_scratch(starters.quickstart().model)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="but the model's are float32; set model.dtype = 'bfloat16'"):
        consistent(asked(), wide, CUDA)
    with pytest.raises(SpecError, match="heads of at most 128 channels in eights, but the model's have 12"):
        consistent(asked(), planned(head_dim=12), CUDA)
    with pytest.raises(SpecError, match="qwen3 has ordinary kernels only"):
        consistent(asked(), attrs.evolve(planned(), policy=Bigram()), CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(SpecError, match="compared on GPUs of compute capability 9.0 alone, and this one has 8.0"):
        consistent(asked(), planned(), CUDA)


def test_a_run_goes_on_in_the_mode_it_began_with() -> None:
    spec = msgspec.structs.replace(starters.quickstart(), device="cpu")
    ordinary = plan(spec)
    asks = msgspec.structs.replace(spec, consistency="bitwise")
    bitwise = identity_of(asks, ordinary.model, ordinary.phases, {}, stop=tuple(ordinary.tokenizer.eos_ids))  # type: ignore[union-attr]
    assert tuple(bitwise.refused(ordinary.identity)) == ("phases",)
    with pytest.raises(CheckpointError, match='consistency was "ordinary" and is now "bitwise"'):
        require_same_run(bitwise, asks, ordinary.identity, spec, "out/run")


# ---------------------------------------------------------------------------------------- what a policy computes


def test_a_mode_is_a_set_of_primitives_and_a_policy_has_one() -> None:
    assert primitives("ordinary") is ORDINARY and primitives("bitwise") is BITWISE
    assert not is_bitwise(Bigram()) and not is_bitwise(DecoderPolicy(CONFIG))
    assert is_bitwise(DecoderPolicy(CONFIG, consistency="bitwise"))
    assert hash(DecoderPolicy(CONFIG, consistency="bitwise")) != hash(DecoderPolicy(CONFIG))


def test_on_the_cpu_both_modes_compute_alike() -> None:
    params, tokens = init(CONFIG, Key.of(1)), torch.arange(9)
    inputs = tokens, torch.cat([torch.arange(5), torch.arange(4)]), torch.tensor([0] * 5 + [1] * 4)
    answers = []
    for mode in ("ordinary", "bitwise"):
        policy = DecoderPolicy(CONFIG, consistency=mode)
        hidden = policy.hidden(params, *inputs)
        pages = policy.pages(params, 6, 4)
        table = torch.tensor([[1, 2, 3]])
        first = policy.read_into(params, tokens[None, :5], torch.tensor([5]), table, pages)
        then = policy.read_next(params, tokens[5:6], torch.tensor([5]), table, pages)
        answers.append((hidden, policy.logits(params, hidden), first, then))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_every_product_of_a_layer_and_of_the_head_goes_through_the_primitives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        return ORDINARY.linear(x, weight, bias)

    monkeypatch.setitem(consistency._BY_NAME, "bitwise", attrs.evolve(BITWISE, linear=watched))
    params, policy = init(CONFIG, Key.of(1)), DecoderPolicy(CONFIG, consistency="bitwise")
    policy.logits(params, torch.ones(2, 16))
    assert seen == [(37, 16)]


def test_where_the_fused_path_is_not_taken_on_a_gpu_the_mode_is_refused() -> None:
    class OnGPU(torch.Tensor):
        is_cuda = True

    x = torch.zeros(3, 16).as_subclass(OnGPU)
    require_ordered(x, ORDINARY)
    require_ordered(torch.zeros(3, 16), BITWISE)
    for by in (
        BITWISE,
        Primitives(linear=BITWISE.linear, fused=BITWISE.fused, packed=BITWISE.packed, paged=BITWISE.paged),
    ):
        with pytest.raises(ModelError, match="for parameters in bfloat16 or float16"):
            require_ordered(x, by)


# ---------------------------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01),
        Sampling(temperature=0.0),
    ],
    ids=["plain", "cold", "cut", "greedy"],
)
def test_a_rescored_draw_has_the_tokens_of_a_plain_one_and_the_numbers_of_training(sampling: Sampling) -> None:
    logits = 3 * torch.randn(20, 37, generator=torch.Generator().manual_seed(0))
    ids, positions = torch.arange(20), torch.arange(20) * 3
    plain = draw(logits, sampling, Key.of(4), ids, positions)
    rescored = draw(logits, sampling, Key.of(4), ids, positions, rescored=True)
    assert torch.equal(plain.tokens, rescored.tokens)
    torch.testing.assert_close(plain.logp, rescored.logp, rtol=0, atol=1e-5)
    assert torch.equal(rescored.logp, log_probs(logits, plain.tokens, sampling, rescored.kept)[0])


def test_training_scores_whole_rows_whatever_their_number() -> None:
    params, policy = init(CONFIG, Key.of(1)), DecoderPolicy(CONFIG, consistency="bitwise")
    hidden = torch.randn(11, 16, generator=torch.Generator().manual_seed(2))
    targets, sampling = torch.arange(11), Sampling(temperature=0.7)
    want = log_probs(policy.logits(params, hidden), targets, sampling)[0]
    for most in (37, 37 * 4, 37 * 100):
        got, _ = decision_log_probs(policy, sampling, params, hidden, targets, max_logits=most)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------- the law


def test_the_law_holds_for_what_is_computed_row_by_row() -> None:
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
    tried = laws.batch_invariant(lambda x: {"double": 2 * x, "largest": x.amax(1)}, x, sizes=(1, 7, 64, 1000))
    assert tried == 7
    laws.batch_invariant(lambda x, y: x * y, x, x.flip(0), sizes=(), orders=3)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x - x.mean(0), "in the first 3 rows row 0 is not what it is among all of them: 15 elements differ"),
        (lambda x: x * (1 + 1e-7 * (x.shape[0] == 7)), "in the first 7 rows row"),
        (lambda x: x.cumsum(0), "in the last 3 rows row 17"),
        (lambda x: {"y": x, "z": x.abs() * torch.arange(len(x))[:, None]}, "last 3 rows, z row 17"),
        (lambda x: x + 1e-3 * (x[:1] - x[0]) + (x[0] > 9).float() + 1e-6 * x[:1], "elements differ, at most by"),
        (lambda x: torch.where(torch.tensor(len(x) == 3), -0.0, 0.0).expand(len(x), 2), "sign of a zero"),
        (lambda x: x[:3], r"the result is torch.float32 \[3, 5\], not one row for each of 20"),
        (
            lambda x: x.double() if len(x) == 3 else x,
            r"the result is torch.float64 \[3, 5\], not torch.float32 \[3, 5\]",
        ),
    ],
)
def test_a_function_that_breaks_the_law_is_told_where(function: Any, words: str) -> None:
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError, match=words):
        laws.batch_invariant(function, x, sizes=(3, 7))


def test_the_law_is_not_passed_without_a_comparison() -> None:
    with pytest.raises(ValueError, match="there are no rows"):
        laws.batch_invariant(lambda x: x, torch.zeros(0, 3))
    with pytest.raises(ValueError, match="no batch differs from the whole"):
        laws.batch_invariant(lambda x: x, torch.zeros(3, 3), sizes=(3, 7), orders=0)


# ---------------------------------------------------------------------------------------- the guide


def test_the_guide_says_what_a_specification_reads_and_its_law_holds() -> None:
    guide = (Path(__file__).parents[2] / "docs/consistency.md").read_text(encoding="utf-8")
    (field,) = re.findall(r"```toml\n(.*?)```", guide, flags=re.DOTALL)
    assert tomllib.loads(field) == {"consistency": asked().consistency}
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    exec(code, {})
