"""Requests at random against a server, each compared with the same sequence drawn alone by `sampler`.

    python tests/serving.py [--requests 10000] [--together 200] [--alone 300] [--seed 0] [--seconds 60]
                            [--device cuda --tolerance 1e-4]

Every batch of requests meets its own server: page size, number of lanes and pages, tokens read a step, distribution, arrivals,
lengths, samples a prompt, cancellations and changes of nothing but the company are drawn. All results are compared with
`sampler` on whole batches, and `--alone` of them with `sampler` on a single prompt.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import attrs
import torch

from areno_fn import tree
from areno_fn.contracts.batch import Prompts
from areno_fn.contracts.key import Key
from areno_fn.contracts.spec import Sampling
from areno_fn.engine.serve import Completion, Server
from areno_fn.models import FAMILIES
from areno_fn.steps.token.batching import READ_TOKENS
from areno_fn.steps.token.rollout import sampler
from benchmarks import needs

VOCAB = 61
STOP = (0, 3, 7, 11)


def tiny(family: str = "qwen3", seed: int = 3) -> tuple[Any, Any]:
    """A small decoder with grouped queries, and its parameters."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    made = FAMILIES[family]
    ties = {"tie_word_embeddings": family == "qwen3", "rope_theta": 10000.0}
    config = made.config_from_hf({"model_type": family, **sizes, **heads, **ties, "initializer_range": 0.3})
    return made.policy(config), made.init(config, Key.of(seed))


@attrs.frozen(kw_only=True)
class Request:
    """One prompt, asked for under several names.

    Attributes:
        prompt: token ids.
        names: of its completions.
        limit: most tokens to draw.
        arrives: the step before which it is submitted.
        cancelled: steps after which a name is cancelled.
    """

    prompt: tuple[int, ...]
    names: tuple[int, ...]
    limit: int
    arrives: int
    cancelled: dict[int, int]


@attrs.frozen(kw_only=True)
class Shape:
    """Lanes and cache of a server; `spare` are pages beyond those that the longest request needs."""

    rows: int
    page_size: int
    spare: int
    read_tokens: int = READ_TOKENS


def served(
    policy: Any, params: Any, key: Key, sampling: Sampling, shape: Shape, requests: list[Request]
) -> dict[int, Completion]:
    """The completions of all requests that were not cancelled in time, by name; the cache is whole again at the end."""
    longest = max(len(r.prompt) + r.limit for r in requests)
    pages = 1 + -(-longest // shape.page_size) + shape.spare
    fields = {"rows": shape.rows, "page_size": shape.page_size, "read_tokens": shape.read_tokens}
    server = Server(policy, STOP, sampling, params, key, pages=pages, longest=longest, **fields)
    done: dict[int, Completion] = {}
    cancel = {r.arrives + after: [] for r in requests for after in r.cancelled.values()}
    for r in requests:
        for name, after in r.cancelled.items():
            cancel[r.arrives + after].append(name)
    step, last = 0, max(r.arrives for r in requests)
    while step <= last or server.open:
        for r in requests:
            if r.arrives == step:
                server.submit(r.prompt, r.names, r.limit)
        for name in cancel.get(step, ()):
            if name in server.open:
                server.cancel(name)
        for completion in server.step():
            assert completion.name not in done
            done[completion.name] = completion
        step += 1
    assert server.free_pages == pages - 1, "pages were lost"
    return done


def expected(
    policy: Any, params: Any, key: Key, sampling: Sampling, wanted: list[tuple[tuple[int, ...], int, int]]
) -> list[Completion]:
    """The completions of (prompt, name, limit) of one limit by `sampler`."""
    width = max(len(prompt) for prompt, _, _ in wanted)
    prompts = Prompts(
        tokens=torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt, _, _ in wanted]),
        lengths=torch.tensor([len(prompt) for prompt, _, _ in wanted]),
        ids=torch.tensor([name for _, name, _ in wanted]),
    )
    prompts = tree.map(lambda x: x.to(tree.leaves(params)[0].device), prompts)
    drawn = sampler(policy, STOP)(params, prompts, key, attrs_limit(sampling, wanted[0][2]))
    rows = zip(
        drawn.ids.tolist(),
        drawn.tokens.tolist(),
        drawn.logp.tolist(),
        drawn.lengths.tolist(),
        drawn.finished.tolist(),
        strict=True,
    )
    return [Completion(name=i, tokens=tuple(t[:n]), logp=tuple(p[:n]), finished=f) for i, t, p, n, f in rows]


