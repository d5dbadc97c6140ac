"""The picture of a run shows what its metrics hold, and nothing where they hold nothing."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from areno_fn.contracts.errors import DataError
from areno_fn.world.curves import curves, draw, plot, smoothed, spans
from areno_fn.world.trackers import JsonlTracker

Line = dict[str, object]


def line(step: int, phase: str = "sft", **values: float | None) -> Line:
    return {"step": step, "phase": phase, "time": 0.0, **{k.replace("__", "/"): v for k, v in values.items()}}


RUN = [
    line(0, eval__score=0.0, eval__exact_match=0.0),
    *(line(step, train__loss=3.0 / step, train__lr=1e-3, train__grad_norm=1.0) for step in range(1, 31)),
    line(30, eval__score=0.4, eval__exact_match=0.4),
    line(30, "grpo", eval__score=0.4, eval__exact_match=0.4),
    *(
        line(
            step,
            "grpo",
            train__loss=0.0,
            train__lr=1e-4,
            train__grad_norm=1.0,
            train__kl=0.001 * step,
            train__entropy=1.0,
            rollout__reward_mean=step / 60,
            rollout__response_len_mean=3.0,
        )
        for step in range(31, 61)
    ),
    line(60, "grpo", eval__score=0.9, eval__exact_match=0.9),
]


def drawn(lines: list[Line]) -> Figure:
    return plot(curves(lines), spans(lines))


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def write(path: Path, lines: list[Line]) -> Path:
    tracker = JsonlTracker(path)
    for one in lines:
        tracker.log(one["step"], one["phase"], {k: v for k, v in one.items() if "/" in k})  # type: ignore[arg-type, misc]
    tracker.close()
    return path


def test_there_is_a_panel_for_each_curve() -> None:
    assert titles(drawn(RUN)) == [
        "reward",
        "loss",
        "KL to the reference",
        "entropy, nats",
        "response length, tokens",
        "gradient norm",
        "learning rate",
    ]


def test_missing_metrics_leave_no_panel() -> None:
    assert titles(drawn(RUN[1:31])) == ["loss", "gradient norm", "learning rate"]
    assert titles(drawn([RUN[0]])) == ["reward"]
    assert titles(drawn([line(1, other__thing=1.0)])) == []
    assert titles(drawn([])) == []


def test_of_an_odd_number_of_panels_the_first_is_wide() -> None:
    for lines, wide in ((RUN, True), ([line(1, train__loss=1.0, train__kl=1.0)], False)):
        figure = drawn(lines)
        figure.draw_without_rendering()
        widths = [axes.get_position().width for axes in figure.axes]
        assert (widths[0] > 1.5 * widths[-1]) == wide


def test_phases_are_named_and_begin_where_the_last_one_ended() -> None:
    assert spans(RUN) == [("sft", 0, 30), ("grpo", 30, 60)]
    assert spans(RUN[5:20]) == [("sft", 5, 19)]
    figure = drawn(RUN)
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts] == ["sft", "grpo"]
        assert axes.get_xlim() == (0, 60)


def test_the_reward_panel_holds_training_and_held_out_values() -> None:
    reward = drawn(RUN).axes[0]
    labels = [text.get_text() for text in reward.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["held-out exact_match", "training samples"]
    held_out = next(one for one in reward.lines if one.get_label() == "held-out exact_match")
    assert list(held_out.get_xdata()) == [0, 30, 30, 60]  # type: ignore[arg-type]
    assert list(held_out.get_ydata()) == [0.0, 0.4, 0.4, 0.9]  # type: ignore[arg-type]


def test_the_total_is_drawn_where_several_rewards_make_it() -> None:
    reward = drawn([line(1, eval__score=1.0, eval__a=0.5, eval__b=0.5)]).axes[0]
    labels = [text.get_text() for text in reward.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["held-out score", "held-out a", "held-out b"]


def test_each_phase_has_its_raw_values_and_a_smoother_line_over_them() -> None:
    loss = next(axes for axes in drawn(RUN).axes if axes.get_title(loc="left") == "loss")
    raw, smooth, *_ = loss.lines
    assert len(loss.lines) == 4
    assert list(raw.get_ydata()) == [3.0 / step for step in range(1, 31)]  # type: ignore[arg-type]
    assert (raw.get_alpha() or 1) < (smooth.get_alpha() or 1)
    assert raw.get_linewidth() < smooth.get_linewidth()


def test_a_few_values_and_the_learning_rate_are_drawn_as_they_are() -> None:
    few = drawn([line(step, train__loss=1.0) for step in range(5)]).axes[0]
    assert len(few.lines) == 1
    rate = next(axes for axes in drawn(RUN).axes if axes.get_title(loc="left") == "learning rate")
    assert [len(one.get_xdata()) for one in rate.lines] == [30, 30]  # type: ignore[arg-type]


def test_a_single_value_is_a_point() -> None:
    (only,) = drawn([line(1, train__loss=1.0)]).axes[0].lines
    assert only.get_marker() == "o"


def test_null_is_a_gap() -> None:
    found = curves([line(1, train__loss=1.0), line(2, train__loss=None)])["train/loss"]
    assert found.steps == [1, 2]
    assert found.values[0] == 1.0
    assert math.isnan(found.values[1])


# ------------------------------------------------------------------------------------------ smoothing


def test_smoothing_by_hand() -> None:
    assert smoothed([0.0, 3.0, 6.0, 3.0, 0.0], 1) == [0.0, 3.0, 4.0, 3.0, 0.0]
    assert smoothed([0.0, 4.0, 2.0], 2) == [2.0, 2.0, 3.0]
    assert smoothed([1.0, math.nan, 3.0], 1) == [1.0, 2.0, 3.0]
    assert smoothed([], 3) == []


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=40), st.integers(0, 10), st.integers(-5, 5))
def test_smoothing_stays_inside_and_follows_a_line(values: list[int], reach: int, slope: int) -> None:
    floats = [float(value) for value in values]
    smooth = smoothed(floats, reach)
    assert len(smooth) == len(values)
    assert all(min(floats) - 1e-9 <= value <= max(floats) + 1e-9 for value in smooth)
    straight = [float(slope * place) for place in range(40)]
    assert smoothed(straight, reach)[reach : 40 - reach] == pytest.approx(straight[reach : 40 - reach])


@given(st.lists(st.floats(-1, 1), max_size=20))
def test_no_reach_is_no_smoothing(values: list[float]) -> None:
    assert smoothed(values, 0) == pytest.approx(values)


# ------------------------------------------------------------------------------------------ files


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


def test_draw_writes_a_picture_that_grows_with_its_panels(tmp_path: Path) -> None:
    draw(write(tmp_path / "m.jsonl", RUN), tmp_path / "curves.png")
    draw(write(tmp_path / "few.jsonl", RUN[1:3]), tmp_path / "few.png")
    (width, height), (few_width, few_height) = size(tmp_path / "curves.png"), size(tmp_path / "few.png")
    assert width == few_width
    assert height > few_height


def test_a_run_without_metrics_has_a_picture_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").touch()
    draw(tmp_path / "m.jsonl", tmp_path / "curves.png")
    assert size(tmp_path / "curves.png")[0] > 0
    assert "no curves" in drawn([]).texts[0].get_text()


def test_a_torn_last_line_is_left_out_and_another_file_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", RUN)
    path.write_bytes(path.read_bytes() + b'{"step": 61, "ph')
    draw(path, tmp_path / "curves.png")
    path.write_text('{"step": 1, "phase": "a"}\n[1]\n')
    with pytest.raises(DataError, match=r"m\.jsonl:2 is not a JSON object with a step and a phase"):
        draw(path, tmp_path / "curves.png")


def test_drawing_needs_no_display_and_changes_no_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", RUN)
    program = (
        "import sys; from areno_fn.world.curves import draw; draw(sys.argv[1], sys.argv[2]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    words = [sys.executable, "-W", "error", "-c", program, str(path), str(tmp_path / "c.png")]
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
