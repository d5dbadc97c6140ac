"""What a flow model takes and makes, as a value: rules that contradict themselves, requests and sizes that are refused."""

from __future__ import annotations

import importlib
import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno_fn.contracts.components import Component, Components
from areno_fn.contracts.errors import DataError, ModelError, SpecError
from areno_fn.contracts.geometry import Geometry, Size
from areno_fn.contracts.media import InputMedia, InputRule, Media, Request
from areno_fn.contracts.pipeline_io import Output, PipelineIOContract, require_condition
from areno_fn.models.diffusers_module import diffusers_class
from areno_fn.models.pipeline_words import bare_pipeline

SQUARE = Geometry(multiple=16, default=Size(height=64, width=64), most=128)
PARTS = (Component(name="transformer", trained=True), Component(name="vae"), Component(name="text"))


def contract(**changes: Any) -> PipelineIOContract:
    fields: dict[str, Any] = {
        "family": "heron", "geometry": SQUARE, "components": PARTS, "preparer": ("text",), "codec": ("vae",),
        "objectives": (("sft", "element_mean"),),
    }  # fmt: skip
    return PipelineIOContract(**(fields | changes))


def picture(slot: str = "", side: int = 4) -> Media:
    return Media(type="image", data=torch.zeros(3, side, side), slot=slot)


def video(slot: str = "") -> Media:
    return Media(type="video", data=torch.zeros(2, 3, 4, 4), slot=slot)


RULES = [InputRule(type="image", most=2), InputRule(type="video"), InputRule(type="audio", least=1)]


@given(st.permutations(RULES), st.permutations(["image", "audio"]), st.permutations(PARTS))
def test_P1_equal_meaning_is_one_value_and_one_digest(rules: Any, types: Any, parts: Any) -> None:
    first = contract(
        inputs=InputMedia(rules=tuple(RULES), required_any=("image", "audio")),
        outputs=(Output(type="video"), Output(type="audio", channels=2, rate=16000)),
        objectives=(("sft", "element_mean"), ("dpo", "element_mean")),
    )
    other = contract(
        inputs=InputMedia(rules=tuple(rules), required_any=tuple(types)),
        outputs=(Output(type="audio", channels=2, rate=16000), Output(type="video")),
        objectives=(("dpo", "element_mean"), ("sft", "element_mean")),
        components=tuple(parts),
    )
    assert first == other and first.digest == other.digest
    assert [rule.type for rule in other.inputs.rules] == ["image", "video", "audio"]
    for changed in (attrs.evolve(first, negative_prompt="refused"), attrs.evolve(first, guidance="none")):
        assert changed.digest != first.digest


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rules": (InputRule(type="image"), InputRule(type="image"))}, "two rules of one type"),  # P1
        ({"rules": (InputRule(type="image"),), "binding": "ordered_references"}, "where their order is global"),  # P2
        ({"rules": (InputRule(type="image"),), "order": "global"}, "where their order is global"),
        (
            {"rules": (InputRule(type="image", slots=("a",)),), "binding": "ordered_references", "order": "global"},
            "media with slots are grouped",  # P3
        ),
        (
            {"rules": (InputRule(type="image", most=2, slots=("a", "b")),)},
            "several slots are ordered within their type",
        ),
        ({"rules": (InputRule(type="image"),), "least_total": 2}, "the rules allow 0 to 1, all together 2 to 1"),  # P5
        (
            {"rules": (InputRule(type="image", least=1),), "most_total": 0},
            "the rules allow 1 to 1, all together 0 to 0",
        ),
        ({"rules": (InputRule(type="image"),), "required_any": ("video",)}, "a type that has no rule"),
    ],
)
def test_P1_P2_P3_P5_media_that_contradict_themselves_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        InputMedia(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"most": 0}, "needs 0 <= least <= most and most >= 1"),  # P4
        ({"least": 2}, "needs 0 <= least <= most"),
        ({"most": 2, "slots": ("a",)}, "2 media cannot have 1 slots"),  # P3
        ({"slots": ("a", "a")}, "a slot is named twice"),
        ({"slots": ("a", "b"), "required_slots": ("b", "a")}, "some of the slots, in their order"),
        ({"required_slots": ("a",)}, "some of the slots"),
    ],
)
def test_P3_P4_rules_that_contradict_themselves_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        InputRule(type="image", **fields)


def test_P6_a_size_comes_from_an_input_only_where_there_always_is_one() -> None:
    with pytest.raises(SpecError, match="where no medium needs to be given"):
        contract(geometry_source="input", inputs=InputMedia(rules=(InputRule(type="image"),)))
    for certain in (
        InputMedia(rules=(InputRule(type="image", least=1),)),
        InputMedia(rules=(InputRule(type="image"),), least_total=1),
        InputMedia(rules=(InputRule(type="image"),), required_any=("image",)),
    ):
        assert contract(geometry_source="input", inputs=certain).inputs.certain


