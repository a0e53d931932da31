"""Admission of requests within the limits of their keys, and the headers that tell clients what is left."""

import math

from neaptide.server.http.auth import Principal
from neaptide.server.http.errors import RateLimitError
from neaptide.server.limits.counts import Amounts, Counts, Taken
from neaptide.server.limits.usage import Excess, Level, LimitName
from neaptide.server.observe.metrics_keys import KeyMetrics

HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
"""Headers of replies to keys with limits, as OpenAI's."""
LONGEST_RETRY_S = 60.0
"""Longest ``Retry-After`` that OpenAI's clients follow."""
_SHOWN = {
    LimitName.REQUESTS_PER_MINUTE: "requests per min (RPM)",
    LimitName.TOKENS_PER_MINUTE: "tokens per min (TPM)",
    LimitName.TOKENS_PER_DAY: "tokens per day (TPD)",
}
_TOKENS = (LimitName.TOKENS_PER_MINUTE, LimitName.TOKENS_PER_DAY)


class Charge:
    """What one request is counted for. Prompt and longest answer at admission; at its end, what it really had.

    Args:
        taken: what was counted at admission; None for a key without limits.
    """

    def __init__(
        self, principal: Principal, prompt_tokens: int, reserved_tokens: int, taken: Taken | None, metrics: KeyMetrics
    ) -> None:
        self._principal = principal
        self._taken = taken
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._counted_tokens = prompt_tokens + reserved_tokens
        self._answer_tokens = 0
        self._has_ended = False

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the reply."""
        if self._taken is None:
            return {}
        limits = self._principal.limits
        return _headers(dict(limits.items()), self._taken.by.levels(self._principal.tenant, limits))

    def on_tokens(self, count: int) -> None:
        """Counts tokens of the answer as they come."""
        self._answer_tokens += count
        beyond = self._prompt_tokens + self._answer_tokens - self._counted_tokens
        if beyond > 0 and self._taken is not None:
            self._counted_tokens += beyond
            self._taken.by.add(self._principal.tenant, self._of_tokens(beyond))

    def end(self, *, counts: bool = True, answer_tokens: int | None = None) -> None:
        """Corrects the count to what was used; nothing at all unless ``counts``. Later calls do nothing.

        Args:
            answer_tokens: as in the reply's usage; None: those that came.
        """
        if self._has_ended:
            return
        self._has_ended = True
        answer_tokens = self._answer_tokens if answer_tokens is None else answer_tokens
        used = self._prompt_tokens + answer_tokens if counts else 0
        self._metrics.ended(self._principal, used, counts)
        if self._taken is None:
            return
        left = dict(self._of_tokens(max(0, self._counted_tokens - used)))
        if not counts and self._principal.limits.requests_per_minute is not None:
            left[LimitName.REQUESTS_PER_MINUTE] = 1
        self._taken.by.give_back(self._principal.tenant, left, self._taken.place)
        if used > self._counted_tokens:
            self._taken.by.add(self._principal.tenant, self._of_tokens(used - self._counted_tokens))

    def _of_tokens(self, count: int) -> Amounts:
        return {name: count for name, _ in self._principal.limits.items() if name in _TOKENS}


class RateLimiter:
    """The limits of all keys of one server. Event loop only."""

    def __init__(self, counts: Counts, metrics: KeyMetrics) -> None:
        self.counts = counts
        self.metrics = metrics

    async def start(self) -> None:
        """Begins, with the stored counts."""
        await self.counts.start()

    async def stop(self) -> None:
        """Stores the counts."""
        await self.counts.stop()

    def check(self, principal: Principal) -> None:
        """Raises RateLimitError if no request has room, before any work on it."""
        if principal.is_limited and (excess := self.counts.refusal(principal.tenant, principal.limits)) is not None:
            raise self._refused(principal, excess)

    async def admit(self, principal: Principal, prompt_tokens: int, reserved_tokens: int) -> Charge:
        """Counts a request; ``Charge.end`` must follow. Raises RateLimitError if it has no room.

        Args:
            reserved_tokens: longest answer that the request asks for; 0 if it does not say.
        """
        taken: Taken | None = None
        if principal.is_limited:
            tokens = prompt_tokens + reserved_tokens
            amounts = {name: tokens if name in _TOKENS else 1 for name in LimitName}
            found = await self.counts.take(principal.tenant, principal.limits, amounts)
            if isinstance(found, Excess):
                raise self._refused(principal, found)
            taken = found
        return Charge(principal, prompt_tokens, reserved_tokens, taken, self.metrics)

    def _refused(self, principal: Principal, excess: Excess) -> RateLimitError:
        self.metrics.refused(principal, excess.name)
        levels = self.counts.levels(principal.tenant, principal.limits)
        headers = _headers(dict(principal.limits.items()), levels)
        numbers = f"Limit {excess.limit}, Used {excess.used}, Requested {excess.wanted}."
        kind = "tokens" if excess.name in _TOKENS else "requests"
        if excess.wait_s is None:
            headers["x-should-retry"] = "false"
            text = f"Request too large on {_SHOWN[excess.name]}: {numbers} Shorten the prompt or lower max_tokens."
            return RateLimitError(text, type=kind, headers=headers)
        if excess.name is LimitName.TOKENS_PER_DAY and excess.wait_s > LONGEST_RETRY_S:
            headers["Retry-After"], headers["x-should-retry"] = str(math.ceil(excess.wait_s)), "false"
        else:
            # Clients would replace a longer wait by a much shorter one of their own.
            headers["Retry-After"] = str(min(max(1, math.ceil(excess.wait_s)), int(LONGEST_RETRY_S)))
        wait = duration_text(excess.wait_s)
        text = f"Rate limit reached on {_SHOWN[excess.name]}: {numbers} Please try again in {wait}."
        return RateLimitError(text, type=kind, headers=headers)


def _headers(limits: dict[LimitName, int], levels: dict[LimitName, Level]) -> dict[str, str]:
    """Headers of the requests and of the tokens of a minute; without a limit for a minute, of the tokens of a day."""
    found: dict[str, str] = {}
    tokens = next((name for name in _TOKENS if name in limits), None)
    for kind, name in (("requests", LimitName.REQUESTS_PER_MINUTE), ("tokens", tokens)):
        if name is None or name not in limits:
            continue
        found[f"x-ratelimit-limit-{kind}"] = str(limits[name])
        found[f"x-ratelimit-remaining-{kind}"] = str(max(0, limits[name] - levels[name].used))
        found[f"x-ratelimit-reset-{kind}"] = duration_text(levels[name].reset_s)
    return found


def duration_text(seconds: float) -> str:
    """A duration in OpenAI's form: ``120ms``, ``7.66s``, ``6m0s``, ``1h0m3s``."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    hundredths = math.ceil(round(seconds * 100, 6))
    hours, rest = divmod(hundredths, 360_000)
    minutes, rest = divmod(rest, 6_000)
    head = f"{hours}h" if hours else ""
    head += f"{minutes}m" if hours or minutes else ""
    return f"{head}{rest / 100:g}s"
