"""Boundary 1, the device: primitives with a hand-written backward, one folder each.

`kernels/<name>/__init__.py` is the function that models and steps call; `reference.py` computes it in plain
torch, `triton.py` on the GPU, and `cases.py` says what is tested and what the hardware allows. Names
describe the mathematics, never a model.
"""
