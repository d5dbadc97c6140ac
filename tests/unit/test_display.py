"""What a person sees: stable lines in a pipe, a redrawn picture on a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from areno_fn.world.display import Display, LiveDisplay, PlainDisplay, open_display
from areno_fn.world.display_text import duration, evaluation_figures, figures, sample_line
from areno_fn.world.samples import Sample

STEP = {
    "train/loss": 0.51234,
    "train/lr": 1e-3,
    "train/kl": 0.00123,
    "train/tokens": 500.0,
    "rollout/reward_mean": 0.75,
    "rollout/response_len_mean": 4.25,
    "time/step": 0.5,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plain(clock: Clock) -> tuple[PlainDisplay, Callable[[], list[str]]]:
    stream = io.StringIO()
    return PlainDisplay(stream, clock, pause=5.0), lambda: stream.getvalue().splitlines()


# ------------------------------------------------------------------------------------------ plain


def test_a_plain_step_is_one_line_that_grep_finds(clock: Clock) -> None:
    display, lines = plain(clock)
    display.phase("grpo", total=4)
    clock.now += 2
    display.step(1, STEP)
    assert lines() == ["grpo 1/4 loss=0.5123 reward=0.750 kl=0.00123 length=4.2 lr=1.00e-03 tokens_per_s=1000"]


def test_plain_steps_are_the_first_the_last_and_one_every_few_seconds(clock: Clock) -> None:
    display, lines = plain(clock)
    display.phase("sft", total=40)
    for step in range(1, 41):
        clock.now += 1
        display.step(step, {"train/loss": 1.0})
    shown = [int(re.match(r"sft (\d+)/40 ", line)[1]) for line in lines()]  # type: ignore[index]
    assert shown == [1, 6, 11, 16, 21, 26, 31, 36, 40]


def test_plain_remaining_time_counts_from_where_the_run_continued(clock: Clock) -> None:
    display, lines = plain(clock)
    display.phase("sft", total=100, done=90)
    clock.now += 60
    display.step(91, {})
    clock.now += 20
    display.step(92, {})
    assert lines() == ["sft 91/100", "sft 92/100 eta=2m40s"]


def test_plain_remaining_time_leaves_out_what_the_first_step_prepares(clock: Clock) -> None:
    display, lines = plain(clock)
    display.phase("sft", total=3)
    display.evaluation({"eval/score": 0.5})
    for seconds, step in ((500, 1), (7.0, 2), (7.0, 3)):
        clock.now += seconds
        display.step(step, {})
    display.phase("grpo", total=1)
    clock.now += 5
    display.step(1, {})
    assert lines()[1:] == ["sft 1/3", "sft 2/3 eta=7s", "sft 3/3 eta=0s", "grpo 1/1 eta=0s"]


def test_plain_evaluations_samples_and_messages(clock: Clock) -> None:
    display, lines = plain(clock)
    display.phase("sft", total=10)
    display.evaluation({"eval/score": 0.5, "eval/exact_match": 0.5})
    clock.now += 10
    display.step(1, {})
    display.evaluation({"eval/score": 0.75, "eval/exact_match": 0.5, "eval/short": 0.25})
    display.samples([Sample(prompt="1+1=", completion="2", reward=1.0, answer="2")])
    display.message("saved out/run")
    display.close()
    assert lines() == [
        "sft 0/10 eval exact_match=0.5000",
        "sft 1/10",
        "sft 1/10 eval score=0.7500 exact_match=0.5000 short=0.2500",
        "sft 1/10 sample reward=1.000 '1+1=' -> '2' (answer '2')",
        "saved out/run",
    ]


def test_plain_loading_prints_now_and_then_and_at_the_end(clock: Clock) -> None:
    display, lines = plain(clock)
    progress = display.loading("reading models/x")
    for done in range(1, 101):
        clock.now += 0.125
        progress(done, 100)
    assert lines() == ["reading models/x 40/100", "reading models/x 80/100", "reading models/x 100/100"]


def test_plain_lines_survive_a_narrow_encoding() -> None:
    raw = io.BytesIO()
    display = PlainDisplay(io.TextIOWrapper(raw, encoding="ascii"))
    display.message("é → 2")
    assert raw.getvalue() == b"\\xe9 \\u2192 2\n"


# ------------------------------------------------------------------------------------------ text


def test_figures_have_a_fixed_order_and_only_what_is_there() -> None:
    assert list(figures({"train/lr": 1e-5, "other": 3.0, "train/loss": 2.0})) == ["loss", "lr"]
    assert figures({"train/loss": float("nan")}) == {"loss": "nan"}
    assert figures({"train/loss": -3.14e-6, "train/kl": 2e-7}) == {"loss": "-3.1e-06", "kl": "2.0e-07"}
    assert figures({"train/loss": 0.0, "train/kl": 6e-6}) == {"loss": "0.0000", "kl": "0.00001"}
    assert figures({}) == {}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"train/tokens": 300.0, "time/step": 2.0}, "150"),
        ({"train/tokens": 300.0, "time/step": 2.0, "rollout/tokens_per_s": 42.0}, "42"),
        ({"train/tokens": 300.0, "time/step": 0.0}, None),
        ({"train/tokens": 300.0}, None),
    ],
)
def test_speed_is_that_of_the_rollout_or_of_training(metrics: dict[str, float], shown: str | None) -> None:
    assert figures(metrics).get("tokens_per_s") == shown


def test_a_total_of_one_reward_is_not_repeated() -> None:
    assert evaluation_figures({"eval/score": 0.5, "eval/a": 0.5}) == {"a": "0.5000"}
    assert evaluation_figures({"eval/score": 1.0, "eval/a": 0.5}) == {"score": "1.0000", "a": "0.5000"}
    assert evaluation_figures({"eval/score": 1.0, "time/eval": 3.0}) == {"score": "1.0000"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (360000, "100h00m"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_completion_stays_one_line_whatever_it_contains() -> None:
    line = sample_line(Sample(prompt="x" * 100 + "?", completion="a\n\x1b[31m" + "y" * 300, reward=0.5))
    assert line.isprintable()
    assert line.startswith("reward=0.500 '…xxx")
    assert "x?' -> 'a\\n\\x1b[31myyy" in line
    assert line.endswith("y…'")
    assert len(line) < 260


# ------------------------------------------------------------------------------------------ choosing


def test_a_pipe_gets_lines_and_a_terminal_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_display(io.StringIO()), PlainDisplay)
    live = open_display(Terminal())
    live.close()
    assert isinstance(live, LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(Terminal()), PlainDisplay)


# ------------------------------------------------------------------------------------------ live


def live(width: int = 100) -> tuple[LiveDisplay, Callable[[], str]]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=30, color_system=None, legacy_windows=False)
    return LiveDisplay(console, Clock()), stream.getvalue


def last_picture(text: str) -> list[str]:
    """The lines after the last time that the cursor went up, control sequences removed."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.rsplit("\x1b[1A", 1)[-1]).replace("\r", "").splitlines()
    return [line.rstrip() for line in lines if line.strip()]


def test_the_live_picture_holds_a_bar_for_each_phase_and_the_latest_figures() -> None:
    display, text = live()
    display.phase("sft", total=3)
    for step in (1, 2, 3):
        display.step(step, {"train/loss": 4.0})
    display.phase("grpo", total=4)
    display.step(1, STEP)
    display.close()
    sft, grpo, shown = last_picture(text())
    assert re.fullmatch(r"sft +━+ 3/3 .*", sft)
    assert re.fullmatch(r"grpo ━+.* 1/4 .*", grpo)
    assert shown.strip() == "loss=0.5123  reward=0.750  kl=0.00123  length=4.2  lr=1.00e-03  tokens_per_s=1000"


def test_live_figures_break_between_values_on_a_narrow_terminal() -> None:
    display, text = live(width=40)
    display.phase("grpo", total=4)
    display.step(1, STEP)
    display.close()
    shown = " ".join(last_picture(text())[1:]).split()
    assert shown == ["loss=0.5123", "reward=0.750", "kl=0.00123", "length=4.2", "lr=1.00e-03", "tokens_per_s=1000"]


def test_live_results_samples_and_messages_scroll_above() -> None:
    display, text = live()
    display.phase("sft", total=2, done=1)
    display.evaluation({"eval/score": 0.5, "eval/exact_match": 0.5})
    display.samples([Sample(prompt="[bold]1+1=", completion="2\x1b[31m", reward=1.0)])
    display.message("saved [red]out")
    display.close()
    assert "sft 1/2 eval exact_match=0.5000" in text()
    assert "reward=1.000 '[bold]1+1=' -> '2\\x1b[31m'" in text()
    assert "saved [red]out" in text()
    assert "2\x1b[31m" not in text()


def test_a_live_loading_bar_goes_when_it_is_full() -> None:
    display, text = live()
    progress = display.loading("reading models/x")
    progress(1, 2)
    display.phase("sft", total=1)
    progress(2, 2)
    display.close()
    assert "reading models/x 2/2" in text()
    assert not any(line.startswith("reading") for line in last_picture(text()))


def test_closing_gives_the_cursor_back() -> None:
    display, text = live()
    display.close()
    assert text().rindex("\x1b[?25h") > text().rindex("\x1b[?25l")


def test_both_displays_answer_the_same_calls(clock: Clock) -> None:
    displays: list[Display] = [plain(clock)[0], live()[0]]
    for display in displays:
        display.loading("x")(1, 1)
        display.phase("sft", 1)
        display.step(1, STEP)
        display.evaluation({"eval/score": 1.0})
        display.samples([])
        display.message("done")
        display.close()
