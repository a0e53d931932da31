"""Routing: chooses the replica for an online request from the replicas' reports.

Slack comes first, prefixes second. A replica that would miss the prompt's target is never chosen if another can meet
it. Among the replicas with nearly the most slack, the one that caches most of the prompt is chosen; of equals, the one
with fewer requests in flight. Reports are old when they are read. A router therefore subtracts the prompts that it has
sent since, and remembers their prefixes. Nothing here reads a clock, draws a random number of its own or does IO.
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
    """A request as the router sees it."""

    tokens: int
    keys: tuple[tuple[bytes, int], ...] = ()
    """Keys of its prefixes that a digest would have, shortest first, with their lengths in tokens."""
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
class Figures:
    """A replica's report on itself."""

    free_slack_ms: float
    """TTFT target that is left after all waiting prompts are computed while the streams run. Negative if the last of
    them will be late."""
    ttft_slo_ms: float
    prompt_token_ms: float
    """Slack that one more prompt token takes."""
    digest: frozenset[bytes] | None = None
    """``digest_of`` its cached blocks; None if unchanged since the last report."""


@dataclass(slots=True)
class _Known:
    """A replica as the router sees it: its last report, and the requests sent since."""

    figures: Figures
    digest: frozenset[bytes] = frozenset()
    sent_ms: float = 0.0
    in_flight: int = 0
    """Requests sent there that have not ended; the router counts them itself."""
    sent_keys: set[bytes] = field(default_factory=set)
    """Keys of prompts sent since the last digest."""
    sent_keys_before: set[bytes] = field(default_factory=set)
    """Keys of prompts sent between the last two digests: a prompt that was sent is not cached at once."""

    @property
    def slack_ms(self) -> float:
        return self.figures.free_slack_ms - self.sent_ms

    def cached_tokens(self, prompt: Prompt) -> int:
        """Number of the prompt's first tokens that are known to be cached."""
        for key, tokens in reversed(prompt.keys):
            if key in self.digest or key in self.sent_keys or key in self.sent_keys_before:
                return min(tokens, prompt.tokens - 1)
        return 0

    def own_ms(self, prompt: Prompt) -> float:
        """Slack that the prompt would take."""
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
    """Chooses a replica for each prompt among those that accept requests; subclasses decide which."""

    reads_prompts: ClassVar[bool] = False
    """Whether prompts are needed, and not only their lengths."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def report(self, replica: str, figures: Figures) -> None:
        """Takes in a replica's report. A replica gets requests from its first report on."""
        if replica in self._known:
            self._known[replica].take_report(figures)
        else:
            self._known[replica] = _Known(figures, figures.digest or frozenset())

    def leave(self, replica: str) -> None:
        """Sends no more requests to a replica that drains or is lost."""
        self._known.pop(replica, None)

    def ended(self, replica: str) -> None:
        """Notes the end of a request that was sent there."""
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
    """Chooses by slack, then by cached prefix.

    Args:
        conceded_share: slack that is given up for a longer cached prefix, as a share of the TTFT target. The prompt's
            own gain already counts as slack; this is for the requests that wait after it. Measured: at half of the
            target conversations queued up, and fewer prefixes were found than at a tenth.
        by_prefix: whether cached prefixes count. Without them the replica with the most slack takes the prompt.
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
    """Chooses the replica with the fewest requests in flight; of equals, the same one for prompts with the same
    head."""

    def _chosen(self, prompt: Prompt, known: Mapping[str, _Known]) -> str:
        return min(known, key=lambda name: (known[name].in_flight, rendezvous(prompt.head, name)))


class RoundRobinRouter(Router):
    """Chooses the replicas in turn, in the order of their first reports."""

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
    """Ranks replicas for a prompt's head, everywhere alike. A replica that comes or goes moves only its own share."""
    return hashlib.blake2b(replica.encode() + b"\0" + head, digest_size=8).digest()


ROUTERS = ("slack", "slack-alone", "least-load", "round-robin", "random")


def build_router(name: str, seed: int = 0) -> Router:
    """Builds a router. Raises ValueError for a name that is not in ``ROUTERS``."""
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
