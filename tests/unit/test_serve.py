"""The server: admission, cancellation, new weights in between, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from serving import STOP, expected, same, tiny
from typeguard import suppress_type_checks

from areno_fn import tree
from areno_fn.contracts.errors import DataError, ModelError, RecordError, SpecError
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.engine.serve import Server
from areno_fn.models.decoder_forward import forward

POLICY, PARAMS = tiny("llama")
SAMPLING, KEY = Sampling(max_tokens=8), Key.of(5)


def server(**fields: Any) -> Server:
    shape = {"rows": 4, "pages": 40, "page_size": 4, "longest": 24} | fields
    return Server(
        POLICY, fields.pop("stop", STOP), SAMPLING, PARAMS, KEY, **{k: v for k, v in shape.items() if k != "stop"}
    )


def test_a_request_that_comes_later_gets_what_it_gets_alone() -> None:
    serving = server()
    serving.submit([1, 2, 3], (7, 8))
    done = serving.step() + serving.step()
    serving.submit([9, 4], (-3,), max_tokens=5)
    assert set(serving.open) | {c.name for c in done} == {7, 8, -3}
    done += serving.drain()
    asked = [((1, 2, 3), 7, 8), ((1, 2, 3), 8, 8), ((9, 4), -3, 5)]
    assert sorted(c.name for c in done) == [-3, 7, 8] and not serving.open and serving.free_pages == 39
    for one in asked:
        (want,) = expected(POLICY, PARAMS, KEY, SAMPLING, [one])
        (got,) = (c for c in done if c.name == one[1])
        assert same(got, want)


def test_a_name_is_free_again_after_its_request_was_cancelled() -> None:
    serving = server(stop=())
    serving.submit([1, 2, 3], (7, 8))
    serving.step()
    serving.cancel(7)
    assert serving.open == (8,)
    serving.submit([1, 2, 3], (7,))
    assert sorted(c.name for c in serving.drain()) == [7, 8]
    with pytest.raises(DataError, match="no open request 7 to cancel"):
        serving.cancel(7)


def test_R3_tokens_drawn_after_new_weights_are_those_of_the_new_weights() -> None:
    moved = tree.map(lambda x: x * 1.3, PARAMS)
    serving = server(stop=())
    serving.submit([1, 2, 3], (7, 8))
    for _ in range(3):
        assert serving.step() == []
    serving.load(moved, KEY)
    for completion in serving.drain():
        tokens = torch.tensor([1, 2, 3, *completion.tokens])
        n = tokens.shape[0]
        by = {}
        for name, params in (("old", PARAMS), ("new", moved)):
            logits = forward(params, POLICY.config, tokens, torch.arange(n), torch.zeros(n, dtype=torch.int64))
            by[name] = logits.log_softmax(-1)[2:-1].gather(1, tokens[3:, None]).squeeze(1)
        wanted = torch.cat([by["old"][:4], by["new"][4:]])
        torch.testing.assert_close(torch.tensor(completion.logp), wanted, rtol=0, atol=1e-5)
        assert not torch.allclose(by["old"][4:], by["new"][4:], atol=1e-3)


def test_R3_a_prompt_kept_for_samples_to_come_is_read_again_with_new_weights() -> None:
    moved = tree.map(lambda x: x * 1.3, PARAMS)
    serving = server(rows=1)
    serving.submit([1, 2, 3], (7, 8, 9), max_tokens=1)
    (first,) = serving.step()
    serving.load(moved, KEY)
    rest = serving.drain()
    for completion, params in ((first, PARAMS), *((c, moved) for c in rest)):
        (want,) = expected(POLICY, params, KEY, SAMPLING, [((1, 2, 3), completion.name, 1)])
        assert same(completion, want)
    assert len(rest) == 2 and serving.free_pages == 39


def test_what_cannot_be_served_is_refused() -> None:
    serving = server()
    with pytest.raises(DataError, match=r"each in \[0, 61\), received \[\]"):
        serving.submit([], (1,))
    with pytest.raises(DataError, match=r"each in \[0, 61\), received \[3, 61\]"):
        serving.submit([3, 61], (1,))
    with pytest.raises(DataError, match="the name 1 is in use"):
        serving.submit([3], (1, 1))
    serving.submit([3], (1,))
    with pytest.raises(DataError, match="the name 1 is in use"):
        serving.submit([3], (2, 1))
    assert serving.open == (1,)
    with pytest.raises(SpecError, match="at most 24 with its prompt, received one that draws 8 after 17"):
        serving.submit([3] * 17, (2,))
    assert serving.open == (1,)
    with pytest.raises(ModelError, match="stop token 61"):
        server(stop=(61,))
    with pytest.raises(SpecError, match="at least one lane and 7 pages"):
        server(pages=6)


@pytest.mark.parametrize("name", [1 << 63, -(1 << 63) - 1, True])
def test_a_name_that_no_draw_can_be_keyed_by_is_refused_before_it_is_in_the_queue(name: Any) -> None:
    serving = server()
    with pytest.raises(DataError, match="the name of a request must be a whole number of 64 bits"):
        serving.submit([1, 2], (7, name))
    serving.submit([1, 2], {7})
    assert [c.name for c in serving.drain()] == [7]


@pytest.mark.parametrize("tokens", [[True], [-1], [61]])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(DataError, match="a prompt must have at least one token"):
        server().submit(tokens, (1,))


@pytest.mark.parametrize("most", [0, -1, 9])
def test_what_is_no_number_of_tokens_is_refused(most: int) -> None:
    serving = server()
    with pytest.raises(SpecError, match="draws 1 to 8 tokens"):
        serving.submit([1], (1,), max_tokens=most)
    assert serving.open == ()


@pytest.mark.parametrize("field", [{"rows": 0}, {"longest": 0}, {"longest": -5}, {"read_tokens": 0}])
def test_a_server_of_no_size_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="a server needs .* of at least 1, received"):
        server(**field)


def asked(**fields: Any) -> Any:
    given = {"policy": POLICY, "stop": STOP, "sampling": SAMPLING, "params": PARAMS, "key": KEY}
    return Server(**given | {"rows": 4, "pages": 40, "page_size": 4, "longest": 24} | fields)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: asked(page_size=True), RecordError, "Server: page_size must be a whole number, received True"),
        (lambda: asked(read_tokens=1.5), RecordError, "Server: read_tokens must be a whole number, received 1.5"),
        (lambda: asked(key=5), RecordError, "Server: key must be a Key, received 5"),
        (lambda: asked(sampling=None), RecordError, "Server: sampling must be a Sampling, received None"),
        (lambda: asked(policy=None), SpecError, "the policy NoneType has no 'vocab_size'; a PagedPolicy has vocab_size"),
        (lambda: asked(params={}), ModelError, "a server needs the weights of a model, received a dict without a tensor"),
        (lambda: asked(stop=5), RecordError, "Server: stop must be a collection, of which each is a whole number, received 5"),
        (lambda: asked(stop="ab"), RecordError, "Server: stop must be a collection"),
        (lambda: asked(stop=(True,)), ModelError, "a stop token is a whole number, received True; give the ids of tokens"),
        (lambda: asked(stop=("a",)), ModelError, "a stop token is a whole number, received 'a'"),
        (lambda: server().submit("abc", (1,)), RecordError, "Server.submit: prompt must be a collection"),
        (lambda: server().submit([1], 7), RecordError, "Server.submit: names must be a collection"),
        (lambda: server().submit([1], ()), DataError, "a prompt is continued once for each name, and was given none"),
        (lambda: server().submit([1], (1,), max_tokens=True), RecordError, "max_tokens must be a whole number or None"),
        (lambda: server().cancel([1]), RecordError, r"Server.cancel: name must be a whole number, received the list \[1\]"),
        (lambda: server().load(PARAMS, None), RecordError, "Server.load: key must be a Key, received None"),
        (lambda: server().load(None, KEY), ModelError, "weights to go on with must be like those before, but "),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_named(call: Any, kind: type[Exception], words: str) -> None:
    with suppress_type_checks(), pytest.raises(kind, match=words):
        call()


def test_a_prompt_may_be_an_array() -> None:
    serving = server()
    for name, prompt in enumerate(([1, 2, 3], torch.tensor([1, 2, 3]), np.array([1, 2, 3]), range(1, 4))):
        serving.submit(prompt, torch.tensor([name]))
        (got,) = serving.drain()
        (want,) = expected(POLICY, PARAMS, KEY, SAMPLING, [((1, 2, 3), name, 8)])
        assert same(got, want)


def test_a_step_that_was_interrupted_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = server(stop=())
    serving.submit([1, 2, 3], (7, 8))
    serving.step()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(serving._batch, "_launch", interrupted)
        serving.step()
    words = "a step of this server did not come to its end, .*; make another, and submit what is open again"
    calls: list[Any] = [
        serving.step,
        serving.drain,
        lambda: serving.submit([1], (1,)),
        lambda: serving.cancel(7),
        lambda: serving.load(PARAMS, KEY),
    ]
    for call in calls:
        with pytest.raises(SpecError, match=words):
            call()
    assert serving.open == (7, 8)


def test_weights_that_do_not_fit_are_refused_and_those_before_go_on() -> None:
    serving = server()
    serving.submit([1, 2, 3], (7,))
    serving.step()
    others: list[Any] = [{}, tree.map(lambda x: x.double(), PARAMS), tree.map(lambda x: x[:1], PARAMS)]
    for given in others:
        with pytest.raises(ModelError, match="weights to go on with must be like those before, but "):
            serving.load(given, KEY)
    (got,) = serving.drain()
    (want,) = expected(POLICY, PARAMS, KEY, SAMPLING, [((1, 2, 3), 7, 8)])
    assert same(got, want) and serving.free_pages == 39
