"""The DiT in a file: the names of diffusers, and the leaves they become."""

from __future__ import annotations

from areno_fn.contracts.layout import Iso, TensorSpec, concat, product, rename, reshape
from areno_fn.contracts.placement import Block, Fused, Placement, Replicated, Split, Vocabulary
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


def placements(config: DiTConfig) -> dict[str, Placement]:
    """How ranks share each leaf: heads and the inner width are dealt out, modulations part by part, classes by rows."""
    width, heads = config.width, Block(config.width, config.num_heads)
    whole = Replicated()
    block: dict[str, Placement] = {
        "time_in": Split(0),
        "time_in_bias": Split(0),
        "time_out": Split(1),
        "time_out_bias": whole,
        "classes": Vocabulary(0),
        "modulation": Fused((Block(width),) * 6),
        "modulation_bias": Fused((Block(width),) * 6),
        "qkv": Fused((heads,) * 3),
        "qkv_bias": Fused((heads,) * 3),
        "o": Split(1),
        "o_bias": whole,
        "up": Split(0),
        "up_bias": Split(0),
        "down": Split(1),
        "down_bias": whole,
    }
    found: dict[str, Placement] = {"patch": Split(0), "patch_bias": Split(0), "out": whole, "out_bias": whole}
    found |= {"last": Fused((Block(width),) * 2), "last_bias": Fused((Block(width),) * 2)}
    return found | {f"blocks.{n}.{leaf}": how for n in range(config.num_layers) for leaf, how in block.items()}


def _linear(leaf: str, modules: tuple[str, ...], rows: int, columns: int) -> list[Iso]:
    """Weights and biases of linear layers, laid one below the other."""
    weights = {f"{module}.weight": TensorSpec((rows, columns)) for module in modules}
    biases = {f"{module}.bias": TensorSpec((rows,)) for module in modules}
    return [concat(weights, leaf), concat(biases, f"{leaf}_bias")]
