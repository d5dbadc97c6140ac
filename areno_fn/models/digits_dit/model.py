"""The DiT: its parameters, how they start, and its velocity."""

from __future__ import annotations

import math

import attrs
import torch
import torch.nn.functional as F

from areno_fn import random, tree
from areno_fn.contracts.adapter import Weight
from areno_fn.contracts.calls import checked, received, require_types
from areno_fn.contracts.errors import ModelError
from areno_fn.contracts.flow_policy import straight
from areno_fn.contracts.key import Key
from areno_fn.contracts.record import record, shown
from areno_fn.kernels.linear import linear
from areno_fn.models.digits_dit import DiTConfig

FREQUENCIES = 256


@record
class Block:
    """Parameters of one block. Matrices are [out, in] and may be adapted.

    Attributes:
        time_in, time_in_bias: [D, 256], [D].
        time_out, time_out_bias: [D, D], [D].
        classes: [num_classes + 1, D].
        modulation, modulation_bias: [6 D, D], [6 D], rows: shift, scale and gate of the attention, then of the rest.
        qkv, qkv_bias: [3 D, D], [3 D], rows in the order q, k, v.
        o, o_bias: [D, D], [D].
        up, up_bias: [4 D, D], [4 D].
        down, down_bias: [D, 4 D], [D].
    """

    time_in: Weight
    time_in_bias: torch.Tensor
    time_out: Weight
    time_out_bias: torch.Tensor
    classes: torch.Tensor
    modulation: Weight
    modulation_bias: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor
    o: Weight
    o_bias: torch.Tensor
    up: Weight
    up_bias: torch.Tensor
    down: Weight
    down_bias: torch.Tensor


@record
class DiT:
    """Parameters of a whole model.

    Attributes:
        patch, patch_bias: [D, C P P], [D].
        blocks: one record a block; the first one's embedding of time and class is the output's too.
        last, last_bias: [2 D, D], [2 D], rows: shift and scale of the last normalisation.
        out, out_bias: [P P C, D], [P P C].
    """

    patch: Weight
    patch_bias: torch.Tensor
    blocks: tuple[Block, ...]
    last: Weight
    last_bias: torch.Tensor
    out: Weight
    out_bias: torch.Tensor


def shapes(config: DiTConfig, dtype: torch.dtype = torch.float32) -> DiT:
    """The parameters of `config` as meta tensors: structure, shapes and dtype, without storage."""

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    d, p = config.width, config.patch
    block = Block(
        time_in=meta(d, FREQUENCIES),
        time_in_bias=meta(d),
        time_out=meta(d, d),
        time_out_bias=meta(d),
        classes=meta(config.num_classes + 1, d),
        modulation=meta(6 * d, d),
        modulation_bias=meta(6 * d),
        qkv=meta(3 * d, d),
        qkv_bias=meta(3 * d),
        o=meta(d, d),
        o_bias=meta(d),
        up=meta(4 * d, d),
        up_bias=meta(4 * d),
        down=meta(d, 4 * d),
        down_bias=meta(d),
    )
    blocks = tuple(tree.map(lambda x: x, block) for _ in range(config.num_layers))
    return DiT(
        patch=meta(d, p),
        patch_bias=meta(d),
        blocks=blocks,
        last=meta(2 * d, d),
        last_bias=meta(2 * d),
        out=meta(p, d),
        out_bias=meta(p),
    )


