"""`python -m areno_fn.kernels`: what kernels there are, where they are tested, and what they last took."""

from __future__ import annotations

from areno_fn.kernels.registry import every_kernel, text

if __name__ == "__main__":
    print(text(every_kernel()))
