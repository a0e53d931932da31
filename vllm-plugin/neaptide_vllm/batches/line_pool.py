"""Which batch lines are open in vLLM, and in which order they are opened. No clock, no event loop.

vLLM knows a priority and an arrival time. Turns between keys, deadlines of batches and shared prefixes are decided
here, before a line is opened: few lines wait in vLLM, and those only so that it never runs dry.
"""

from collections.abc import Iterable, Mapping

from neaptide.engine.messages import AddBatch, BatchDeadlineStatus
from neaptide.engine.offline.deadline_status import DeadlineJudge
from neaptide.engine.offline.pool import OfflinePool
from neaptide.engine.offline.sharing.by_shares import ByShares
from neaptide.engine.offline.work import Work
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId, is_row_of
from neaptide.engine.table import RequestTable

NO_LIMIT = 1 << 40
"""vLLM refuses prompts that are too long, with its own words."""


class FastestSeen:
    """Least time of work, by the highest rate at which this server has done offline work. Implements ``LeastTime``."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def note(self, tokens_per_s: float | None) -> None:
        self.tokens_per_s = max(self.tokens_per_s, tokens_per_s or 0.0)

    def least_seconds(self, work: Work) -> float:
        """As in ``LeastTime``; 0 until a rate is known, so that no batch is called late on a guess."""
        return work.num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0


class LinePool:
    """Waiting and open lines.

    Args:
        most_lines: most lines that are open at once.
        kv_tokens: most tokens that the open lines hold, prompts and expected answers together.
        weights: of the keys' shares; 1 unless given.
    """

    def __init__(self, most_lines: int, kv_tokens: int, weights: Mapping[str, float] | None = None) -> None:
        self._most_lines, self._kv_tokens = most_lines, kv_tokens
        self._turns = ByShares(weights or {})
        self._pool = OfflinePool(by_prefix=True, turns=self._turns)
        self._open: dict[str, tuple[Request, int]] = {}
        """Open requests, and the tokens that each holds."""
        self._held_tokens = 0
        self._num_opened = 0
        self._now_s = 0.0
        self._is_paused = False
        self._device = FastestSeen()
        self._judge = DeadlineJudge(self._device)
        self._nothing_runs_here = RequestTable(1, 1, 1)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        return len(self._pool)

    def begin(self, now_s: float, is_paused: bool) -> None:
        """Sets the time, and whether the operator has paused offline work. Call at least once a second."""
        self._now_s, self._is_paused = now_s, is_paused
        self._pool.begin_step(now_s, is_paused)
        self._device.note(self._turns.rate_tokens_per_s)

    def add(self, message: AddBatch) -> None:
        """Adds lines. Raises OSError or ValueError, with nothing added, if the token file cannot be read."""
        self._pool.add_batch(message, self._now_s, NO_LIMIT)
        self._judge.hurry()

    def open_next(self) -> Request | None:
        """Opens the next line; None if none waits or there is no room."""
        if self._is_paused or len(self._open) >= self._most_lines:
            return None
        request = next(iter(self._pool), None)
        if request is None:
            return None
        lane = self._pool.jobs[_batch_of(request)]
        tokens = request.num_prompt_tokens + self._turns.expected_answer(lane, request)
        # A line that is larger than all memory runs alone, or is refused by vLLM.
        if self._open and self._held_tokens + tokens > self._kv_tokens:
            return None
        assert self._pool.pop() is request
        self._num_opened += 1
        request.admission_index, request.scheduled_s = self._num_opened, self._now_s
        self._open[request.request_id] = request, tokens
        self._held_tokens += tokens
        return request

    def end(self, request: Request, num_answer_tokens: int) -> None:
        """An open line has ended."""
        self._held_tokens -= self._open.pop(request.request_id)[1]
        request.note_answer(num_answer_tokens)
        self._pool.ended(request)
        self._judge.hurry()

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Ends lines without an answer; returns those that were open."""
        found = [self._open[request_id][0] for request_id in request_ids if request_id in self._open]
        for request in found:
            self.end(request, 0)
        return [request.request_id for request in found]

    def cancel(self, batch_id: str) -> list[str]:
        """Drops a batch; returns its lines that were open."""
        self._pool.cancel_batch(batch_id)
        return self.drop([one for one in self._open if is_row_of(one, batch_id)])

    def report(self) -> list[BatchDeadlineStatus] | None:
        """Deadline status of every batch; None if it is not due."""
        rate = self._turns.rate_tokens_per_s
        return self._judge.report(self._pool.jobs, self._nothing_runs_here, rate, self._now_s)


def _batch_of(request: Request) -> str:
    row = RowId.parse(request.request_id)
    assert row is not None
    return row.batch_id
