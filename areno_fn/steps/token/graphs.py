"""Token steps captured as CUDA graphs, one for each number of lanes; elsewhere the same step runs as it is."""

from __future__ import annotations

from typing import Any

import torch

from areno_fn import tree
from areno_fn.contracts.pages import Pages
from areno_fn.steps.token.lanes import Lanes


def buckets(rows: int) -> tuple[int, ...]:
    """The numbers of lanes that are computed together: powers of two below `rows`, and itself."""
    sizes = [1]
    while 2 * sizes[-1] < rows:
        sizes.append(2 * sizes[-1])
    return tuple(sizes) if sizes[-1] == rows else (*sizes, rows)


class Steps:
    """Runs token steps on lanes and pages that stay where they are.

    A captured graph reads its tensors by address. On a GPU the parameters are therefore copied into memory of this
    object whenever they are `load`ed, so that a graph cannot see those of an earlier update. The first step of a size
    runs as it is, which compiles its kernels; the second is captured.

    Args:
        lanes: what is stepped.
        pages: the cache.
        capture: whether to capture; without effect on a CPU.
    """

    def __init__(self, lanes: Lanes, pages: Pages, *, capture: bool = True) -> None:
        self.lanes, self.pages = lanes, pages
        self.captures = capture and lanes.device.type == "cuda"
        self.params: Any = None
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._memory: Any = None

    def load(self, params: Any) -> None:
        """Steps with these parameters from now on."""
        if not self.captures:
            self.params = params
        elif _alike(self.params, params):
            tree.map(lambda mine, given: mine.copy_(given), self.params, params)
        else:
            self._graphs.clear()
            self.params = tree.map(torch.clone, params)

    def run(self, rows: int, longest: int) -> None:
        """One step of the first `rows` lanes, of which none has stored more than `longest` tokens."""
        if not self.captures:
            self.lanes.step(self.params, self.pages, rows, longest)
        elif rows not in self._graphs:
            self.lanes.step(self.params, self.pages, rows)
            self._graphs[rows] = None
        else:
            graph = self._graphs[rows] or self._captured(rows)
            graph.replay()

    def _captured(self, rows: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # another thread may be copying a checkpoint to the host meanwhile
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self.lanes.step(self.params, self.pages, rows)
        self._memory = graph.pool()  # sizes take turns, so that one memory serves them all
        self._graphs[rows] = graph
        return graph


def _alike(mine: Any, given: Any) -> bool:
    """Whether one tree can be copied into the other."""
    if mine is None:
        return False
    a, b = ([(path, x.shape, x.dtype, x.device) for path, x in tree.leaves_with_path(t)] for t in (mine, given))
    return a == b
