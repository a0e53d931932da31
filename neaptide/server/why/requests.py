"""The times of the last online requests, for ``GET /admin/why``; no text of a caller but its request id."""

from collections.abc import Callable
from dataclasses import dataclass

from neaptide.server.observe.metrics import ONLINE_TIERS
from neaptide.server.observe.request_log import RequestRecord, RequestTerms
from neaptide.server.observe.timing import ChoiceTiming, RequestTiming
from neaptide.server.why.steps import KEPT_S, StepRing

MAX_REQUESTS = 10_000
"""About 1 KB each."""


@dataclass(slots=True, frozen=True)
class EndedChoice:
    """One choice of an ended request."""

    engine_id: str
    timing: ChoiceTiming
    admissions: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class EndedRequest:
    """An online request that has ended."""

    name: str
    """Its name in the log (``engine_id``)."""
    request_id: str
    """Id of the reply's ``X-Request-Id`` header."""
    key: str | None
    """Fingerprint of its key; None without keys."""
    tier: str
    outcome: str
    arrival_s: float
    ended_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    choices: tuple[EndedChoice, ...]


class EndedRequests:
    """The online requests that have ended in the last 15 minutes. Event loop only."""

    def __init__(self, steps: StepRing, clock: Callable[[], float]) -> None:
        self._steps = steps
        self._clock = clock
        self._by_name: dict[str, EndedRequest] = {}
        self._by_request_id: dict[str, EndedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def on_finished(self, record: RequestRecord, prepared: RequestTerms, timing: RequestTiming) -> None:
        """Notes the end of a request."""
        if record.engine_id is None or prepared.tier not in ONLINE_TIERS:
            return
        ids = [f"{record.engine_id}-{index}" for index in range(len(timing.choices))]
        ended = EndedRequest(
            record.engine_id,
            record.request_id,
            record.key,
            record.tier,
            record.outcome,
            timing.arrival_s,
            self._clock(),
            prepared.ttft_slo_s,
            prepared.tpot_slo_s,
            tuple(
                EndedChoice(engine_id, choice, self._steps.take_admissions(engine_id))
                for engine_id, choice in zip(ids, timing.choices, strict=True)
            ),
        )
        self._by_name[ended.name] = self._by_request_id[ended.request_id] = ended
        self._forget()

    def find(self, request_id: str) -> list[EndedRequest]:
        """The request of an id: of the reply, of the log, or of its ``X-Request-Id`` header."""
        self._forget()
        name = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("resp_")
        found = self._by_name.get(name) or self._by_name.get(name.rpartition("-")[0])
        return [one for one in (found, self._by_request_id.get(request_id)) if one is not None]

    def _forget(self) -> None:
        oldest_s = self._clock() - KEPT_S
        while self._by_name:
            one = next(iter(self._by_name.values()))
            if len(self._by_name) <= MAX_REQUESTS and one.ended_s >= oldest_s:
                break
            del self._by_name[one.name]
            if self._by_request_id.get(one.request_id) is one:
                del self._by_request_id[one.request_id]
