"""Chooses the replica for an online request, from what the replicas report.

Slack comes first, then the cached prefix. A replica that cannot compute the prompt in time is never chosen while
another one can. Among the replicas with nearly the most slack, the one with the longest cached prefix wins; among
equals, the one with the fewest requests in flight. Reports are out of date, so a router subtracts the prompts that it
has sent since, and remembers their prefixes. Nothing here reads a clock, draws a random number of its own or does IO.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from neaptide.engine.kv.cache_digest import KEY_BYTES, SAMPLED_BELOW


@dataclass(slots=True, frozen=True)
class Prompt:
    """A request, as far as a router knows it."""

    tokens: int
    keys: tuple[tuple[bytes, int], ...] = ()
    """Keys of its prefixes that a digest would contain, and their lengths in tokens, the shortest first."""
    head: bytes = b""
    """Key of its first block, which requests of one conversation or with one system prompt share."""

    @classmethod
    def of(cls, tokens: int, block_hashes: Sequence[bytes], block_size: int) -> "Prompt":
        keys = tuple(
            (found[:KEY_BYTES], (number + 1) * block_size)
            for number, found in enumerate(block_hashes)
            if found[0] < SAMPLED_BELOW
        )
        return cls(tokens, keys, block_hashes[0][:KEY_BYTES] if block_hashes else b"")


@dataclass(slots=True, frozen=True)
class RoutingFigures:
    """A replica's report."""

    free_slack_ms: float
    """Part of the TTFT target that is left after its prompts are computed next to its streams; negative if the last
    prompt will be late."""
    ttft_slo_ms: float
    prompt_token_ms: float
    """Slack that a further prompt token takes."""
    digest: frozenset[bytes] | None = None
    """``digest_of`` its cached blocks; None if it is as in the last report."""


@dataclass(slots=True)
class _Known:
    """A replica's last report, and the requests that were sent there since."""

    figures: RoutingFigures
    digest: frozenset[bytes] = frozenset()
    sent_ms: float = 0.0
    in_flight: int = 0
    """Requests that were sent there and have not ended."""
    sent_keys: set[bytes] = field(default_factory=set)
    """Keys of prompts that were sent since the last digest."""
    sent_keys_before: set[bytes] = field(default_factory=set)
    """Keys of prompts that were sent between the last two digests: a prompt is not cached at once."""

    @property
    def slack_ms(self) -> float:
        return self.figures.free_slack_ms - self.sent_ms

    def cached_tokens(self, prompt: Prompt) -> int:
        """Length of the prompt's longest prefix that is known to be cached."""
        for key, tokens in reversed(prompt.keys):
            if key in self.digest or key in self.sent_keys or key in self.sent_keys_before:
                return min(tokens, prompt.tokens - 1)
        return 0

    def own_ms(self, prompt: Prompt) -> float:
        """Slack that the prompt would take."""
        return (prompt.tokens - self.cached_tokens(prompt)) * self.figures.prompt_token_ms

    def take_report(self, figures: RoutingFigures) -> None:
        self.figures = figures
        self.sent_ms = 0.0
        if figures.digest is not None:
            self.digest = figures.digest
            self.sent_keys_before, self.sent_keys = self.sent_keys, set()

    def take_prompt(self, prompt: Prompt) -> None:
        self.sent_ms += self.own_ms(prompt)
        self.in_flight += 1
        self.sent_keys.update(key for key, _ in prompt.keys)


class Router(ABC):
    """Keeps what is known of the replicas. Subclasses choose one of them."""

    reads_prompts: ClassVar[bool] = False
    """Whether the prompt's tokens matter, and not only their number."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def report(self, replica: str, figures: RoutingFigures) -> None:
        """Takes a replica's report. From the first one on, the replica gets requests."""
        if replica in self._known:
            self._known[replica].take_report(figures)
        else:
            self._known[replica] = _Known(figures, figures.digest or frozenset())

    def leave(self, replica: str) -> None:
        """Sends a replica no more requests: it drains, or it is lost."""
        self._known.pop(replica, None)

    def ended(self, replica: str) -> None:
        """Notes that a request has ended that was sent there."""
        if replica in self._known:
            self._known[replica].in_flight -= 1

    def route(self, prompt: Prompt) -> str:
        """Chooses the replica for this prompt. Raises LookupError if there is none."""
        if not self._known:
            raise LookupError("no replica takes requests")
        replica = self._chosen(prompt, self._known)
        self._known[replica].take_prompt(prompt)
        return replica

    @abstractmethod
    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str: ...


class SlackRouter(Router):
    """Chooses by slack, then by cached prefix.

    Args:
        conceded_share: share of the TTFT target that is conceded in slack for a longer cached prefix. The time that
            the prefix saves for the prompt itself counts as slack already; this is for the requests after it. With
            half of the target, conversations queued behind each other, and fewer prefixes were found.
        by_prefix: whether cached prefixes count; else the replica with the most slack gets the prompt.
    """

    reads_prompts = True

    def __init__(self, conceded_share: float = 0.1, by_prefix: bool = True) -> None:
        super().__init__()
        self._conceded_share = conceded_share
        self._by_prefix = by_prefix

    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str:
        left_ms = {name: replica.slack_ms for name, replica in known.items()}
        if self._by_prefix:
            left_ms = {name: left - known[name].own_ms(prompt) for name, left in left_ms.items()}
            best_ms = max(left_ms.values())
            near = {
                name: known[name].cached_tokens(prompt)
                for name, left in left_ms.items()
                if left >= min(best_ms, max(best_ms - self._conceded_share * known[name].figures.ttft_slo_ms, 0.0))
            }
            most = max(near.values())
            left_ms = {name: left_ms[name] for name, tokens in near.items() if tokens == most}
        return max(left_ms, key=lambda name: (left_ms[name], -known[name].in_flight, rendezvous(prompt.head, name)))


class LeastLoadRouter(Router):
    """Chooses the replica with the fewest requests in flight; among equals, the same one for the same first block."""

    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str:
        return min(known, key=lambda name: (known[name].in_flight, rendezvous(prompt.head, name)))


class RoundRobinRouter(Router):
    """Chooses the replicas in turn, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = -1

    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str:
        self._turn += 1
        return list(known)[self._turn % len(known)]


class RandomRouter(Router):
    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str:
        return self._random.choice(list(known))


def rendezvous(head: bytes, replica: str) -> bytes:
    """Rank of a replica for a prompt's first block, the same everywhere (rendezvous hashing).

    When a replica comes or goes, only its own share of the prompts moves.
    """
    return hashlib.blake2b(replica.encode() + b"\0" + head, digest_size=8).digest()


ROUTERS = ("slack", "slack-alone", "least-load", "round-robin", "random")


def build_router(name: str, seed: int = 0) -> Router:
    """The router of this name. Raises ValueError for a name that is none of ``ROUTERS``."""
    if name == "slack":
        return SlackRouter()
    if name == "slack-alone":
        return SlackRouter(by_prefix=False)
    if name == "least-load":
        return LeastLoadRouter()
    if name == "round-robin":
        return RoundRobinRouter()
    if name == "random":
        return RandomRouter(Random(seed))
    raise ValueError(f"there is no router {name!r}; there are: {', '.join(ROUTERS)}")
