"""A run and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from areno_fn.engine.session import _asked_to_stop


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with _asked_to_stop() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_in_another_thread_is_not_asked() -> None:
    """Python lets the main thread alone listen to signals."""
    answers: list[bool] = []

    def run() -> None:
        with _asked_to_stop() as stop:
            answers.append(stop())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert answers == [False]
