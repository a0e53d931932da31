"""Which replica an online request goes to, by what the replicas say of themselves.

Slack first, prefix second. A replica that could not compute the prompt in time is never chosen while another one could;
among those that have next to the most slack, the one that has most of the prompt in its cache is. A replica's figures
are as old as its last report, so a router takes off what it has sent there since, and remembers which prefixes that
will bring; of equals the one with fewer requests in flight is chosen. Nothing here reads a clock, draws a number of its
own or does IO.
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
    """What a router knows of a request."""

    tokens: int
    keys: tuple[tuple[bytes, int], ...] = ()
    """Names of its beginnings that a digest would have, the shortest first, and their tokens."""
    head: bytes = b""
    """Its first block: requests of one conversation, or with one system prompt, have it in common."""

    @classmethod
    def of(cls, tokens: int, block_hashes: Sequence[bytes], block_size: int) -> "Prompt":
        keys = tuple(
            (found[:KEY_BYTES], (number + 1) * block_size)
            for number, found in enumerate(block_hashes)
            if found[0] < SAMPLED_BELOW
        )
        return cls(tokens, keys, block_hashes[0][:KEY_BYTES] if block_hashes else b"")


@dataclass(slots=True, frozen=True)
class Figures:
    """What a replica says of itself."""

    free_slack_ms: float
    """Of the TTFT target, what is left when the prompts that it has are computed beside its streams; negative if the
    last of them will be late."""
    ttft_slo_ms: float
    prompt_token_ms: float
    """What a further token of a prompt takes from the slack."""
    digest: frozenset[bytes] | None = None
    """``digest_of`` its cached blocks; None: as in the report before."""


@dataclass(slots=True)
class _Known:
    """A replica as the router sees it: its last report, and what was sent there since."""

    figures: Figures
    digest: frozenset[bytes] = frozenset()
    sent_ms: float = 0.0
    in_flight: int = 0
    """Requests that were sent there and have not ended; no report is needed for that."""
    sent_keys: set[bytes] = field(default_factory=set)
    """Of prompts that were sent since the digest was taken ..."""
    sent_keys_before: set[bytes] = field(default_factory=set)
    """... and since the one before, for what is sent is not cached at once."""

    @property
    def slack_ms(self) -> float:
        return self.figures.free_slack_ms - self.sent_ms

    def cached_tokens(self, prompt: Prompt) -> int:
        """Of the prompt, from its beginning, as far as it is known."""
        for key, tokens in reversed(prompt.keys):
            if key in self.digest or key in self.sent_keys or key in self.sent_keys_before:
                return min(tokens, prompt.tokens - 1)
        return 0

    def own_ms(self, prompt: Prompt) -> float:
        """What the prompt would take from the slack."""
        return (prompt.tokens - self.cached_tokens(prompt)) * self.figures.prompt_token_ms

    def take_report(self, figures: Figures) -> None:
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
    """Subclasses say which of the replicas that take requests."""

    reads_prompts: ClassVar[bool] = False
    """Whether what a prompt says matters, beside its length."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def report(self, replica: str, figures: Figures) -> None:
        """From its first report on a replica gets requests."""
        if replica in self._known:
            self._known[replica].take_report(figures)
        else:
            self._known[replica] = _Known(figures, figures.digest or frozenset())

    def leave(self, replica: str) -> None:
        """It gets none from now on: it drains, or it is lost."""
        self._known.pop(replica, None)

    def ended(self, replica: str) -> None:
        """One of the requests that were sent there."""
        if replica in self._known:
            self._known[replica].in_flight -= 1

    def route(self, prompt: Prompt) -> str:
        """The replica for this prompt. Raises LookupError if there is none."""
        if not self._known:
            raise LookupError("no replica takes requests")
        replica = self._chosen(prompt, self._known)
        self._known[replica].take_prompt(prompt)
        return replica

    @abstractmethod
    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str: ...


class SlackRouter(Router):
    """
    Args:
        conceded_share: of the TTFT target, so much slack is given up for a longer cached prefix. What the prefix saves
            of the prompt itself is slack already; this is for the requests behind it. Where half of the target was
            left to prefixes, conversations queued behind each other, and fewer prefixes were found than by this.
        by_prefix: without it, the replica with the most slack takes the prompt, whatever is cached where.
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
    """To the replica with the fewest requests in flight; of equals the same one for the same head of a prompt."""

    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str:
        return min(known, key=lambda name: (known[name].in_flight, rendezvous(prompt.head, name)))


class RoundRobinRouter(Router):
    """To each in turn, in the order in which they came."""

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
    """Ranks replicas for a prompt's head the same everywhere; one that comes or goes moves only its own share."""
    return hashlib.blake2b(replica.encode() + b"\0" + head, digest_size=8).digest()


ROUTERS = ("slack", "slack-alone", "least-load", "round-robin", "random")


def build_router(name: str, seed: int = 0) -> Router:
    """Raises ValueError for a name that is none of ``ROUTERS``."""
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
