"""LTX-2 in a file."""

from __future__ import annotations

from collections.abc import Iterator

from areno_fn.models.flow_checkpoint import Leaf, Row, columns, linear, read, repeat, rows, table, tensor
from areno_fn.models.ltx2 import LTX2Config


# fmt: off
def _embedder(name: str, outputs: str, width: str, when: str = "") -> tuple[Row, ...]:
    """Lines of a table: time, embedded and turned into modulations."""
    return table(
        linear(f"{name}.emb.timestep_embedder.linear_1", width, "256",   when=when),
        linear(f"{name}.emb.timestep_embedder.linear_2", width, width,   when=when),
        linear(f"{name}.linear",                         outputs, width, when=when),
    )


def _attention(name: str, inside: str, heads: str, reader: str, read: str, gate: str) -> tuple[Row, ...]:
    """Lines of a table: the stream `reader` attends to channels `read` with `inside` channels in `heads` heads."""
    whole = f"{inside}/{heads}"  # the norms go over all heads, so that their weights are dealt like them
    return table(
        linear(f"{name}.to_q",           inside, reader, cut=rows(whole), bias="qkv_bias"),
        linear(f"{name}.to_k",           inside, read,   cut=rows(whole), bias="qkv_bias"),
        linear(f"{name}.to_v",           inside, read,   cut=rows(whole), bias="qkv_bias"),
        tensor(f"{name}.norm_q.weight",  inside,         cut=rows(whole)),
        tensor(f"{name}.norm_k.weight",  inside,         cut=rows(whole)),
        linear(f"{name}.to_gate_logits", heads, reader,  cut=rows(f"{heads}/{heads}"), when=gate),
        linear(f"{name}.to_out.0",       reader, inside, cut=columns(whole), bias="out_bias"),
    )


OUTSIDE = table(
    linear("proj_in",                           "video", "video_in"),
    linear("audio_proj_in",                     "audio", "audio_in"),
    tensor("keyframes_abs_pos_embedding",       "1", "video",       when="keyframes"),
    linear("caption_projection.linear_1",       "video", "caption", when="caption"),
    linear("caption_projection.linear_2",       "video", "video",   when="caption"),
    linear("audio_caption_projection.linear_1", "audio", "caption", when="caption"),
    linear("audio_caption_projection.linear_2", "audio", "audio",   when="caption"),
    _embedder("time_embed",                      "video_mods*video", "video"),
    _embedder("audio_time_embed",                "audio_mods*audio", "audio"),
    _embedder("av_cross_attn_video_scale_shift", "4*video", "video"),
    _embedder("av_cross_attn_audio_scale_shift", "4*audio", "audio"),
    _embedder("av_cross_attn_video_a2v_gate",    "video", "video"),
    _embedder("av_cross_attn_audio_v2a_gate",    "audio", "audio"),
    _embedder("prompt_adaln",                    "2*video", "video", when="prompt prompt_time"),
    _embedder("audio_prompt_adaln",              "2*audio", "audio", when="prompt prompt_time"),
    tensor("scale_shift_table",                 "2", "video"),
    tensor("audio_scale_shift_table",           "2", "audio"),
    linear("proj_out",                          "video_out", "video"),
    linear("audio_proj_out",                    "audio_out", "audio"),
)
BLOCK = table(
    tensor("scale_shift_table",                      "video_mods", "video"),
    tensor("audio_scale_shift_table",                "audio_mods", "audio"),
    tensor("prompt_scale_shift_table",               "2", "video", when="prompt"),
    tensor("audio_prompt_scale_shift_table",         "2", "audio", when="prompt"),
    tensor("video_a2v_cross_attn_scale_shift_table", "5", "video"),
    tensor("audio_a2v_cross_attn_scale_shift_table", "5", "audio"),
    tensor("norm1.weight",                           "video",      when="norm_weights"),
    tensor("audio_norm1.weight",                     "audio",      when="norm_weights"),
    tensor("norm2.weight",                           "video",      when="norm_weights"),
    tensor("audio_norm2.weight",                     "audio",      when="norm_weights"),
    tensor("audio_to_video_norm.weight",             "video",      when="norm_weights"),
    tensor("video_to_audio_norm.weight",             "audio",      when="norm_weights"),
    tensor("norm3.weight",                           "video",      when="norm_weights"),
    tensor("audio_norm3.weight",                     "audio",      when="norm_weights"),
    #          name                   inside   heads          reader   read          gate
    _attention("attn1",               "video", "video_heads", "video", "video",      "video_gate"),
    _attention("audio_attn1",         "audio", "audio_heads", "audio", "audio",      "audio_gate"),
    _attention("attn2",               "video", "video_heads", "video", "video_text", "video_gate"),
    _attention("audio_attn2",         "audio", "audio_heads", "audio", "audio_text", "audio_gate"),
    _attention("audio_to_video_attn", "audio", "audio_heads", "video", "audio",      "video_gate"),
    _attention("video_to_audio_attn", "audio", "audio_heads", "audio", "video",      "audio_gate"),
    linear("ff.net.0.proj",       "4*video", "video", cut=rows("4*video"),    bias="video_ff_bias"),
    linear("ff.net.2",            "video", "4*video", cut=columns("4*video"), bias="video_ff_bias"),
    linear("audio_ff.net.0.proj", "4*audio", "audio", cut=rows("4*audio"),    bias="audio_ff_bias"),
    linear("audio_ff.net.2",      "audio", "4*audio", cut=columns("4*audio"), bias="audio_ff_bias"),
)
# fmt: on


def leaves(config: LTX2Config) -> dict[str, Leaf]:
    """Every tensor of the state dict."""
    sizes = {"caption": config.caption_channels}
    for name, stream in (("video", config.video), ("audio", config.audio)):
        sizes |= {
            name: stream.width,
            f"{name}_heads": stream.num_heads,
            f"{name}_in": stream.in_channels,
            f"{name}_out": stream.out_channels,
            f"{name}_text": stream.text_dim,
            f"{name}_mods": 9 if stream.text_modulated else 6,
        }
    flags = set(_flags(config))
    return read(OUTSIDE, sizes, flags) | repeat(BLOCK, sizes, "transformer_blocks", config.num_layers, flags)


def _flags(config: LTX2Config) -> Iterator[str]:
    given = {
        "caption": config.caption_channels > 0,
        "keyframes": config.keyframe_positions,
        "norm_weights": config.norm_weights,
        "prompt": config.video.text_modulated or config.audio.text_modulated,
        "prompt_time": config.prompt_time,
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_out_bias,
        "video_gate": config.video.gated,
        "audio_gate": config.audio.gated,
        "video_ff_bias": config.video.ff_bias,
        "audio_ff_bias": config.audio.ff_bias,
    }
    return (name for name, is_set in given.items() if is_set)
