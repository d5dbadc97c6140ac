"""Addresses of judges that nothing could be sent to are refused by a plan, in one sentence with their field."""

from __future__ import annotations

import pytest

from areno_fn.contracts.errors import SpecError
from areno_fn.contracts.spec import (
    GRPO,
    ArithmeticData,
    ByteTokenizer,
    Evaluation,
    FunctionReward,
    HttpReward,
    Phase,
    RunSpec,
    ScratchModel,
)
from areno_fn.engine.addresses import wrong_address
from areno_fn.engine.composition import check_composition
from areno_fn.engine.specfile import check


def asking(url: str) -> RunSpec:
    data, judge = [ArithmeticData()], [FunctionReward(function="a:b"), HttpReward(url=url)]
    return RunSpec(
        model=ScratchModel(family="qwen3", config={}),
        tokenizer=ByteTokenizer(),
        phases=[Phase(name="grpo", steps=1, algorithm=GRPO(), data=data, rewards=judge)],
        evaluation=Evaluation(data=data, rewards=judge),
    )


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://[::1", "'http://[::1' is no address (invalid IPv6 URL); write it as http://host:port/path"),
        (
            "http://h:eight",
            "'http://h:eight' is no address (port could not be cast to integer value as 'eight'); "
            "write it as http://host:port/path",
        ),
        (
            "http://h:70000/",
            "'http://h:70000/' is no address (port out of range 0-65535); write it as http://host:port/path",
        ),
        ("http://h:0/", "'http://h:0/' names the port 0, at which nothing listens; write it as http://host:port/path"),
        ("https:///judge", "'https:///judge' names no host; write it as http://host:port/path"),
        (
            "http://a..b/",
            "'http://a..b/' is no address (a part of the host's name is empty or longer than 63 letters); "
            "write it as http://host:port/path",
        ),
        ("http://h/my judge", "'http://h/my judge' holds ' ', which an address spells as %20; write that"),
        ("http://h/a\nb", r"'http://h/a\nb' holds '\n', which an address spells as %0A; write that"),
        ("http://hé/", "'http://hé/' holds 'é', which an address spells as xn-- in the name of a host; write that"),
        (
            "http://me:secret@h/",
            "'http://me:secret@h/' names a user, which is not sent; write it as http://host:port/path, and let a judge of your "
            "own pass on who asks",
        ),
        ("http://h/judge#best", "'http://h/judge#best' ends in '#best', which is not sent; remove it"),
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_asked_is_refused_where_it_stands(url: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_composition(asking(url))
    assert str(caught.value) == f"phases.grpo.rewards.1.url: {told}\nevaluation.rewards.1.url: {told}"


@pytest.mark.parametrize("url", ["http://h", "https://h.de:443/judge?kind=a", "http://[::1]:80/x", "http://127.0.0.1/"])
def test_an_address_that_can_be_asked_is_none_of_these(url: str) -> None:
    assert wrong_address(url) == ""
    check_composition(asking(url))


def test_another_sort_of_address_is_refused_in_words() -> None:
    with pytest.raises(SpecError, match=r"url must be an address that begins with http:// or https://, received"):
        check(asking("ftp://h/"))
