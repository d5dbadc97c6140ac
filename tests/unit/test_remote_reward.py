"""Judges behind an address: what is sent, when it is asked again, and what is said when nothing helps."""

from __future__ import annotations

import base64
import http.server
import io
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from areno_fn.contracts.errors import RewardError
from areno_fn.contracts.spec import HttpReward
from areno_fn.engine.rewards import Loaded, load_all
from areno_fn.world.remote_reward import Remote, RemotePictures, RemoteTexts
from areno_fn.world.rewards import Reward, score

PICTURES = [np.full((1, 4, 4), level / 255, np.float32) for level in (0, 51, 102, 153, 204)]
ROWS = [{"label": place, "picture": ((0.5, 1.0),)} for place in range(5)]


class Server:
    """Answers as it is told to: by a status, by a text, or not at all."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self.gone = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                answer = outer.answers.pop(0) if outer.answers else outer.judge(body)
                if answer == "silence":
                    outer.gone.wait(5)
                    return
                if answer == "hang up":
                    self.connection.close()
                    return
                status, content = (answer, b"") if isinstance(answer, int) else (200, json.dumps(answer).encode())
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/judge"

    def judge(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first pixel of every picture, or the length of every completion, and a thousand times the label."""
        base = [1000.0 * row["label"] for row in body["rows"]]
        if "completions" in body:
            return {"rewards": [a + len(text) for a, text in zip(base, body["completions"], strict=True)]}
        found = [Image.open(io.BytesIO(base64.b64decode(text))) for text in body["pictures"]]
        return {"rewards": [a + float(picture.getpixel((0, 0))) for a, picture in zip(base, found, strict=True)]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.gone.set()
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def remote(server: Server, waits: list[float] | None = None, **settings: Any) -> Remote:
    wait: Callable[[float], None] = (waits if waits is not None else []).append
    return Remote(url=server.url, name="far", wait=wait, **settings)


def test_pictures_are_sent_in_batches_with_their_rows(server: Server) -> None:
    assert RemotePictures(remote(server, batch=2))(ROWS, PICTURES) == [0.0, 1051.0, 2102.0, 3153.0, 4204.0]
    assert [[row["label"] for row in body["rows"]] for body in server.asked] == [[0, 1], [2, 3], [4]]
    assert server.asked[0]["rows"][0]["picture"] == [[0.5, 1.0]]


def test_texts_are_sent_too(server: Server) -> None:
    assert RemoteTexts(remote(server))(ROWS[:2], ["abc", "é"]) == [3.0, 1001.0]


def test_a_specification_names_one(server: Server) -> None:
    rewards = load_all([HttpReward(url=server.url, weight=0.5, batch=3)], Loaded(device=torch.device("cpu")))
    totals, parts = score(rewards, ROWS, PICTURES)
    (name,) = parts
    assert name.startswith("127.0.0.1_") and name.endswith("_judge")
    assert totals == [0.0, 525.5, 1051.0, 1576.5, 2102.0]


@pytest.mark.parametrize("trouble", [503, 429, "hang up"])
def test_what_is_busy_or_gone_is_asked_again_after_longer_waits(server: Server, trouble: Any) -> None:
    server.answers, waits = [trouble, trouble], []
    assert RemotePictures(remote(server, waits))(ROWS[:1], PICTURES[:1]) == [0.0]
    assert waits == [0.5, 1.0] and len(server.asked) == 3


def test_what_is_silent_is_asked_again(server: Server) -> None:
    server.answers = ["silence"]
    assert RemotePictures(remote(server, timeout=0.2))(ROWS[:1], PICTURES[:1]) == [0.0]


def sentence(reward: Reward) -> str:
    with pytest.raises(RewardError) as caught:
        score((reward,), ROWS, PICTURES)
    return str(caught.value)


def test_when_all_attempts_have_failed_one_sentence_says_so_without_asking_row_by_row(server: Server) -> None:
    server.answers = [500, 502, 503] * 9
    asks = Reward(name="far", weight=1.0, function=RemotePictures(remote(server, retries=2)))
    assert sentence(asks) == (
        f"the reward 'far' at {server.url} gave no answer in 3 attempts, at last because status 503 (Service Unavailable); "
        f"see whether it runs, or raise `timeout` or `retries`"
    )
    assert len(server.asked) == 3
    server.answers = ["silence"] * 9
    asks = Reward(name="far", weight=1.0, function=RemotePictures(remote(server, retries=0, timeout=0.2)))
    assert "gave no answer in 1 attempts, at last because nothing came within 0.2 s" in sentence(asks)


def test_nothing_listens_there() -> None:
    asks = Remote(url="http://127.0.0.1:9/", name="far", retries=1, wait=lambda seconds: None)
    told = sentence(Reward(name="far", weight=1.0, function=RemotePictures(asks)))
    assert told.startswith("the reward 'far' at http://127.0.0.1:9/ gave no answer in 2 attempts, at last because ")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (404, "status 404 (Not Found)"),
        ({"rewards": [1.0]}, "it has 1 rewards for 5 samples"),
        ({"scores": [1.0]}, """it must be {"rewards": [5 numbers]}, received b'{"scores": [1.0]}'"""),
        ({"rewards": ["a"] * 5}, """it must be {"rewards": [5 numbers]}, received b'{"rewards": ["a", "a", "a", "a", "a"]}'"""),
    ],
)  # fmt: skip
def test_an_answer_of_no_use_is_not_asked_for_again(server: Server, answer: Any, told: str) -> None:
    server.answers = [answer] * 9
    asks = Reward(name="far", weight=1.0, function=RemotePictures(remote(server)))
    assert sentence(asks) == f"the reward 'far' at {server.url} answered what is of no use: {told}"
    assert len(server.asked) == 1


def test_waits_grow_up_to_a_limit(server: Server) -> None:
    server.answers, waits = [503] * 9, []
    with pytest.raises(RewardError):
        RemotePictures(remote(server, waits, retries=8))(ROWS[:1], PICTURES[:1])
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
