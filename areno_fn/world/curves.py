"""The picture of a run: every curve that its metrics hold, over the steps of the whole run, phases shaded."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from areno_fn.contracts.errors import DataError

_PANELS = (
    ("reward", "rollout/reward_mean", "#2563eb"),
    ("loss", "train/loss", "#dc2626"),
    ("diversity within a class", "eval/diversity", "#0891b2"),
    ("KL to the reference", "train/kl", "#7c3aed"),
    ("distance from the reference", "flow/kl", "#7c3aed"),
    ("preference margin", "dpo/margin", "#db2777"),
    ("explained variance of returns", "critic/explained_variance", "#9333ea"),
    ("entropy, nats", "train/entropy", "#0d9488"),
    ("response length, tokens", "rollout/response_len_mean", "#b45309"),
    ("gradient norm", "train/grad_norm", "#475569"),
    ("learning rate", "train/lr", "#475569"),
)
_APART = ("eval/diversity", "eval_ema/diversity")
"""Numbers of evaluations that no reward gives."""
_EXACT = ("train/lr",)  # known, not measured: nothing to smooth
_EVALUATIONS = ("#ea580c", "#16a34a", "#db2777", "#854d0e")
_SHADES = ("#f1f5f9", "#ffffff")
_INK, _GREY = "#0f172a", "#64748b"


@attrs.frozen
class Curve:
    """One metric: steps, values (NaN where a value was not finite), and the phase each belongs to."""

    steps: list[int]
    values: list[float]
    phases: list[str]


def draw(metrics: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    """Draws the curves of a run.

    Args:
        metrics: the JSONL file that `JsonlTracker` writes; a last line that is cut off is left out.
        picture: PNG file to write.

    Raises:
        DataError: a line is not one of a metrics file.
    """
    lines = _read(Path(metrics))
    figure = plot(curves(lines), spans(lines))
    FigureCanvasAgg(figure).print_png(os.fspath(picture))


def curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """The curves by metric name, in the order in which they were logged."""
    found: dict[str, Curve] = {}
    for line in lines:
        for name, value in line.items():
            if "/" in name:
                curve = found.setdefault(name, Curve([], [], []))
                curve.steps.append(line["step"])
                curve.values.append(math.nan if value is None else value)
                curve.phases.append(line["phase"])
    return found


def spans(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Name, first and last step of each phase; a phase begins where the one before it ended."""
    last: dict[str, int] = {}
    for line in lines:
        last[line["phase"]] = max(line["step"], last.get(line["phase"], 0))
    begins = [min((line["step"] for line in lines), default=0), *last.values()]
    return [(name, begin, end) for (name, end), begin in zip(last.items(), begins, strict=False)]


def plot(found: Mapping[str, Curve], phases: Sequence[tuple[str, int, int]]) -> Figure:
    """A figure with a panel for each curve that is there."""
    evaluations = _evaluations(found)
    panels = [panel for panel in _PANELS if panel[1] in found or (panel[0] == "reward" and evaluations)]
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(11.2, 2.6 * rows + 0.3), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    if not panels:
        figure.text(0.5, 0.5, "no curves: the metrics hold none yet", ha="center", color=_INK)
    for (title, name, colour), cells in zip(panels, _cells(len(panels)), strict=True):
        axes = figure.add_subplot(rows, 2, cells)
        _dress(axes, title, phases)
        if name in found:
            _line(axes, found[name], colour, smooth=name not in (*_EXACT, *_APART))
        if title == "reward":
            _points(axes, evaluations, trained=name in found)
        if cells[1] > 2 * rows - 2:
            axes.set_xlabel("step", fontsize=8, color=_GREY)
    return figure


def _cells(count: int) -> list[tuple[int, int]]:
    """First and last cell of each panel in a grid of two columns, from 1; of an odd number the first is wide."""
    wide = [(1, 2)] if count % 2 else []
    return wide + [(cell, cell) for cell in range(2 * len(wide) + 1, count + len(wide) + 1)]


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """The mean over `reach` neighbours on either side, fewer near the ends, so that no value lags.

    Values that are NaN are passed over; where all are, so is the mean.
    """
    sums, counts = [0.0], [0]
    for value in values:
        known = not math.isnan(value)
        sums.append(sums[-1] + (value if known else 0.0))
        counts.append(counts[-1] + known)
    means = []
    for place in range(len(values)):
        half = max(reach // 2, min(reach, place, len(values) - 1 - place))
        first, last = max(0, place - half), min(len(values), place + half + 1)
        count = counts[last] - counts[first]
        means.append((sums[last] - sums[first]) / count if count else math.nan)
    return means


def _line(axes: Axes, curve: Curve, colour: str, smooth: bool) -> None:
    """Raw values, and over them their average within each phase, where there are enough to need one."""
    for _, group in itertools.groupby(
        zip(curve.phases, curve.steps, curve.values, strict=True), key=lambda point: point[0]
    ):
        _, steps, values = zip(*group, strict=True)
        if smooth and len(values) >= 20:
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smoothed(values, len(values) // 20), color=colour, linewidth=1.6)
        else:
            marker = "o" if len(values) == 1 else None
            axes.plot(steps, values, color=colour, linewidth=1.4, marker=marker, markersize=3)


def _points(axes: Axes, evaluations: Mapping[str, Curve], trained: bool) -> None:
    for (name, curve), colour in zip(evaluations.items(), itertools.cycle(_EVALUATIONS)):
        label = name.replace("eval/", "held-out ").replace("eval_ema/", "held-out, average ")
        axes.plot(
            curve.steps,
            curve.values,
            color=colour,
            marker="o",
            markersize=4,
            clip_on=False,
            linewidth=1,
            linestyle=":",
            label=label,
        )
    if trained:
        axes.plot([], [], color=_PANELS[0][2], linewidth=1.6, label="training samples")
    if evaluations:
        axes.legend(fontsize=7, frameon=False, loc="best")


def _evaluations(found: Mapping[str, Curve]) -> dict[str, Curve]:
    """Evaluation curves; the total is left out beside the only reward that it is the total of."""
    shown: dict[str, Curve] = {}
    for family in ("eval/", "eval_ema/"):
        own = {name: curve for name, curve in found.items() if name.startswith(family) and name not in _APART}
        if len(own) == 2:
            own.pop(f"{family}score", None)
        shown |= own
    return shown


def _dress(axes: Axes, title: str, phases: Sequence[tuple[str, int, int]]) -> None:
    axes.set_title(title, loc="left", fontweight="bold", fontsize=9, color=_INK, pad=14)
    axes.tick_params(labelsize=8, colors=_GREY, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="y", color="#cbd5e1", linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for (name, begin, end), shade in zip(phases, itertools.cycle(_SHADES)):
        axes.axvspan(begin, end, color=shade, zorder=0, linewidth=0)
        place = ((begin + end) / 2, 1.0)
        axes.annotate(
            name, place, xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=7.5, color=_GREY
        )
    if phases and phases[0][1] < phases[-1][2]:
        axes.set_xlim(phases[0][1], phases[-1][2])


def _read(path: Path) -> list[dict[str, Any]]:
    return list(_lines(path.read_bytes().split(b"\n")[:-1], path))


def _lines(whole: Sequence[bytes], path: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(whole, 1):
        try:
            line = msgspec.json.decode(text)
        except msgspec.DecodeError:
            line = None
        if not isinstance(line, dict) or type(line.get("step")) is not int or type(line.get("phase")) is not str:
            raise DataError(
                f"{path}:{number} is not a JSON object with a step and a phase, as a metrics file holds them"
            )
        yield line
