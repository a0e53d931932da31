"""The parts of our policy that can be left out one by one, to see what each is worth."""

from typing import ClassVar

from neaptide.engine.scheduler.base import Scheduler

PARTS: dict[str, str] = {
    "prefix-order": "rows that share a prefix follow one another",
    "reuse-eviction": "cached blocks that are wanted stay longest",
    "same-step-sharing": "a step's prompts are found by later requests of the same step",
    "shares": "API keys and jobs take turns",
    "urgency": "jobs that would be late with their share alone go before turns",
    "give-up": "a step without online work is longer, and given up when some comes, where the executor can",
    "arrivals": "a step leaves time for a request that arrives during it",
    "slack-reserve": "streams keep slack for the prompts to come",
    "longest-late": "where prompts cannot all be in time the longest is late, not the last",
    "headroom": "offline work is admitted below the forecast of online demand",
    "sit-out": "resident offline decodes may miss a step that is tight",
    "giants": "a request that finds no room is passed by",
}
"""By name, what each does."""

_FLAGS = {
    "prefix-order": "follows_prefixes",
    "reuse-eviction": "evicts_by_reuse",
    "same-step-sharing": "publishes_when_planned",
    "shares": "has_shares",
    "urgency": "puts_urgent_jobs_first",
    "give-up": "abortable_steps",
}
"""Parts that are properties of every policy."""


class Divisible:
    """A policy with parts."""

    left_out: ClassVar[frozenset[str]] = frozenset()


def without(policy: type[Scheduler], parts: tuple[str, ...]) -> type[Scheduler]:
    """The policy without some of its parts.

    Raises:
        ValueError: it has no such part.
    """
    if not parts:
        return policy
    if not issubclass(policy, Divisible):
        raise ValueError(f"of the policy {policy.__name__} no parts can be left out, only of neaptide")
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"there is no part {unknown[0]!r} to leave out; there are: {', '.join(PARTS)}")
    flags = {_FLAGS[part]: False for part in parts if part in _FLAGS}
    name = f"{policy.__name__}Without{len(parts)}"
    reduced: type[Scheduler] = type(name, (policy,), {"left_out": frozenset(parts), **flags})
    return reduced