@checked
def init(config: DiTConfig, key: Key, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> DiT:
    """Random parameters, of which every block begins as the identity and the velocity as 0 (adaLN-Zero).

    Matrices are normal with deviation 1 / sqrt(inputs), the embeddings of time and class with .02; modulations, the
    output and biases are 0. A number is a function of (key, path of the leaf, row, column).
    """

    def start(path: str, leaf: torch.Tensor) -> torch.Tensor:
        name = path.rpartition(".")[2]
        if leaf.ndim == 1 or name in ("modulation", "last", "out"):
            return torch.zeros(leaf.shape, dtype=dtype, device=device)
        deviation = 0.02 if name in ("time_in", "time_out", "classes") else 1 / math.sqrt(leaf.shape[1])
        rows, columns = (torch.arange(n, device=device) for n in leaf.shape)
        return (random.normal(key.fold(path), rows[:, None], columns) * deviation).to(dtype)

    return tree.map_with_path(start, shapes(config, dtype))


def velocity(
    params: DiT, config: DiTConfig, state: torch.Tensor, timestep: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """The velocity [B, C, S, S] of states [B, C, S, S].

    Args:
        params: the parameters.
        config: the model.
        state: floating; computed in the dtype of the parameters.
        timestep: float32 [B], 1000 sigma.
        labels: int64 [B], in [0, num_classes]; num_classes is no class.

    Raises:
        ModelError: the state or the labels do not fit the model.
    """
    _check(config, state, labels)
    dtype = params.patch_bias.dtype
    x = linear(_patches(config, state.to(dtype)), params.patch, params.patch_bias)
    x = x + _positions(config, x.device).to(dtype)
    waves = _waves(timestep).to(dtype)
    for block in params.blocks:
        x = _block(block, config, x, _embedding(block, waves, labels))
    shift, scale = _modulated(params.last, params.last_bias, _embedding(params.blocks[0], waves, labels), 2)
    x = F.layer_norm(x, (config.width,), eps=1e-6) * (1 + scale) + shift
    return _picture(config, linear(x, params.out, params.out_bias))


def _block(block: Block, config: DiTConfig, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    modulation = _modulated(block.modulation, block.modulation_bias, embedding, 6)
    shift, scale, gate, shift_up, scale_up, gate_up = modulation
    normal = F.layer_norm(x, (config.width,), eps=1e-6) * (1 + scale) + shift
    qkv = linear(normal, block.qkv, block.qkv_bias).unflatten(-1, (3, config.num_heads, config.head_dim))
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + gate * linear(attended, block.o, block.o_bias)
    normal = F.layer_norm(x, (config.width,), eps=1e-5) * (1 + scale_up) + shift_up
    inner = F.gelu(linear(normal, block.up, block.up_bias), approximate="tanh")
    return x + gate_up * linear(inner, block.down, block.down_bias)


def _modulated(weight: Weight, bias: torch.Tensor, embedding: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """Shifts, scales and gates, [B, 1, D] each."""
    return linear(F.silu(embedding), weight, bias).unsqueeze(1).chunk(parts, dim=-1)


def _embedding(block: Block, waves: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What time and class say to a block, [B, D]."""
    time = F.silu(linear(waves, block.time_in, block.time_in_bias))
    return linear(time, block.time_out, block.time_out_bias) + block.classes[labels]


def _waves(timestep: torch.Tensor) -> torch.Tensor:
    """Cosines, then sines, of times at frequencies from 1 to 1 / 10,000, float32 [B, 256]."""
    half = FREQUENCIES // 2
    place = torch.arange(half, dtype=torch.float32, device=timestep.device)
    turned = timestep.float()[:, None] * torch.exp(-math.log(10000.0) * place / (half - 1))
    return torch.cat([turned.cos(), turned.sin()], -1)


def _positions(config: DiTConfig, device: torch.device) -> torch.Tensor:
    """Sines and cosines of columns, then of rows, float32 [N, D]."""
    quarter = config.width // 4
    place = torch.arange(quarter, dtype=torch.float64, device=device)
    angles = torch.arange(config.grid, device=device).double()[:, None] * 10000.0 ** (-place / quarter)
    along = torch.cat([angles.sin(), angles.cos()], -1)
    down, across = along[:, None].expand(-1, config.grid, -1), along.expand(config.grid, -1, -1)
    return torch.cat([across, down], -1).flatten(0, 1).float()


def _patches(config: DiTConfig, picture: torch.Tensor) -> torch.Tensor:
    """[B, C, S, S] -> [B, N, C P P]."""
    g, p = config.grid, config.patch_size
    cut = picture.reshape(-1, config.channels, g, p, g, p)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, g * g, config.patch)


def _picture(config: DiTConfig, patches: torch.Tensor) -> torch.Tensor:
    """[B, N, P P C] -> [B, C, S, S]."""
    g, p = config.grid, config.patch_size
    laid = patches.reshape(-1, g, g, p, p, config.channels)
    return laid.permute(0, 5, 1, 3, 2, 4).reshape(-1, config.channels, config.sample_size, config.sample_size)


def _check(config: DiTConfig, state: torch.Tensor, labels: torch.Tensor) -> None:
    shape = (config.channels, config.sample_size, config.sample_size)
    if tuple(state.shape[1:]) != shape or labels.shape != state.shape[:1] or labels.dtype != torch.int64:
        raise ModelError(
            f"this model takes states {[-1, *shape]} and labels int64 [B], received {shown(state)} and {shown(labels)}"
        )
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and labels.numel():
        low, high = (int(x) for x in labels.aminmax())
        if low < 0 or high > config.num_classes:
            raise ModelError(
                f"label {low if low < 0 else high} is none of the {config.num_classes} classes, "
                f"nor {config.num_classes}, which stands for no class"
            )


@attrs.frozen
class DiTPolicy:
    """The `FlowPolicy` of a DiT: its functions with the configuration filled in."""

    config: DiTConfig
    guide = staticmethod(straight)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """C, S, S."""
        return (self.config.channels, self.config.sample_size, self.config.sample_size)

    def __attrs_post_init__(self) -> None:
        require_types(self)

    def velocity(
        self, params: DiT, state: torch.Tensor, timestep: torch.Tensor, condition: torch.Tensor
    ) -> torch.Tensor:
        """The velocity [B, C, S, S]; the condition is a label a row, int64 [B].

        Raises:
            ModelError: parameters, states or labels are not of this model.
        """
        if not isinstance(params, DiT):
            raise ModelError(
                f"this model takes its parameters, a DiT, received {received(params)}; of a state give params['actor']"
            )
        return velocity(params, self.config, state, timestep, condition)
