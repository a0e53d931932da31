"""Answers why a chat was late, from the recorded steps and the times of the last requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread

from neaptide.server.engine_client.client import EngineClient
from neaptide.server.why.device_time import DeviceTimeSums, LineStarts
from neaptide.server.why.parts import StepsAround, TokenWait, WaitParts, parts_of
from neaptide.server.why.requests import EndedChoice, EndedRequest, EndedRequests
from neaptide.server.why.sentences import in_brief, sentence
from neaptide.server.why.steps import StepRing, StepsCut

REPORTED_S = 1.0
"""An engine reports its steps within this time."""
NO_TOKEN = {
    "ok": "it has no output, so nothing of it was late",
    "aborted": "its client left before the first token",
    "server_error": "it failed before the first token; the server's log has the error",
}
"""What became of a request without a token, by outcome."""
FAILED = "it failed before its end; the server's log has the error; until then "
"""Begin of the sentence on a request that failed after its first token."""
MAX_SENTENCES = 64
"""Most sentences that are kept for the dashboard."""


@dataclass(slots=True, frozen=True)
class Explained:
    """One wait of a request, explained."""

    wait: TokenWait
    parts: WaitParts

    @property
    def sentence(self) -> str:
        return sentence(self.wait, self.parts)

    @property
    def brief(self) -> str:
        """The sentence without its smaller parts and times; all of it for what was in time."""
        return in_brief(self.wait, self.parts) if self.wait.late_s > 0 else self.sentence


def told(request: EndedRequest, explained: Sequence[Explained], *, in_brief: bool = False) -> str:
    """The sentence on a request: on its first late wait, or on what became of it without a token."""
    if not explained:
        return NO_TOKEN.get(request.outcome, "it was refused or ended without a token")
    text = explained[0].brief if in_brief else explained[0].sentence
    return FAILED + text if request.outcome == "server_error" else text


class WhyDesk:
    """Explains the waits of ended requests. Event loop only; the work is done in a thread, one at a time."""

    def __init__(self, client: EngineClient, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self.steps = StepRing(client, clock)
        self.requests = EndedRequests(self.steps, clock)
        self.device = DeviceTimeSums(client, wall)
        self.lines = LineStarts(client, clock, wall)
        self._clock = clock
        self._limiter = CapacityLimiter(1)
        self._sentences: dict[str, str] = {}

    async def explain(self, request: EndedRequest) -> list[Explained]:
        """Its late waits, or else the one for its first token. Empty if it had no token."""
        waits = [(choice, wait) for choice in request.choices for wait in _waits(request, choice, self.steps)]
        late = [one for one in waits if one[1].late_s > 0]
        chosen = late or waits[:1]
        cuts = [self._cut(wait) for _, wait in chosen]
        work = list(zip(chosen, cuts, strict=True))
        return await to_thread.run_sync(
            lambda: [_explained(wait, choice, cut) for (choice, wait), cut in work], limiter=self._limiter
        )

    async def sentence_of(self, name: str) -> str:
        """The sentence on a late request, for the dashboard; empty while it is not known."""
        if name in self._sentences:
            return self._sentences[name]
        found = self.requests.find(name)
        if not found or self._clock() < found[0].ended_s + REPORTED_S:
            return ""
        text = told(found[0], await self.explain(found[0]), in_brief=True)
        self._sentences[name] = text
        while len(self._sentences) > MAX_SENTENCES:
            del self._sentences[next(iter(self._sentences))]
        return text

    def _cut(self, wait: TokenWait) -> StepsCut:
        return self.steps.cut(wait.start_s, wait.end_s)


def _explained(wait: TokenWait, choice: EndedChoice, cut: StepsCut) -> Explained:
    around: StepsAround = cut.read(choice.engine_id, choice.admissions, wait.start_s, wait.end_s)
    return Explained(wait, parts_of(wait, around))


def _waits(request: EndedRequest, choice: EndedChoice, steps: StepRing) -> list[TokenWait]:
    """The waits of a choice for its first token and, with more than one token, over its longest gap.

    A gap counts as late only if the mean time per token is: one token alone may take longer.
    """
    timing = choice.timing
    if timing.first_s is None or timing.sent_s is None:
        return []
    first = TokenWait(
        request_id=choice.engine_id,
        start_s=request.arrival_s,
        end_s=timing.first_s,
        target_s=request.ttft_slo_s,
        new_prompt_tokens=timing.num_new_prompt_tokens,
        sent_s=timing.sent_s,
        first_token_s=timing.engine_first_s,
        engine_gone=steps.gone(timing.sent_s, timing.first_s),
    )
    tpot_s = timing.tpot_s
    if tpot_s is None or tpot_s <= request.tpot_slo_s or not timing.longest_gap_s:
        return [first]
    gap = TokenWait(
        request_id=choice.engine_id,
        start_s=timing.gap_end_s - timing.longest_gap_s,
        end_s=timing.gap_end_s,
        target_s=request.tpot_slo_s,
        new_prompt_tokens=timing.num_new_prompt_tokens,
        sent_s=timing.sent_s,
        first_token_s=None,
    )
    return [first, gap]
