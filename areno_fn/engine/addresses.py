"""Addresses of judges: decided before anything is asked there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote, urlsplit

from areno_fn.contracts.spec import HttpReward, RewardSpec, RunSpec

_FORM = "write it as http://host:port/path"


def address_problems(spec: RunSpec) -> Iterator[str]:
    """A sentence for every address that nothing could be sent to."""
    for phase in spec.phases:
        yield from _judges(phase.rewards, f"phases.{phase.name}")
    if spec.evaluation is not None:
        yield from _judges(spec.evaluation.rewards, "evaluation")


def _judges(rewards: Sequence[RewardSpec], where: str) -> Iterator[str]:
    for place, reward in enumerate(rewards):
        wrong = wrong_address(reward.url) if isinstance(reward, HttpReward) else ""
        if wrong:
            yield f"{where}.rewards.{place}.url: {wrong}"


def wrong_address(url: str) -> str:
    """What is wrong with an address and what would be right; nothing where it can be asked.

    Args:
        url: begins with http:// or https://.
    """
    strange = next((sign for sign in url if not "!" <= sign <= "~"), "")
    if strange:
        named = url.partition("://")[2].partition("/")[0]
        right = "xn-- in the name of a host" if strange in named else quote(strange, errors="replace")
        return f"{url!r} holds {strange!r}, which an address spells as {right}; write that"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        if host and not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
            raise ValueError("a part of the host's name is empty or longer than 63 letters")
    except ValueError as error:
        reason = str(error)
        return f"{url!r} is no address ({reason[:1].lower()}{reason[1:]}); {_FORM}"
    if not host:
        return f"{url!r} names no host; {_FORM}"
    if port == 0:
        return f"{url!r} names the port 0, at which nothing listens; {_FORM}"
    if parts.username is not None:
        return f"{url!r} names a user, which is not sent; {_FORM}, and let a judge of your own pass on who asks"
    if parts.fragment:
        return f"{url!r} ends in '#{parts.fragment}', which is not sent; remove it"
    return ""
