"""The dense decoder over packed documents. N packed tokens, D width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from areno_fn.autodiff import remat as recomputed
from areno_fn.contracts.errors import ModelError
from areno_fn.kernels.add_rms_norm import add_rms_norm
from areno_fn.kernels.attention import packed_attention, packed_layout
from areno_fn.kernels.attention.fused import takes
from areno_fn.kernels.consistency import ORDINARY, Primitives
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.models.decoder import Decoder, DecoderConfig, Layer
from areno_fn.models.decoder_block import Pair, block
from areno_fn.models.decoder_layer import angles, check_tokens, finish, logits, project, require_ordered


def forward(
    params: Decoder,
    config: DecoderConfig,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    segments: torch.Tensor,
    *,
    bounds: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Logits after every token of documents that are packed end to end.

    Args:
        params: the parameters.
        config: the model they belong to.
        tokens: int64 [N].
        positions: int64 [N], starting at 0 in every document.
        segments: int64 [N], the document of each token: 0, 0, .., 1, 1, .., non-decreasing without gaps.
        bounds: (number of documents, length of the longest or more) when known; needed under `torch.compile`.

    Returns:
        [N, V] in the dtype of the parameters. A document's logits depend on that document alone.

    Raises:
        ModelError: no tokens, other shapes or dtypes, or a token outside the vocabulary (seen on the CPU only).
        KernelError: segments are not numbered as above, or the bounds are not theirs.
    """
    return logits(params, hidden(params, config, tokens, positions, segments, bounds=bounds))


def hidden(
    params: Decoder,
    config: DecoderConfig,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    segments: torch.Tensor,
    *,
    bounds: tuple[int, int] | None = None,
    remat: int = 0,
    by: Primitives = ORDINARY,
) -> torch.Tensor:
    """Final hidden states [N, D]; arguments and errors as for `forward`.

    With `remat` k every k-th layer, from the first, keeps its input alone, and is computed again in the backward pass.
    `by` multiplies and attends.
    """
    if not tokens.shape == positions.shape == segments.shape:
        raise ModelError(
            "tokens, positions and segments must have one length, "
            f"received {list(tokens.shape)}, {list(positions.shape)} and {list(segments.shape)}"
        )
    check_tokens(tokens, config.vocab_size, dims=1)
    layout = packed_layout(segments, bounds)
    cos, sin = angles(config, positions)
    x = F.embedding(tokens, params.embed)
    if takes(x, config.head_dim):
        pair = Pair(x, torch.zeros_like(x))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # as every layer rounds them
        for number, layer in enumerate(params.layers):
            pair = block(config, layer, pair, cos, sin, layout, remat=is_again(number, remat), by=by)
        return add_rms_norm(pair.change, pair.stream, params.norm, config.rms_norm_eps)[1]

    require_ordered(x, by)

    def read(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        q, k, v = project(config, layer, x, cos, sin)
        return finish(config, layer, x, packed_attention(q, k, v, layout, config.head_dim**-0.5))

    again = recomputed(read)
    for number, layer in enumerate(params.layers):
        x = again(layer, x) if is_again(number, remat) else read(layer, x)
    return rms_norm(x, params.norm, config.rms_norm_eps)


def is_again(number: int, remat: int) -> bool:
    """Whether a layer is computed again: every `remat`-th, from the first; none for 0."""
    return remat > 0 and number % remat == 0
