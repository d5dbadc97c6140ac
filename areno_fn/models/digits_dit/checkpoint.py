"""The DiT in a file: the names of diffusers, and the leaves they become."""

from __future__ import annotations

from areno_fn.contracts.layout import Iso, TensorSpec, concat, product, rename, reshape
from areno_fn.models.digits_dit import DiTConfig
from areno_fn.models.digits_dit.model import FREQUENCIES

# fmt: off
BLOCK = (
    # leaf         inputs   names in the file, in the order in which they are laid, and rows of each in widths
    ("time_in",    "time",  ("norm1.emb.timestep_embedder.linear_1",), 1),
    ("time_out",   "width", ("norm1.emb.timestep_embedder.linear_2",), 1),
    ("modulation", "width", ("norm1.linear",), 6),
    ("qkv",        "width", ("attn1.to_q", "attn1.to_k", "attn1.to_v"), 1),
    ("o",          "width", ("attn1.to_out.0",), 1),
    ("up",         "width", ("ff.net.0.proj",), 4),
    ("down",       "inner", ("ff.net.2",), 1),
)
# fmt: on


def layout(config: DiTConfig) -> Iso:
    """From the names in a file to the paths of a `DiT`. The grid of positions is computed, and not stored."""
    width, patch = config.width, config.patch
    conv = TensorSpec((width, config.channels, config.patch_size, config.patch_size))
    parts = [
        reshape("pos_embed.proj.weight", "patch", conv, (width, patch)),
        rename("pos_embed.proj.bias", "patch_bias", TensorSpec((width,))),
        *_linear("last", ("proj_out_1",), 2 * width, width),
        *_linear("out", ("proj_out_2",), patch, width),
    ]
    for number in range(config.num_layers):
        file, leaf = f"transformer_blocks.{number}.", f"blocks.{number}."
        classes = TensorSpec((config.num_classes + 1, width))
        parts.append(rename(f"{file}norm1.emb.class_embedder.embedding_table.weight", f"{leaf}classes", classes))
        inputs = {"time": FREQUENCIES, "width": width, "inner": 4 * width}
        for name, columns, modules, widths in BLOCK:
            named = tuple(file + module for module in modules)
            parts += _linear(leaf + name, named, widths * width, inputs[columns])
    return product(parts)


def _linear(leaf: str, modules: tuple[str, ...], rows: int, columns: int) -> list[Iso]:
    """Weights and biases of linear layers, laid one below the other."""
    weights = {f"{module}.weight": TensorSpec((rows, columns)) for module in modules}
    biases = {f"{module}.bias": TensorSpec((rows,)) for module in modules}
    return [concat(weights, leaf), concat(biases, f"{leaf}_bias")]