def attrs_limit(sampling: Sampling, limit: int) -> Sampling:
    """The same distribution with another limit."""
    return Sampling(
        max_tokens=limit,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )


def same(got: Completion, want: Completion, tolerance: float = 1e-6) -> bool:
    """Equal tokens, and log-probabilities within the tolerance."""
    alike = (got.name, got.tokens, got.finished) == (want.name, want.tokens, want.finished)
    return alike and all(abs(a - b) <= tolerance for a, b in zip(got.logp, want.logp, strict=True))


def drawn_requests(source: random.Random, count: int, first: int) -> list[Request]:
    """About `count` completions asked for, named from `first` on."""
    requests: list[Request] = []
    made = 0
    while made < count:
        names = tuple(range(first + made, first + made + source.choice((1, 1, 2, 3, 5))))
        made += len(names)
        requests.append(
            Request(
                prompt=tuple(source.randrange(VOCAB) for _ in range(source.choice((1, 2, 3, 5, 8, 13, 20)))),
                names=names,
                limit=source.choice((1, 2, 5, 9, 16)),
                arrives=source.randrange(1 + count // 4),
                cancelled={n: source.randrange(12) for n in names if source.random() < 0.15},
            )
        )
    return requests


def main() -> None:
    """Serves, compares, and prints what was seen; any difference is an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--together", type=int, default=200, help="requests that one server gets")
    parser.add_argument("--alone", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further server is asked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cpu", help="on a GPU, `sampler` itself decodes on pages, in another company"
    )
    parser.add_argument("--tolerance", type=float, default=1e-6, help="of a log-probability")
    options = parser.parse_args()
    if options.device != "cpu":
        needs.gpu(f"--device {options.device}", "--device cpu runs here")
    source, start = random.Random(options.seed), time.perf_counter()
    policy, params = tiny()
    params = tree.map(lambda x: x.to(options.device), params)
    asked = compared = cancelled = alone = 0
    while asked < options.requests and time.perf_counter() - start < options.seconds:
        sampling = Sampling(
            max_tokens=16,
            temperature=source.choice((0.7, 1.0, 1.5)),
            top_k=source.choice((0, 0, 20)),
            top_p=source.choice((1.0, 0.9)),
            min_p=source.choice((0.0, 0.02)),
        )
        shape = Shape(
            rows=source.choice((3, 8, 20, 40)),
            page_size=source.choice((1, 2, 3, 4, 8, 16)),
            spare=source.choice((0, 1, 4, 20, 60)),
            read_tokens=source.choice((1, 3, 7, 16, 40, READ_TOKENS)),
        )
        key = Key.of(source.randrange(1 << 30))
        requests = drawn_requests(
            source, min(options.together, options.requests - asked), source.randrange(-(1 << 40), 1 << 40)
        )
        done = served(policy, params, key, sampling, shape, requests)
        by_limit: dict[int, list[tuple[tuple[int, ...], int, int]]] = {}
        for r in requests:
            asked += len(r.names)
            cancelled += sum(name not in done for name in r.names)
            assert all(name in done or name in r.cancelled for name in r.names), "a request has no end"
            for name in r.names:
                if name in done:
                    by_limit.setdefault(r.limit, []).append((r.prompt, name, r.limit))
        for wanted in by_limit.values():
            for want in expected(policy, params, key, sampling, wanted):
                assert same(done[want.name], want, options.tolerance), (shape, sampling, done[want.name], want)
                compared += 1
            for one in wanted:
                if alone < options.alone and source.random() < options.alone / options.requests * 1.2:
                    (want,) = expected(policy, params, key, sampling, [one])
                    assert same(done[want.name], want, options.tolerance), (shape, sampling, done[want.name], want)
                    alone += 1
    seconds = time.perf_counter() - start
    print(
        f"{asked} requests, {cancelled} cancelled, {compared} equal, {alone} of them against the run alone; {seconds:.0f} s"
    )


if __name__ == "__main__":
    needs.run(main)