def test_P7_outputs_have_no_slots_and_one_medium_a_type() -> None:
    with pytest.raises(TypeError, match="slot"):
        Output(type="image", slot="first")  # type: ignore[call-arg]
    for outputs in ((), (Output(type="image"), Output(type="image"))):
        with pytest.raises(SpecError, match="at most one of a type"):
            contract(outputs=outputs)


def test_P8_a_checkpoint_only_narrows_what_its_family_declares() -> None:
    wide = contract(inputs=InputMedia(rules=(InputRule(type="image", most=2), InputRule(type="video"))), guidance="both",
                    guidance_default=3.5)  # fmt: skip
    one = InputMedia(rules=(InputRule(type="image", least=1),))
    narrow = contract(inputs=one, guidance="classifier_free", objectives=(), negative_prompt="refused",
                      geometry=Geometry(multiple=32, default=Size(height=64, width=64), most=96))  # fmt: skip
    assert narrow.narrows(wide) and wide.narrows(wide) and not wide.narrows(narrow)
    for wider in (
        contract(inputs=InputMedia(rules=(InputRule(type="image", most=3),))),
        contract(inputs=InputMedia(rules=(InputRule(type="audio"),))),
        contract(geometry=attrs.evolve(SQUARE, most=0)),
        contract(geometry=attrs.evolve(SQUARE, multiple=8)),
        contract(objectives=(("dpo", "element_mean"),)),
        contract(outputs=(Output(type="video"),)),
        attrs.evolve(wide, family="crane"),
    ):
        assert not wider.narrows(wide)
    assert not contract().narrows(contract(inputs=InputMedia(rules=(InputRule(type="image", least=1),))))


