"""One small call of every kernel, forward and backward, to see whether it runs on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from areno_fn import tree
from areno_fn.autodiff import custom_vjp, value_and_grad
from areno_fn.contracts.key import Key
from areno_fn.kernels.adamw import Factors, adamw_update
from areno_fn.kernels.add_rms_norm import add_rms_norm
from areno_fn.kernels.attention import equal_documents, packed_attention
from areno_fn.kernels.gated_gelu import gated_gelu
from areno_fn.kernels.gated_silu import gated_silu
from areno_fn.kernels.lanes import Book, next_places, record
from areno_fn.kernels.linear_token_logp import linear_token_logp
from areno_fn.kernels.linear_token_loss import linear_token_loss
from areno_fn.kernels.norm_rotary import norm_rotary
from areno_fn.kernels.norm_rotary_pages import norm_rotary_pages
from areno_fn.kernels.paged_attention import paged_attention
from areno_fn.kernels.rms_norm import rms_norm
from areno_fn.kernels.rotary import rotary
from areno_fn.kernels.sample import sample
from areno_fn.kernels.symmetric_product import symmetric_product
from areno_fn.kernels.token_logp import token_logp

_ROWS, _SIZE = 3, 32


def _angles(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.linspace(0, 3, _ROWS * _SIZE // 2, dtype=x.dtype, device=x.device).reshape(_ROWS, -1)
    return angles.cos(), angles.sin()


def _attended(x: torch.Tensor) -> torch.Tensor:
    """Rows of two query heads that share a key head, over pages of two places."""
    places = torch.arange(_ROWS, device=x.device)
    cache = x.reshape(_ROWS, 2, 1, _SIZE // 2)
    pages = torch.stack((places, places.flip(0)), dim=1)
    return paged_attention(x.reshape(_ROWS, 2, _SIZE // 2), cache, cache.flip(0), pages, 2 + places % 3, 0.5).flatten(1)


def _seen(x: torch.Tensor) -> torch.Tensor:
    """Two query heads that share a key head, in a document of which two places are seen, with bent scores."""
    q, k = x.reshape(_ROWS, 2, _SIZE // 2), x.flip(0)[:, : _SIZE // 2].reshape(_ROWS, 1, -1)
    return packed_attention(q, k, k.flip(2), equal_documents(1, _ROWS), 0.5, window=2, soft_cap=1.0)


def _lowered(x: torch.Tensor) -> torch.Tensor:
    """Log-probabilities beside the loss whose slope in each is -1."""
    targets = torch.arange(_ROWS, device=x.device)
    lever, logp, _ = linear_token_loss(x, x.flip(1).detach(), targets, lambda first, logp, _: -torch.ones_like(logp))
    return logp + lever


def _stored(x: torch.Tensor) -> torch.Tensor:
    """Queries of two heads, and the pages that their key and value went to."""
    size = _SIZE // 4
    weight = torch.linspace(1, 2, size, dtype=x.dtype, device=x.device)
    cos, sin = (angles[:, : size // 2] for angles in _angles(x))
    keys, values = (torch.zeros(2, 2, 1, size, dtype=x.dtype, device=x.device) for _ in range(2))
    places = torch.arange(_ROWS, device=x.device) + 1
    q = norm_rotary_pages(x.reshape(_ROWS, 4, size), weight, weight, cos, sin, 2, 1e-6, keys, values, places)
    return torch.cat([part.flatten() for part in (q, keys, values)])


def _lived(x: torch.Tensor) -> torch.Tensor:
    """What is written down of lanes in which a token was drawn, and where their next ones go."""
    rows = torch.arange(_ROWS, device=x.device)
    flags = torch.ones(_ROWS, dtype=torch.bool, device=x.device)
    stops = torch.arange(9, device=x.device) == 5
    columns = rows.new_zeros(_ROWS, 3), torch.zeros(_ROWS, 3, device=x.device)
    book = Book(rows.clone(), rows + 1, rows * 0, rows + 2, flags, ~flags, rows * 0, *columns, None, stops)
    record(book, rows, rows + 4, x[:, 0].float(), None, read=True)
    written = (book.last, book.stored, book.drawn, book.alive, book.state, book.tokens, book.logp)
    found = next_places(rows, (rows + 3).unsqueeze(1).expand(-1, 2), 2)
    return torch.cat([part.flatten().to(x.dtype) for part in (*written, *found)])


def _drawn(x: torch.Tensor) -> torch.Tensor:
    """Tokens, their log-probabilities and how many they were drawn among, under every rule and under none."""
    places = torch.arange(_ROWS, device=x.device)
    key = tree.map(lambda part: part.to(x.device), Key.of(4))
    drawn = [
        sample(x, key, places, places + 5, temperature=0.7, top_k=top_k, top_p=top_p, min_p=0.0)
        for top_k, top_p in ((0, 1.0), (9, 0.8))
    ]
    return torch.stack([column.to(x.dtype) for columns in drawn for column in columns])


def _constant(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A kernel without a derivative, whose input is given the gradient 0."""
    return custom_vjp(function, lambda cotangents, inputs, outputs: (torch.zeros_like(inputs[0]),), keep_outputs=False)


