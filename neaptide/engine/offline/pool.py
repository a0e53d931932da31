"""Offline work that holds no KV yet: lines of batch jobs, flex requests, and preempted requests.

Prompts stay in the job's token file until a line becomes a request. A job of 50,000 lines takes a few integers per line
here.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from neaptide.engine.kv.prefix_nodes import PrefixNode, own_node
from neaptide.engine.messages import AddBatch
from neaptide.engine.offline.dual_scan import MemoryShares
from neaptide.engine.offline.lanes import FlexLane, JobLane, Lane
from neaptide.engine.offline.planned import Ends, PlannedOrder, Scan, in_planned_turn
from neaptide.engine.offline.planning.timetable import Timetable
from neaptide.engine.offline.planning.work_left import StepMeans, WorkLeft, work_left
from neaptide.engine.offline.prefix_tree import OrderedFiles
from neaptide.engine.offline.row_source import PlannedRows, PrefixRowSource, RowKey, RowSource
from neaptide.engine.offline.token_file import TokenFile
from neaptide.engine.offline.turns import ByDeadline, Turns
from neaptide.engine.params import Tier
from neaptide.engine.request import Request
from neaptide.engine.row_id import RowId, is_row_of


class OfflinePool:
    """Pool of waiting offline work: preempted requests first (they are partly computed), then the lanes by turns.

    Iterating has no side effects: the request made for a line is cached until it is admitted.

    Args:
        row_key: order of a job's lines; None is file order, or that of the prefix tree.
        by_prefix: put lines of a job that share a prefix next to each other.
        turns: order of the lanes. None gives no tenant a turn; all flex requests are then in one lane.
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
        """Lanes with requests: a batch's by its id, flex requests' by a name that is no batch id."""
        self._num_in_lanes = 0
        """Number of requests in the lanes."""
        self._flex_lanes: dict[str, FlexLane] = {}
        """Lane of every tenant that ever had flex requests, even if empty."""
        self._jobs: dict[str, JobLane] = {}
        """Batches with lines that have not ended, by id. ``_lanes`` has those with waiting lines."""
        self._first_materialized: list[Request] = []
        self._ends: Ends | None = None
        """Dual-scan data of the plan, if it has some."""
        self._timetable: Timetable | None = None
        """Timetable of the plan, while it is kept."""
        self._memory_shares = MemoryShares()
        """Memory that each end of the plan holds."""
        self._last_scan: Scan | None = None
        """Scan of the last iteration along the plan."""
        self.target_density: float | None = None
        """Density of the requests that should run together; None for that of the whole plan."""
        self.usual_step = StepMeans(0.0, 0.0)
        """Mean tokens and reads of a step until the plan is done."""
        self._has_plan = False
        """Whether there was ever a plan, so that the next uses are known."""
        self._moved: dict[PrefixNode, None] = {}
        """Prefix nodes of requests that were admitted or came back since the last ``take_moved_nodes``, deeper ones
        first."""
        self.kv_tokens = 0
        """Tokens of KV that offline work may hold, as far as it is known here."""
        self.looks_ahead = False
        """Whether the memory of the plan's lines is predicted; see ``Scan``."""
        self._now_s = 0.0
        """When the last step was planned."""

    def __len__(self) -> int:
        return len(self._returned) + self._num_in_lanes

    def begin_step(self, now_s: float, is_paused: bool) -> None:
        """Prepares for planning a step. While the operator has paused offline work, its rate is not measured."""
        self._now_s = now_s
        self._memory_shares.begin_step()
        self.turns.begin_step(now_s, is_paused)

    def begin_planned_step(self, kv_tokens: int) -> None:
        """Sets the memory that the plan's lines may hold in the step that begins."""
        self.kv_tokens = kv_tokens
        if self._timetable is not None and not self._timetable.begin_step(self._waits, kv_tokens):
            self._timetable = None

    def _waits(self, rank: int) -> bool:
        return any(job.planned_at(rank) is not None for job in self._jobs.values())

    def take_moved_nodes(self) -> Iterable[PrefixNode]:
        """Prefix nodes whose next use may have changed since the last call."""
        prefix_nodes, self._moved = self._moved, {}
        return prefix_nodes

    def take_first_materialized(self) -> list[Request]:
        """Requests that were first made for batch lines since the last call."""
        requests, self._first_materialized = self._first_materialized, []
        return requests

    @property
    def ends(self) -> Ends | None:
        return self._ends

    def left(self) -> WorkLeft:
        """Remaining work of the plan's waiting lines, and the remaining reads of the running ones."""
        assert self._ends is not None
        spans = [span for job in self._jobs.values() if (span := job.planned_span) is not None]
        return work_left(self._ends, self._timetable, self._memory_shares, spans)

    @property
    def returned(self) -> Sequence[Request]:
        """Preempted requests, in order of admission."""
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
        """Batches with lines that have not ended, by id."""
        return self._jobs

    def in_turn(self) -> Iterator[Request]:
        """Requests of the lanes, in order. A line becomes a request when the iterator reaches it."""
        look = self.turns.look()
        if self._has_plan and any(job.is_planned for job in self._jobs.values()):
            scan = None
            if self._ends is not None:
                shares = self._memory_shares.copy()
                memory = self.kv_tokens, self.looks_ahead, self._timetable
                scan = self._last_scan = Scan(self._ends, shares, self.target_density, *memory)
            yield from in_planned_turn(self.lanes, look, scan, self._first_materialized)
            return
        waiting: dict[Lane, Iterator[Request]] = {}
        while (lane := look.first) is not None:
            if lane not in waiting:
                waiting[lane] = lane.waiting(self._first_materialized)
            request = next(waiting[lane], None)
            if request is None:
                look.drop(lane)
            else:
                yield request
                look.took(lane, request)

    def heads(self, taken: Collection[Request]) -> Iterator[tuple[int, Request]]:
        """Length bucket and request of the candidates of all lanes; see ``Lane.heads``."""
        for lane in sorted(self._lanes.values(), key=self.turns.key):
            yield from lane.heads(taken, self._first_materialized)

    def __iter__(self) -> Iterator[Request]:
        yield from self._returned
        yield from self.in_turn()

    def _share_of(self, request: Request) -> str:
        return request.share if self._has_shares else ""

    # ---- adding ----

    def add_flex(self, request: Request) -> None:
        share = self._share_of(request)
        lane = self._flex_lanes.get(share)
        if lane is None:
            lane = self._flex_lanes[share] = FlexLane(share)
        if _flex_lane(share) not in self._lanes:
            self._join(_flex_lane(share), lane)
        request.prefix_nodes = (own_node(),)  # After a preemption, its blocks are needed again.
        lane.requests.append(request)
        self._num_in_lanes += 1

    def give_back(self, request: Request) -> None:
        """Puts a preempted request to the front."""
        self._returned.appendleft(request)
        self._came_back(request, 1)

    def add_batch(self, message: AddBatch, now_s: float, max_num_tokens: int) -> list[int]:
        """Adds a job, or more lines of one; returns the lines that can never run: empty, or longer than
        ``max_num_tokens``.

        Lines of a known batch go after its others; in a pool by prefix, they go among those of the same token file.
        They may be in another token file.

        Raises OSError or ValueError, with nothing added, if the token file is missing, unreadable, torn or short.
        """
        if not message.rows:
            return []
        file = self._files.open(message.path) if self._by_prefix else None
        tokens = TokenFile(message.path) if file is None else file.tokens
        # Uses arrays instead of a loop, because the engine's step waits while tens of thousands of lines are added.
        rows, params_index = np.array(message.rows, np.int64), np.array(message.params_index, np.int64)
        if rows.max() >= len(tokens):
            raise ValueError(f"{message.path} has {len(tokens)} lines; line {rows.max()} was requested")
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
            lane.add(RowSource(message, tokens, rows, params_index, now_s))
        elif (known := lane.of_file(message)) is not None:
            known.extend(message, rows, params_index)
        else:
            lane.hold(file)
            lane.add(PrefixRowSource(message, file, rows, params_index, now_s))
        return refused

    def follow(self, order: PlannedOrder) -> None:
        """Replaces the plan: from now on lines are admitted in this order."""
        self._ends, self._last_scan, self._has_plan = order.ends, None, True
        # A timetable needs memory that holds nothing of an earlier plan.
        is_followed = self._ends is not None and self.looks_ahead and self._memory_shares.is_right_idle
        self._timetable = self._ends.timetable() if self._ends is not None and is_followed else None
        planned = dict(order.of_jobs())
        lasting_steps: dict[str, float] = {}
        for batch_id, job in self._jobs.items():  # Jobs that are not in the plan forget the earlier one.
            of_job = planned.get(batch_id, PlannedRows.none())
            job.follow(of_job)
            self._moved.update(dict.fromkeys(job.prefix_nodes))
            if order.ends is not None:
                ranks = job.ranks_of_started(of_job)
                lasting_steps |= {name: float(order.ends.lasting_steps[rank]) for name, rank in ranks.items()}
        self._memory_shares.expect(lasting_steps)
        for request in self._returned:
            self._note_moved(request)

    # ---- admission ----

    def pop(self) -> Request:
        """Removes and returns the first request."""
        if self._returned:
            request = self._returned.popleft()
            self._came_back(request, -1)
            return request
        request = next(self.in_turn())
        self.take(request)
        return request

    def draw(self, count: int) -> None:
        """Moves the first requests to the preempted ones, in their order."""
        for request in reversed([self.pop() for _ in range(count)]):
            self.give_back(request)

    def take(self, request: Request) -> None:
        """Removes a request that is being admitted, at any position."""
        name, taken = self._remove(request.request_id)
        assert taken is request, f"{request.request_id} does not wait in the pool"
        if name is not None:
            self._handed_out(name, request)

    def remove(self, request_id: str) -> Request | None:
        """Removes and returns a waiting flex or preempted request, or a line's request that was made, at any
        position."""
        name, request = self._remove(request_id)
        if name is not None:
            self._leave_if_empty(name)
        return request

    def cancel_batch(self, batch_id: str) -> tuple[list[Request], list[tuple[PrefixNode, int]]]:
        """Drops the job's lines.

        Returns its preempted requests, and the prefix nodes that the dropped lines needed, with the number of lines.
        """
        preempted = [r for r in self._returned if is_row_of(r.request_id, batch_id)]
        for request in preempted:
            self._returned.remove(request)
            self._came_back(request, -1)
        lane = self._jobs.pop(batch_id, None)
        if lane is None:
            return preempted, []
        if batch_id in self._lanes:
            lane.forget_materialized()
            self._num_in_lanes -= len(lane)
            self._leave(batch_id)
        self.turns.forget(lane)
        return preempted, lane.wanted_by_rows_left()

    def ended(self, request: Request) -> None:
        """Notes the end of a request, admitted or not. Its output counts for its tenant."""
        self.turns.ended(request)
        row_id = RowId.parse(request.request_id)
        if row_id is not None:
            if (job := self._jobs.get(row_id.batch_id)) is not None:
                job.row_ended(request, self._now_s)
                self._forget_if_done(row_id.batch_id)
        elif request.admission_index and (lane := self._flex_lanes.get(self._share_of(request))) is not None:
            lane.answered(request.num_output_tokens)
        self._memory_shares.end(request.request_id)

    def check_integrity(self, running: Iterable[Request], cached: Iterable[PrefixNode] = ()) -> None:
        """Raises AssertionError unless the prefix nodes' counts match the waiting and running requests, and batches
        know their lines.

        Args:
            cached: prefix nodes with blocks, including those that no request needs any more.
        """
        wanted, returned = Counter[PrefixNode](), Counter[PrefixNode]()
        assert self._num_in_lanes == sum(map(len, self._lanes.values()))
        for lane in self._lanes.values():
            wanted.update(dict(lane.wanted_by_rows_left()) if isinstance(lane, JobLane) else {})
            assert len(lane), "an empty lane has a turn"
        started = [*running, *self._returned]
        for request in started:
            wanted.update(request.prefix_nodes)
        known_nodes = {*wanted, *cached}
        assert all(prefix_node.num_wanting == wanted[prefix_node] for prefix_node in known_nodes)
        for request in self._returned:
            returned.update(request.prefix_nodes)
        assert all(prefix_node.num_returned == returned[prefix_node] for prefix_node in known_nodes)
        told = [prefix_node for prefix_node in wanted if self._has_plan and prefix_node not in self._moved]
        assert all(prefix_node.next_use == prefix_node.present_use for prefix_node in told)
        assert all(len(job) or job.started for job in self._jobs.values())
        known = {request_id for job in self._jobs.values() for request_id in job.started}
        assert known == {request.request_id for request in started if request.tier is Tier.BATCH}

    def _remove(self, request_id: str) -> tuple[str | None, Request | None]:
        """Removes a request. Returns it with the name of its lane, which is None for a preempted one."""
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
        """Adds (1) or removes (-1) a preempted request, whose blocks are needed before all planned ones."""
        for prefix_node in request.prefix_nodes:
            prefix_node.num_returned += count
        self._note_moved(request)

    def _note_moved(self, request: Request) -> None:
        if self._has_plan:
            self._moved.update(dict.fromkeys(reversed(request.prefix_nodes)))

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