SLOTS = InputMedia(
    rules=(InputRule(type="image", most=2, slots=("first", "last"), required_slots=("first",)), InputRule(type="video")),
    order="within_type", least_total=1, most_total=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ((), "the slot 'first' is empty"),
        ((picture("last"),), "the slot 'first' is empty"),
        ((picture("first"), picture("first")), "the slot 'first' is filled twice"),
        ((picture(),), "a medium has no slot; name one of first, last"),
        ((picture("middle"),), "there is no slot 'middle'; the slots are first, last"),
        ((picture("first"), video(), video()), r"inputs.video: it takes 0 to 1 of these, received 2"),
        ((picture("first"), picture("last"), video()), "inputs: it takes 1 to 2 media in all, received 3"),
        ((Media(type="audio", data=torch.zeros(1, 3)),), "inputs.image: the slot 'first' is empty"),
        ((picture("first"), Media(type="audio", data=torch.zeros(1, 3))), "inputs.audio: it takes none"),
    ],
)
def test_P9_media_are_counted_and_named_before_anything_is_drawn(media: tuple[Media, ...], words: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(DataError, match=words) as found:
        contract(inputs=SLOTS).admit(Request(prompt="a", media=media), "rows.jsonl:3")
    assert str(found.value).startswith("rows.jsonl:3: heron does not take this row, ")
    assert torch.equal(torch.get_rng_state(), state)
    contract(inputs=SLOTS).admit(Request(prompt="a", media=(picture("first"), video())), "here")


def test_P9_one_of_the_types_must_be_there_and_negative_prompts_may_be_refused() -> None:
    either = InputMedia(rules=(InputRule(type="image"), InputRule(type="video")), required_any=("image", "video"))
    with pytest.raises(DataError, match="inputs.required_any: one of type image or video is missing"):
        contract(inputs=either).admit(Request(prompt="a"), "here")
    with pytest.raises(DataError, match="negative_prompt: it takes none"):
        contract(negative_prompt="refused").admit(Request(prompt="a", negative_prompt="b"), "here")
    contract(negative_prompt="refused").admit(Request(prompt="a", negative_prompt=""), "here")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.zeros(3, 4), "float32 with 3 dimensions"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), "float32 with 3 dimensions"),
        (torch.full((3, 4, 4), 255.0), "holds numbers from 0 to 1, received 255 to 255"),
        (torch.full((3, 4, 4), math.nan), "holds numbers from 0 to 1"),
        (torch.zeros(3, 0, 4), "float32 with 3 dimensions"),
    ],
)
def test_41_a_picture_is_numbers_from_0_to_1(data: torch.Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        Media(type="image", data=data)


def test_4_a_request_is_named_by_its_words_and_the_bytes_of_its_media() -> None:
    same = [Request(prompt="a", media=(picture(),)), Request(prompt="a", media=(picture(),))]
    assert same[0].fingerprint == same[1].fingerprint
    changed = torch.zeros(3, 4, 4)
    changed[0, 0, 0] = 0.5
    others = [
        Request(prompt="b", media=(picture(),)),
        Request(prompt="a", negative_prompt="", media=(picture(),)),
        Request(prompt="a", media=(picture("first"),)),
        Request(prompt="a", media=(Media(type="image", data=changed),)),
        Request(prompt="a", media=(picture(side=2),)),
        Request(prompt="a"),
    ]
    assert len({one.fingerprint for one in [same[0], *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("geometry", "size", "words"),
    [
        (SQUARE, Size(height=40, width=64), "geometry.multiple: the height must be a multiple of 16, received 40"),
        (SQUARE, Size(height=64, width=0), "geometry.multiple: the width must be a multiple of 16, received 0"),
        (SQUARE, Size(height=64, width=144), "geometry.most: the width is at most 128, received 144"),
        (SQUARE, Size(height=64, width=64, frames=5), "geometry.frames: one frame is made, received 5"),
        (
            attrs.evolve(SQUARE, frames_multiple=4, default=Size(height=64, width=64, frames=5)),
            Size(height=64, width=64, frames=8),
            "the number of frames must be a multiple of 4, and one more, received 8",
        ),
        (
            attrs.evolve(SQUARE, buckets=((64, 64), (96, 48))),
            Size(height=48, width=96),
            "geometry.buckets: 48 x 96 is none of 64 x 64, 96 x 48",
        ),
    ],
)
def test_sizes_that_cannot_be_made_are_refused_by_clause(geometry: Geometry, size: Size, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        contract(geometry=geometry).admit_size(size)
    contract(geometry=geometry).admit_size(geometry.default)


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_size_is_admitted_where_both_sides_are_multiples_within_bounds(height: int, width: int) -> None:
    right = all(side % 16 == 0 and side <= 128 for side in (height, width))
    assert (SQUARE.problem(Size(height=height, width=width)) is None) == right


def test_objectives_and_guidance_are_refused_by_clause() -> None:
    with pytest.raises(SpecError, match="heron is not trained by 'dpo', objectives: it supports sft"):
        contract().admit_objective("dpo")
    contract().admit_objective("sft")
    with pytest.raises(SpecError, match="guidance: it is 'embedded'; use 1, received 4.5"):
        contract(guidance="embedded", guidance_default=3.5).admit_guidance(4.5)
    contract(guidance="embedded", guidance_default=3.5).admit_guidance(1.0)
    with pytest.raises(SpecError, match="a scale of guidance is given where it is embedded"):
        contract(guidance_default=2.0)


def test_reserved_names_are_no_conditions() -> None:
    require_condition({"text", "pooled"}, "heron")
    with pytest.raises(SpecError, match="a condition may not be called 'latents'"):
        require_condition({"text", "latents"}, "heron")


INDEX = {"transformer": ("diffusers", "T"), "vae": ("diffusers", "V"), "text": ("transformers", "C"), "extra": None}
DECLARED = (*PARTS, Component(name="extra", optional=True), Component(name="words", alias="text"))


def test_R2_R3_R4_declared_optional_and_alias_parts() -> None:
    parts = Components(declared=DECLARED, index=INDEX, overrides={"vae": "/elsewhere/vae"})
    assert parts.owners == ("transformer", "vae", "text")
    assert parts.canonical("words") == "text" and parts.canonical("extra") == "extra"
    assert parts.has("words") and not parts.has("extra")
    found = parts.located(["words", "text", "extra", "vae"])
    assert [(one.name, one.folder, one.class_name) for one in found] == [
        ("text", "text", "C"),
        ("vae", "/elsewhere/vae", "V"),
    ]
    with pytest.raises(SpecError, match="'transformer' is trained"):
        parts.located(["transformer"])
    with pytest.raises(SpecError, match="there is no component 'vea'; the components are transformer, vae"):
        parts.located(["vea"])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"overrides": {"words": "x"}}, SpecError, "'words' cannot be overridden; what can be is vae, text, extra"),
        ({"overrides": {"transformer": "x"}}, SpecError, "'transformer' cannot be overridden"),
        ({"overrides": {"vae": "text"}}, SpecError, "vae and text would both own text"),
        ({"index": {**INDEX, "vae": None}}, ModelError, "model_index.json has no 'vae', which this family needs"),
        ({"declared": (*DECLARED, Component(name="vae"))}, SpecError, "component 'vae' is declared twice"),
        ({"declared": (*DECLARED, Component(name="w2", alias="words"))}, SpecError, "an alias of 'words', which owns"),
    ],
)
def test_every_physical_part_has_one_owner(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Components(**({"declared": DECLARED, "index": INDEX} | changes))


@pytest.mark.parametrize("name", ["WanPipeline", "WanImageToVideoPipeline"])
def test_a_pipeline_that_cleans_prompts_needs_what_it_cleans_them_by(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the one would leave prompts as they are, and the other fail at the first one."""
    module = importlib.import_module(diffusers_class(name).__module__)
    assert type(bare_pipeline(name, {})).__name__ == name
    monkeypatch.setattr(module, "is_ftfy_available", lambda: False)
    with pytest.raises(ModelError, match=f"^{name} cleans prompts by ftfy, which is not installed; pip install ftfy"):
        bare_pipeline(name, {})