def _heads(x: torch.Tensor) -> torch.Tensor:
    size = _SIZE // 4
    weight = torch.linspace(1, 2, size, dtype=x.dtype, device=x.device)
    cos, sin = (angles[:, : size // 2] for angles in _angles(x))
    q, k = norm_rotary(x.reshape(_ROWS, 4, size), weight, weight.flip(0), cos, sin, 2, 1e-6)
    return torch.cat((q, k), dim=1)


def _moved(x: torch.Tensor) -> torch.Tensor:
    """Two updates of x by AdamW along itself."""
    master, mu, nu = x.float(), torch.zeros_like(x, dtype=torch.float32), torch.zeros_like(x, dtype=torch.float32)
    factors = Factors(*x.new_tensor([0.5, 0.1, 0.1, 0.001]).float())
    for _ in range(2):
        new = adamw_update([x], [master], [mu], [nu], torch.float32, [0.1], factors, (0.9, 0.999), 1e-8)
        master, mu, nu = new.master[0], new.mu[0], new.nu[0]
    return master.to(x.dtype)


SMOKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, x[0].detach() + 2, 1e-6),
    "adamw": _constant(_moved),
    "add_rms_norm": lambda x: add_rms_norm(x, x.flip(0).detach(), x[0].detach() + 2, 1e-6)[1],
    "attention": _seen,
    "gated_gelu": gated_gelu,
    "gated_silu": gated_silu,
    "paged_attention": _constant(_attended),
    "lanes": _constant(_lived),
    "linear_token_logp": lambda x: linear_token_logp(x, x.flip(1).detach(), torch.arange(_ROWS, device=x.device))[0],
    "linear_token_loss": _lowered,
    "rotary": lambda x: rotary(x.reshape(_ROWS, 1, _SIZE), *_angles(x)),
    "norm_rotary": _heads,
    "norm_rotary_pages": _constant(_stored),
    "sample": _constant(_drawn),
    "symmetric_product": _constant(lambda x: symmetric_product(x, symmetric_product(x), alpha=0.5, beta=-2.0)),
    "token_logp": lambda x: token_logp(x, torch.arange(_ROWS, device=x.device))[0],
}
"""A call of each kernel on an input of [3, 32]."""


def largest_error(kernel: str, device: torch.device) -> float:
    """The largest difference of a kernel's outputs and gradients in float32 on `device` from float64 on the CPU."""
    exact, on_device = _run(kernel, torch.float64, torch.device("cpu")), _run(kernel, torch.float32, device)
    return max(float((a - b.cpu().double()).abs().max()) for a, b in zip(exact, on_device, strict=True))


def _run(kernel: str, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of what a kernel returns, and its gradient; unequal weights let no error cancel."""
    x = torch.linspace(-2, 2, _ROWS * _SIZE, dtype=dtype, device=device).reshape(_ROWS, _SIZE)

    def total(x: torch.Tensor) -> torch.Tensor:
        y = SMOKE[kernel](x)
        return (y * torch.linspace(1, 2, y.numel(), dtype=dtype, device=device).reshape(y.shape)).sum()

    value, gradient = value_and_grad(total)(x)
    return value, gradient
