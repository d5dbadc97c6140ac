"""What the contracts of the large families admit, from configurations alone: sizes, given media, guidance, and parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from flow_toys import PUBLISHED

from areno_fn.contracts.errors import DataError, ModelError, SpecError
from areno_fn.contracts.flow_adapter import NoiseLevels, Pipeline
from areno_fn.contracts.geometry import Size
from areno_fn.contracts.media import Media, Request
from areno_fn.contracts.pipeline_io import PipelineIOContract
from areno_fn.models.flux2.adapter import levels_of
from areno_fn.models.noise_levels import unipc_levels
from areno_fn.models.pipelines import pipeline_family

EIGHT = {"block_out_channels": [128, 256, 512, 512]}
WAN = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}
VAES: dict[str, Mapping[str, Any]] = {
    "flux2": EIGHT, "z_image": EIGHT, "qwen_image": {"temperal_downsample": [False, True, True]}, "wan": WAN,
    "ltx2": {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
}  # fmt: skip


def contract(name: str, class_name: str, **options: Any) -> PipelineIOContract:
    published = PUBLISHED[name]
    vae = VAES[published.family] | options.pop("vae", {})
    index = {"transformer": ("diffusers", "T"), **options.pop("index", {})}
    configs = {"transformer": published.hf, "vae": vae, "audio_vae": {}, "vocoder": {"output_sampling_rate": 24000}}
    return pipeline_family(class_name).contract(
        Pipeline(class_name=class_name, index=index, options=options, configs=configs)
    )


def picture(height: int = 16, width: int = 16, slot: str = "") -> Media:
    return Media(type="image", data=torch.zeros(3, height, width), slot=slot)


SIZES = [
    ("Flux.2 dev", "Flux2Pipeline", {}, Size(height=1024, width=1024), Size(height=16, width=48)),
    ("Qwen-Image", "QwenImagePipeline", {}, Size(height=1024, width=1024), Size(height=1328, width=1328)),
    ("Z-Image Turbo", "ZImagePipeline", {}, Size(height=1024, width=1024), Size(height=720, width=1280)),
    (
        "Wan 2.1 text to video 14B", "WanPipeline", {},
        Size(height=480, width=832, frames=81), Size(height=720, width=1280, frames=1),
    ),
    (
        "Wan 2.2 5B", "WanPipeline", {"expand_timesteps": True, "vae": {"scale_factor_spatial": 16}},
        Size(height=480, width=832, frames=81), Size(height=704, width=1280, frames=121),
    ),
    (
        "LTX-2", "LTX2Pipeline", {},
        Size(height=512, width=768, frames=121), Size(height=704, width=1280, frames=9),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "class_name", "options", "usual", "other"), SIZES)
def test_the_sizes_that_are_published_can_be_made(
    name: str, class_name: str, options: dict[str, Any], usual: Size, other: Size
) -> None:
    made = contract(name, class_name, **options)
    assert made.geometry.default == usual
    made.admit_size(other)


REFUSED = [
    ("Flux.2 dev", "Flux2Pipeline", Size(height=1000, width=1024), "geometry.multiple: the height must be a multiple of 16"),
    ("Qwen-Image", "QwenImagePipeline", Size(height=512, width=520), "geometry.multiple: the width must be a multiple of 16"),
    ("Z-Image Turbo", "ZImagePipeline", Size(height=8, width=16), "geometry.multiple: the height must be a multiple of 16"),
    ("Z-Image Turbo", "ZImagePipeline", Size(height=16, width=16, frames=5), "geometry.frames: one frame is made"),
    (
        "Wan 2.1 text to video 14B", "WanPipeline", Size(height=480, width=832, frames=80),
        "geometry.frames: the number of frames must be a multiple of 4, and one more, received 80",
    ),
    (
        "Wan 2.1 text to video 14B", "WanPipeline", Size(height=488, width=832, frames=81),
        "geometry.multiple: the height must be a multiple of 16",
    ),
    (
        "LTX-2", "LTX2Pipeline", Size(height=528, width=768, frames=121),
        "geometry.multiple: the height must be a multiple of 32",
    ),
    (
        "LTX-2", "LTX2Pipeline", Size(height=512, width=768, frames=125),
        "geometry.frames: the number of frames must be a multiple of 8, and one more, received 125",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "class_name", "size", "words"), REFUSED)
def test_other_sizes_are_refused_by_the_clause_that_they_break(
    name: str, class_name: str, size: Size, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        contract(name, class_name).admit_size(size)


def test_the_5B_of_wan_2_2_makes_frames_of_a_multiple_of_32() -> None:
    made = contract("Wan 2.2 5B", "WanPipeline", expand_timesteps=True, vae={"scale_factor_spatial": 16})
    with pytest.raises(SpecError, match=r"geometry.multiple: the height must be a multiple of 32, received 720"):
        made.admit_size(Size(height=720, width=1280, frames=121))


def test_editions_need_pictures_and_a_model_of_new_ones_takes_none() -> None:
    edit = contract("Qwen-Image-Edit 2511", "QwenImageEditPlusPipeline")
    edit.admit(Request(prompt="x", media=(picture(), picture())), "row 1", Size(height=16, width=16))
    with pytest.raises(DataError, match=r"row 1: qwen_image .*inputs.image: it takes 1 to 3 of these, received 0"):
        edit.admit(Request(prompt="x"), "row 1")
    with pytest.raises(DataError, match=r"inputs_like_output: the image must be 32 x 16"):
        edit.admit(Request(prompt="x", media=(picture(),)), "row 1", Size(height=32, width=16))
    with pytest.raises(DataError, match=r"inputs.image: it takes none"):
        contract("Qwen-Image", "QwenImagePipeline").admit(Request(prompt="x", media=(picture(),)), "row 1")


FIRST, LAST = picture(slot="first_frame"), picture(slot="last_frame")


def test_wan_takes_the_frames_that_its_checkpoint_has_room_for() -> None:
    picture_model = contract("Wan 2.1 image to video 14B", "WanImageToVideoPipeline")
    picture_model.admit(Request(prompt="x", media=(FIRST,)), "row")
    with pytest.raises(DataError, match=r"inputs.image: it takes 1 of these, received 2"):
        picture_model.admit(Request(prompt="x", media=(FIRST, LAST)), "row")
    between = contract("Wan 2.1 first and last frame to video 14B", "WanImageToVideoPipeline")
    between.admit(Request(prompt="x", media=(FIRST, LAST)), "row")
    with pytest.raises(DataError, match=r"inputs.image: it takes 2 of these, received 1"):
        between.admit(Request(prompt="x", media=(FIRST,)), "row")
    experts = {"index": {"transformer_2": ("diffusers", "T")}, "boundary_ratio": 0.9}
    both = contract("Wan 2.2 image to video A14B", "WanImageToVideoPipeline", **experts)
    both.admit(Request(prompt="x", media=(FIRST,)), "row")
    both.admit(Request(prompt="x", media=(FIRST, LAST)), "row")
    assert [one.name for one in both.components if one.trained] == ["transformer", "transformer_2"]


def test_wan_begins_with_a_given_video() -> None:
    made = contract("Wan 2.1 text to video 14B", "WanVideoToVideoPipeline")
    assert made.initial == "input"
    made.admit(Request(prompt="x", media=(Media(type="video", data=torch.zeros(5, 3, 16, 16)),)), "row")
    with pytest.raises(DataError, match=r"inputs.video: it takes 1 of these, received 0"):
        made.admit(Request(prompt="x"), "row")
    with pytest.raises(SpecError, match="sampling cannot begin with a medium that does not need to be given"):
        attrs.evolve(contract("Wan 2.1 text to video 14B", "WanPipeline"), initial="input")


def test_a_checkpoint_of_another_pipeline_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a WanPipeline lays 0 channels beside .* but its transformer takes 20"):
        contract("Wan 2.1 image to video 14B", "WanPipeline")
    with pytest.raises(ModelError, match=r"has transformer_2 where it has a boundary_ratio, and nowhere else"):
        contract("Wan 2.1 text to video 14B", "WanPipeline", boundary_ratio=0.9)


def test_guidance_is_what_each_checkpoint_was_trained_for() -> None:
    dev = contract("Flux.2 dev", "Flux2Pipeline")
    assert dev.guidance == "embedded" and dev.guidance_default == 4.0
    with pytest.raises(SpecError, match=r"takes no classifier-free guidance, guidance: it is 'embedded'"):
        dev.admit_guidance(3.0)
    with pytest.raises(DataError, match=r"negative_prompt: it takes none"):
        dev.admit(Request(prompt="x", negative_prompt="y"), "row 1")
    contract("Flux.2 Klein 4B", "Flux2KleinPipeline").admit_guidance(4.0)
    with pytest.raises(SpecError, match=r"guidance: it is 'none'"):
        contract("Flux.2 Klein 4B", "Flux2KleinPipeline", is_distilled=True).admit_guidance(4.0)


def test_video_comes_with_sound_in_a_fixed_order() -> None:
    made = contract("LTX-2", "LTX2Pipeline")
    assert [(one.type, one.rate) for one in made.outputs] == [("video", 24), ("audio", 24000)]


def test_rows_of_one_batch_are_given_as_many_pictures_each() -> None:
    made = contract("Flux.2 dev", "Flux2Pipeline")
    none, two = Request(prompt="x"), Request(prompt="x", media=(picture(), picture()))
    made.admit_together([two, two], "rows")
    with pytest.raises(DataError, match=r"rows: flux2 .*batching: it is 'uniform', received rows with 0 and with 2"):
        made.admit_together([two, none], "rows")


UNIPC = {
    "_class_name": "UniPCMultistepScheduler", "flow_shift": 5.0, "prediction_type": "flow_prediction",
    "use_flow_sigmas": True, "solver_order": 2, "disable_corrector": [], "num_train_timesteps": 1000,
}  # fmt: skip


def test_the_scheduler_of_wan_is_read_strictly() -> None:
    assert unipc_levels(UNIPC) == NoiseLevels(shift=5.0, solver="unipc")
    for changed, words in (
        ({"solver_order": 3}, "solver_order is 3"),
        ({"prediction_type": "epsilon"}, "prediction_type is 'epsilon'"),
        ({"disable_corrector": [0]}, r"disable_corrector is \[0\]"),
        ({"momentum": 1}, "the field 'momentum' is unknown"),
        ({"use_flow_sigmas": None}, "use_flow_sigmas must be true"),
    ):
        with pytest.raises(ModelError, match=words):
            unipc_levels(UNIPC | changed)


def test_the_shift_of_flux2_follows_tokens_and_steps() -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
    for tokens in (256, 1024, 4096, 4301, 8192):
        for steps in (4, 28, 50, 200):
            expected = math.exp(compute_empirical_mu(tokens, steps))
            assert levels_of(scheduler, tokens).shift_of(steps) == pytest.approx(expected, rel=1e-9)
