"""Offline work that holds no KV yet: rows of batch jobs, flex requests, and preempted requests.

Prompts of batch rows stay in the job's token file until a row is looked at; a job of 50,000 rows costs a few integers
per row here.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from neaptide.engine.kv.segments import Segment, own_segment
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.delivery import Delivery, PlannedRows, PrefixDelivery, RowKey
from neaptide.engine.offline.dual_scan import MemoryShares
from neaptide.engine.offline.lanes import FlexLane, JobLane, Lane
from neaptide.engine.offline.planned import Ends, PlannedOrder, Scan, in_planned_turn
from neaptide.engine.offline.planning.timetable import Timetable
from neaptide.engine.offline.planning.work_left import StepMeans, WorkLeft, work_left
from neaptide.engine.offline.prefix_tree import OrderedFiles
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.offline.turns import ByDeadline, Turns
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId, is_row_of


class OfflinePool:
    """Preempted requests first (their work is half done), then the lanes by turns.

    Looking changes nothing: a row that is looked at is made into a request, which is kept until it is handed out.

    Args:
        row_key: order of a job's rows; None is file order, or that of the prefix tree.
        by_prefix: rows of a job that share a prefix follow one another.
        turns: of the lanes. Where shares have none, all flex requests stand in one lane.
    """

    def __init__(
        self,
        row_key: RowKey | None = None,
        by_prefix: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self.row_key = row_key
        self._by_prefix = by_prefix
        self._has_shares = turns is not None
        self.turns: Turns = turns or ByDeadline()
        self._files = OrderedFiles()
        self._returned: deque[Request] = deque()
        self._lanes: dict[str, Lane] = {}
        """With requests: of a batch by its id, of flex requests by a name that is no id."""
        self._num_in_lanes = 0
        """Requests."""
        self._flex_lanes: dict[str, FlexLane] = {}
        """Of every share that ever had some, with requests or not."""
        self._jobs: dict[str, JobLane] = {}
        """Batches with rows that have not ended, by id; in the lanes are those of them with rows that wait."""
        self._first_looked_at: list[Request] = []
        self._ends: Ends | None = None
        """Of the plan, if it is to be followed from both."""
        self._timetable: Timetable | None = None
        """Of the same, while it is kept."""
        self._memory_shares = MemoryShares()
        """Of its two ends."""
        self._last_scan: Scan | None = None
        """Of the last look along the plan."""
        self.target_density: float | None = None
        """That requests at work together should have, if that is not the whole plan's ..."""
        self.usual_step = StepMeans(0.0, 0.0)
        """... and what a step will have of it, on average, until the plan is done."""
        self._has_plan = False
        """Whether there ever was one: since then it is known what comes next."""
        self._moved: dict[Segment, None] = {}
        """Of requests that were handed out or came back since these were taken last, the deeper ones first."""
        self.kv_tokens = 0
        """Of the memory that offline work may hold, as far as it is known here."""
        self.looks_ahead = False
        """Whether what rows of the plan will hold is foreseen, see ``Scan``."""
        self._now_s = 0.0
        """When the last step was planned."""

    def __len__(self) -> int:
        return len(self._returned) + self._num_in_lanes

    def begin_step(self, now_s: float, is_paused: bool) -> None:
        """A step is to be planned; while the operator has paused offline work, what is done of it says nothing of what
        could be."""
        self._now_s = now_s
        self._memory_shares.begin_step()
        self.turns.begin_step(now_s, is_paused)

    def begin_planned_step(self, kv_tokens: int) -> None:
        """In the step that begins the plan's rows may hold so much of the memory."""
        self.kv_tokens = kv_tokens
        if self._timetable is not None and not self._timetable.begin_step(self._waits, kv_tokens):
            self._timetable = None

    def _waits(self, rank: int) -> bool:
        return any(job.planned_at(rank) is not None for job in self._jobs.values())

    def take_moved_segments(self) -> Iterable[Segment]:
        """Those whose next use may be another one since the last call."""
        segments, self._moved = self._moved, {}
        return segments

    def take_first_looked_at(self) -> list[Request]:
        """Batch rows whose prompts were looked at for the first time since the last call."""
        requests, self._first_looked_at = self._first_looked_at, []
        return requests

    @property
    def ends(self) -> Ends | None:
        """Of the plan, if it is to be followed from both."""
        return self._ends

    def left(self) -> WorkLeft:
        """Of the rows of the plan that wait, with what those that run have still to read."""
        assert self._ends is not None
        spans = [span for job in self._jobs.values() if (span := job.planned_span) is not None]
        return work_left(self._ends, self._timetable, self._memory_shares, spans)

    @property
    def returned(self) -> Sequence[Request]:
        """Preempted requests, in the order in which they are handed out."""
        return self._returned

    @property
    def flex(self) -> Sequence[Request]:
        """Flex requests that have not started."""
        return [request for lane in self._lanes.values() if isinstance(lane, FlexLane) for request in lane.requests]

    @property
    def lanes(self) -> Sequence[Lane]:
        return list(self._lanes.values())

    @property
    def jobs(self) -> Mapping[str, JobLane]:
        """Batches with rows that have not ended, by id."""
        return self._jobs

    def in_turn(self) -> Iterator[Request]:
        """What stands in the lanes, in order; a row is made into a request when the iterator comes to it."""
        look = self.turns.look()
        if self._has_plan and any(job.is_planned for job in self._jobs.values()):
            scan = None
            if self._ends is not None:
                shares = self._memory_shares.copy()
                memory = self.kv_tokens, self.looks_ahead, self._timetable
                scan = self._last_scan = Scan(self._ends, shares, self.target_density, *memory)
            yield from in_planned_turn(self.lanes, look, scan, self._first_looked_at)
            return
        waiting: dict[Lane, Iterator[Request]] = {}
        while (lane := look.first) is not None:
            if lane not in waiting:
                waiting[lane] = lane.waiting(self._first_looked_at)
            request = next(waiting[lane], None)
            if request is None:
                look.drop(lane)
            else:
                yield request
                look.took(lane, request)

    def heads(self, taken: Collection[Request]) -> Iterator[tuple[int, Request]]:
        """Length bucket and request of those that stand for what is in the lanes: see ``Lane.heads``."""
        for lane in sorted(self._lanes.values(), key=self.turns.key):
            yield from lane.heads(taken, self._first_looked_at)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self.in_turn()

    def _share_of(self, request: Request) -> str:
        return request.share if self._has_shares else ""

    # ---- taking in ----

    def add_flex(self, request: Request) -> None:
        share = self._share_of(request)
        lane = self._flex_lanes.get(share)
        if lane is None:
            lane = self._flex_lanes[share] = FlexLane(share)
        if _flex_lane(share) not in self._lanes:
            self._join(_flex_lane(share), lane)
        request.segments = (own_segment(),)  # while it waits for its turn again, its blocks are wanted
        lane.requests.append(request)
        self._num_in_lanes += 1

    def give_back(self, request: Request) -> None:
        """A preempted request waits at the front."""
        self._returned.appendleft(request)
        self._came_back(request, 1)

    def add_batch(self, message: AddBatch, now_s: float, max_num_tokens: int) -> list[int]:
        """Takes in a job, or more rows of one; returns those that can never run: empty, or longer than
        ``max_num_tokens``.

        Rows of a batch that is here already stand behind its others, or among those of the same token file if they go
        by prefix; they may be in another token file.

        Raises OSError or ValueError, with nothing taken in, if the token file is missing, unreadable, torn or short.
        """
        if not message.rows:
            return []
        file = self._files.open(message.path) if self._by_prefix else None
        tokens = TokenFile(message.path) if file is None else file.tokens
        # Arrays, not a loop: the engine's step waits while tens of thousands of rows are taken in.
        rows, params_index = np.array(message.rows, np.int64), np.array(message.params_index, np.int64)
        if rows.max() >= len(tokens):
            raise ValueError(f"{message.path} has {len(tokens)} rows, row {rows.max()} wanted")
        max_tokens = np.array([params.max_tokens for params in message.params_table], np.int64)
        num_prompt_tokens = tokens.lengths(rows)
        fits = (num_prompt_tokens > 0) & (num_prompt_tokens <= max_num_tokens - max_tokens[params_index])
        refused: list[int] = rows[~fits].tolist()
        rows, params_index = rows[fits], params_index[fits]
        if not len(rows):
            return refused
        if self.row_key is not None:
            keys = [self.row_key(tokens, row) for row in rows.tolist()]
            order = sorted(range(len(keys)), key=keys.__getitem__)
            rows, params_index = rows[order], params_index[order]
        lane = self._jobs.get(message.batch_id)
        if lane is None:
            lane = JobLane(message.share if self._has_shares else "", message.deadline_s, self.row_key)
            self._jobs[message.batch_id] = lane
        if message.batch_id not in self._lanes:
            self._join(message.batch_id, lane)
        self._num_in_lanes += len(rows)
        if file is None:
            lane.add(Delivery(message, tokens, rows, params_index, now_s))
        elif (known := lane.of_file(message)) is not None:
            known.extend(message, rows, params_index)
        else:
            lane.hold(file)
            lane.add(PrefixDelivery(message, file, rows, params_index, now_s))
        return refused

    def follow(self, order: PlannedOrder) -> None:
        """From now on rows are handed out in this order, and not in that of the plan before."""
        self._ends, self._last_scan, self._has_plan = order.ends, None, True
        # A timetable is that of a memory which nothing of another plan holds.
        is_followed = self._ends is not None and self.looks_ahead and self._memory_shares.is_right_idle
        self._timetable = self._ends.timetable() if self._ends is not None and is_followed else None
        planned = dict(order.of_jobs())
        lasting_steps: dict[str, float] = {}
        for batch_id, job in self._jobs.items():  # those that it does not have forget the plan before
            of_job = planned.get(batch_id, PlannedRows.none())
            job.follow(of_job)
            self._moved.update(dict.fromkeys(job.segments))
            if order.ends is not None:
                ranks = job.ranks_of_started(of_job)
                lasting_steps |= {name: float(order.ends.lasting_steps[rank]) for name, rank in ranks.items()}
        self._memory_shares.expect(lasting_steps)
        for request in self._returned:
            self._note_moved(request)

    # ---- handing out ----

    def pop(self) -> Request:
        """Takes the first request."""
        if self._returned:
            request = self._returned.popleft()
            self._came_back(request, -1)
            return request
        request = next(self.in_turn())
        self.take(request)
        return request

    def draw(self, count: int) -> None:
        """Puts the first requests among the preempted ones, in their order."""
        for request in reversed([self.pop() for _ in range(count)]):
            self.give_back(request)

    def take(self, request: Request) -> None:
        """Takes a request that is being admitted, wherever it stands."""
        name, taken = self._remove(request.request_id)
        assert taken is request, f"{request.request_id} does not wait in the pool"
        if name is not None:
            self._handed_out(name, request)

    def remove(self, request_id: str) -> Request | None:
        """Takes one waiting flex or preempted request out, or a batch row that has been looked at, wherever it
        stands."""
        name, request = self._remove(request_id)
        if name is not None:
            self._leave_if_empty(name)
        return request

    def cancel_batch(self, batch_id: str) -> tuple[list[Request], list[tuple[Segment, int]]]:
        """Drops the job's rows. Returns those of them that had started and were preempted, and the segments that the
        others wanted, with their number."""
        preempted = [r for r in self._returned if is_row_of(r.request_id, batch_id)]
        for request in preempted:
            self._returned.remove(request)
            self._came_back(request, -1)
        lane = self._jobs.pop(batch_id, None)
        if lane is None:
            return preempted, []
        if batch_id in self._lanes:
            lane.forget_looked_at()
            self._num_in_lanes -= len(lane)
            self._leave(batch_id)
        self.turns.forget(lane)
        return preempted, lane.wanted_by_rows_left()

    def ended(self, request: Request) -> None:
        """A request has ended, handed out or not: what it has put out counts for its share."""
        self.turns.ended(request)
        row_id = RowId.parse(request.request_id)
        if row_id is not None:
            if (job := self._jobs.get(row_id.batch_id)) is not None:
                job.row_ended(request, self._now_s)
                self._forget_if_done(row_id.batch_id)
        elif request.admission_index and (lane := self._flex_lanes.get(self._share_of(request))) is not None:
            lane.answered(request.num_output_tokens)
        self._memory_shares.end(request.request_id)

    def check_integrity(self, running: Iterable[Request], cached: Iterable[Segment] = ()) -> None:
        """Raises AssertionError unless every segment is wanted by as many as wait and run, and batches know their
        rows.

        Args:
            cached: segments that blocks belong to: also those that nobody wants any more.
        """
        wanted, returned = Counter[Segment](), Counter[Segment]()
        assert self._num_in_lanes == sum(map(len, self._lanes.values()))
        for lane in self._lanes.values():
            wanted.update(dict(lane.wanted_by_rows_left()) if isinstance(lane, JobLane) else {})
            assert len(lane), "an empty lane has a turn"
        started = [*running, *self._returned]
        for request in started:
            wanted.update(request.segments)
        known_segments = {*wanted, *cached}
        assert all(segment.num_wanting == wanted[segment] for segment in known_segments)
        for request in self._returned:
            returned.update(request.segments)
        assert all(segment.num_returned == returned[segment] for segment in known_segments)
        told = [segment for segment in wanted if self._has_plan and segment not in self._moved]
        assert all(segment.next_use == segment.present_use for segment in told)
        assert all(len(job) or job.started for job in self._jobs.values())
        known = {request_id for job in self._jobs.values() for request_id in job.started}
        assert known == {request.request_id for request in started if request.tier is Tier.BATCH}

    def _remove(self, request_id: str) -> tuple[str | None, Request | None]:
        """Takes a request out; with the lane that it stood in, None for a preempted one."""
        for request in self._returned:
            if request.request_id == request_id:
                self._returned.remove(request)
                self._came_back(request, -1)
                return None, request
        row_id = RowId.parse(request_id)
        names = map(_flex_lane, self._flex_lanes) if row_id is None else [row_id.batch_id]
        for name in names:
            lane = self._lanes.get(name)
            if lane is not None and (found := lane.remove(request_id)) is not None:
                self._num_in_lanes -= 1
                self._note_moved(found)
                return name, found
        return None, None

    def _came_back(self, request: Request, count: int) -> None:
        """A preempted request, or one less: it comes before all that is planned."""
        for segment in request.segments:
            segment.num_returned += count
        self._note_moved(request)

    def _note_moved(self, request: Request) -> None:
        if self._has_plan:
            self._moved.update(dict.fromkeys(reversed(request.segments)))

    def _handed_out(self, name: str, request: Request) -> None:
        lane = self._lanes[name]
        if isinstance(lane, JobLane):
            lane.started[request.request_id] = request
            if self._last_scan is not None:
                self._last_scan.started(request.request_id, self._memory_shares)
        self.turns.took(lane, request)
        self._leave_if_empty(name)

    def _leave_if_empty(self, name: str) -> None:
        if not len(self._lanes[name]):
            self._leave(name)
            self._forget_if_done(name)

    def _forget_if_done(self, batch_id: str) -> None:
        job = self._jobs.get(batch_id)
        if job is not None and not job.started and not len(job):
            del self._jobs[batch_id]
            self.turns.forget(job)

    def _join(self, name: str, lane: Lane) -> None:
        self._lanes[name] = lane
        self.turns.join(lane)

    def _leave(self, name: str) -> None:
        self.turns.leave(self._lanes.pop(name))


def _flex_lane(share: str) -> str:
    return f"flex:{share}"
