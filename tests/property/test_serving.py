"""Requests at random: whatever the company, the cache and the cancellations, each gets what it gets alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from serving import VOCAB, Request, Shape, expected, same, served, tiny

from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling

POLICY, PARAMS = tiny("qwen3")

shapes = st.builds(
    Shape, rows=st.integers(1, 7), page_size=st.sampled_from([1, 2, 3, 8]), spare=st.sampled_from([0, 1, 3, 40])
)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.7, 1.5]),
    top_k=st.sampled_from([0, 9]),
    top_p=st.sampled_from([0.9, 1.0]),
)


@st.composite
def request_lists(draw: Any) -> list[Request]:
    requests, name = [], draw(st.integers(-(2**40), 2**40))
    for _ in range(draw(st.integers(1, 5))):
        names = tuple(range(name, name + draw(st.integers(1, 3))))
        name += len(names)
        requests.append(
            Request(
                prompt=tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7))),
                names=names,
                limit=draw(st.integers(1, 9)),
                arrives=draw(st.integers(0, 6)),
                cancelled=draw(st.dictionaries(st.sampled_from(names), st.integers(0, 8), max_size=1)),
            )
        )
    return requests


@settings(max_examples=25)
@given(shapes, samplings, st.integers(0, 2**40), request_lists())
def test_every_request_gets_what_it_gets_alone(
    shape: Shape, sampling: Sampling, seed: int, requests: list[Request]
) -> None:
    done = served(POLICY, PARAMS, Key.of(seed), sampling, shape, requests)
    for request in requests:
        for name in request.names:
            assert name in done or name in request.cancelled
            if name in done:
                (want,) = expected(POLICY, PARAMS, Key.of(seed), sampling, [(request.prompt, name, request.limit)])
                assert same(done[name], want)
