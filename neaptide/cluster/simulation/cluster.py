"""Several engine cores on one virtual clock, behind a router, with one pool of offline rows or a part of it each.

Every replica has its own clock, and the one furthest behind takes its turn, so that nothing depends on a later event
elsewhere. When all clocks have reached an event, it happens: a request is routed, a replica is lost or started, a size
is decided. Only reports made before that time count. A lost replica dies at the end of its step.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from neaptide.cluster.autoscaling import Autoscaler, Serving, change_to
from neaptide.cluster.routing import Prompt, build_router
from neaptide.cluster.simulation.fleet import SimulatedFleet, parted
from neaptide.cluster.simulation.member import Member, MemberState
from neaptide.cluster.simulation.result import ClusterResult, ClusterRun, ReplicaResult, RowsResult
from neaptide.cluster.simulation.shared_rows import LeasedRows, SharedRows
from neaptide.engine.kv.prefix_index import extend_block_hashes
from neaptide.executors.simulated.trace_executor import PROMPT_VOCABULARY
from neaptide.loadgen.workloads.offline_sets import OfflineSet
from neaptide.loadgen.workloads.traces import TraceRequest, token_ids
from neaptide.simulation import result as sim_result
from neaptide.simulation.bound import Devices
from neaptide.simulation.measures import Measures, Window
from neaptide.simulation.offline_feed import OfflineFeed
from neaptide.simulation.replica import ONLINE_PREFIX, SimulatedReplica
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import (
    LOW_WATER_SEATS,
    OnProgress,
    Run,
    RunEnds,
    dry_from_s,
    fitting_online,
    longest_wait_s,
    measured_window_s,
    num_cut,
    offline_feed,
    reduced,
)

PROGRESS_TURNS = 500


def simulate_cluster(scenario: Scenario, fleet: SimulatedFleet, *, on_progress: OnProgress | None = None) -> ClusterRun:
    """Simulates several replicas. The window, the end and every figure are defined as in ``simulate``.

    Raises:
        ValueError: there is nothing to simulate, no online request fits, or offline sets cannot be shared.
        SimulationError: the policy makes no progress.
        OSError: a token file cannot be written.
    """
    if not scenario.online and not scenario.offline:
        raise ValueError("neither online nor offline work to simulate: add some with --online or --offline")
    with TemporaryDirectory(prefix="neaptide-cluster-") as directory:
        return _Cluster(scenario, fleet, Path(directory), on_progress).run()


class _Cluster:
    def __init__(
        self, scenario: Scenario, fleet: SimulatedFleet, directory: Path, on_progress: OnProgress | None
    ) -> None:
        self._started_s = time.perf_counter()
        self._scenario, self._fleet, self._directory = scenario, fleet, directory
        self._on_progress, self._num_turns = on_progress, 0
        self._online = fitting_online(scenario)
        self._next_online = 0
        self._unrouted: deque[tuple[str, TraceRequest]] = deque()
        """Online requests that arrived while no replica took any."""
        self._router = build_router(fleet.router, scenario.seed)
        self._shared: SharedRows | None = None
        self._parts: list[list[OfflineSet]] = []
        if fleet.placement == "claims":
            self._shared = SharedRows(scenario, fleet.replicas * LOW_WATER_SEATS * scenario.max_num_seqs)
        else:
            self._parts = parted(scenario.offline, scenario.profile, fleet.replicas)
        self._autoscaler = Autoscaler(fleet.scale) if fleet.scale is not None else None
        self._next_decision_s = fleet.decide_s if fleet.scale is not None else math.inf
        self._losses = deque(sorted(fleet.lost_at_s))
        self._leases: deque[tuple[float, Member]] = deque()
        """Lost replicas, and the times when their leased rows become free."""
        self._sizes: list[tuple[float, int]] = []
        self._members: list[Member] = []
        for _ in range(fleet.replicas):
            self._start(0.0, 0.0)

    def run(self) -> ClusterRun:
        while not self._is_over():
            event_s = self._next_event_s()
            member = min((m for m in self._running() if not m.is_parked), key=lambda m: m.replica.now_s, default=None)
            if member is not None and member.replica.now_s < event_s:
                self._turn(member, event_s)
            elif event_s < math.inf:
                self._happen(event_s)
            else:
                break
        return self._reduced()

    # ---- replicas ----

    def _running(self) -> Iterator[Member]:
        return (member for member in self._members if member.runs)

    def _serving(self) -> list[Member]:
        return [member for member in self._members if member.state is MemberState.SERVING]

    def _start(self, begins_s: float, ready_s: float) -> None:
        number = len(self._members)
        scenario = replace(self._scenario, seed=self._scenario.seed + number)
        directory = self._directory / str(number)
        directory.mkdir()
        rows: OfflineFeed | LeasedRows
        if self._shared is not None:
            rows = LeasedRows(self._shared, scenario, directory)
        else:
            scenario = replace(scenario, offline=self._parts[number])
            rows = offline_feed(scenario, directory)
        dry_s = max(dry_from_s(self._scenario, self._online), ready_s)
        member = Member(f"replica-{number}", SimulatedReplica(scenario, rows, (), dry_s, ready_s), rows, begins_s)
        member.report_if_due()
        self._members.append(member)
        self._note_size(begins_s)

    def _note_size(self, now_s: float) -> None:
        size = sum(
            member.state in (MemberState.STARTING, MemberState.SERVING, MemberState.DRAINING)
            for member in self._members
        )
        if self._sizes and self._sizes[-1][0] == now_s:
            self._sizes.pop()
        self._sizes.append((now_s, size))

    def _turn(self, member: Member, until_s: float) -> None:
        replica = member.replica
        member.is_parked = not replica.turn(until_s)
        member.report_if_due()
        if member.state is MemberState.DRAINING and not replica.has_online and not replica.core.has_work:
            member.state, member.ended_s = MemberState.STOPPED, replica.now_s
            self._note_size(replica.now_s)
        self._num_turns += 1
        if self._on_progress is not None and self._num_turns % PROGRESS_TURNS == 0:
            done, total = self._progress()
            self._on_progress(min(done, total), total)

    def _progress(self) -> tuple[float, float]:
        if self._online:
            return self._now_s, self._online[-1].arrival_s
        if self._shared is not None:
            return self._shared.num_done, self._shared.first_generation_size
        feeds = self._feeds()
        return sum(feed.num_ended for feed in feeds), sum(feed.first_generation_size for feed in feeds)

    def _lose(self, now_s: float) -> None:
        """Loses the replica that has served longest. A fleet of fixed size starts another one."""
        serving = self._serving()
        if not serving:
            return
        lost = serving[0]
        lost.state, lost.ended_s = MemberState.LOST, now_s
        assert isinstance(lost.rows, LeasedRows)
        lost.rows.close()
        lost.replica.lose()
        self._router.leave(lost.name)
        lost.num_failed_online = sum(not record.is_done for record in lost.replica.measures.online.values())
        self._unrouted.extend(lost.replica.take_inbox())
        self._leases.append((now_s + self._fleet.lease_s, lost))
        self._note_size(now_s)
        if self._autoscaler is None:
            self._start(now_s, now_s + self._fleet.start_up_s)

    def _drain(self, member: Member, now_s: float) -> None:
        """Drains a replica: it finishes the rows that it has started, and returns the others."""
        assert isinstance(member.rows, LeasedRows)
        member.state = MemberState.DRAINING
        self._router.leave(member.name)
        member.rows.close()
        member.rows.give_back(member.replica.withdraw_unstarted())

    def _decide(self, now_s: float) -> None:
        assert self._autoscaler is not None
        assert self._shared is not None
        serving = self._serving()
        starting = [member for member in self._members if member.state is MemberState.STARTING]
        loads = [member.online_load for member in serving]
        desired = self._autoscaler.desired(now_s, loads, self._shared.backlog())
        named = {member.name: member for member in serving}
        known = [Serving(member.name, member.online_load, member.ready_s) for member in serving]
        num_to_start, to_drain = change_to(desired, known, len(starting))
        for _ in range(num_to_start):
            self._start(now_s, now_s + self._fleet.start_up_s)
        for name in to_drain:
            self._drain(named[name], now_s)

    # ---- events ----

    @property
    def _next_arrival_s(self) -> float:
        return self._online[self._next_online].arrival_s if self._next_online < len(self._online) else math.inf

    def _next_event_s(self) -> float:
        ready_s = [member.ready_s for member in self._members if member.state is MemberState.STARTING]
        return min(
            self._next_arrival_s,
            self._shared.next_arrival_s if self._shared is not None else math.inf,
            self._losses[0] if self._losses else math.inf,
            self._leases[0][0] if self._leases else math.inf,
            self._next_decision_s,
            *ready_s,
        )

    def _happen(self, now_s: float) -> None:
        for member in self._members:
            member.is_parked = False
            if member.state is MemberState.STARTING and member.ready_s <= now_s:
                member.state = MemberState.SERVING
        while self._losses and self._losses[0] <= now_s:
            self._lose(self._losses.popleft())
        while self._leases and self._leases[0][0] <= now_s:
            lost = self._leases.popleft()[1]
            assert isinstance(lost.rows, LeasedRows)
            lost.rows.give_back_all(lost.replica.reached_tokens)
        if self._shared is not None:
            self._shared.arrive(now_s)
        if self._next_decision_s <= now_s:
            self._next_decision_s += self._fleet.decide_s
            self._decide(now_s)
        while self._next_arrival_s <= now_s:
            self._unrouted.append((f"{ONLINE_PREFIX}{self._next_online}", self._online[self._next_online]))
            self._next_online += 1
        self._route(now_s)

    def _route(self, now_s: float) -> None:
        serving = {member.name: member for member in self._serving()}
        for name, member in serving.items():
            for figures in member.reports_until(now_s):
                self._router.report(name, figures)
            for _ in range(member.ends_until(now_s)):
                self._router.ended(name)
        while self._unrouted and serving:
            request_id, request = self._unrouted.popleft()
            serving[self._router.route(self._prompt(request))].replica.send(request_id, request)

    def _prompt(self, request: TraceRequest) -> Prompt:
        hashes: list[bytes] = []
        if self._router.reads_prompts and len(self._members) > 1:
            tokens = token_ids(request.segments, PROMPT_VOCABULARY)
            extend_block_hashes(hashes, tokens, self._scenario.block_size, b"")
        return Prompt.of(request.input_tokens, hashes, self._scenario.block_size)

    # ---- the end ----

    @property
    def _now_s(self) -> float:
        """The time that all replicas have reached."""
        return min((member.replica.now_s for member in self._running()), default=self._next_event_s())

    def _feeds(self) -> list[OfflineFeed]:
        return [member.rows for member in self._members if isinstance(member.rows, OfflineFeed)]

    def _is_over(self) -> bool:
        given_s, now_s = self._scenario.window_s, self._now_s
        if given_s is not None and now_s < given_s[1]:
            return False
        if not self._online:
            return self._first_generation_done() or given_s is not None
        if self._next_online < len(self._online) or self._unrouted:
            return False
        has_online = any(member.replica.has_online for member in self._running())
        return not has_online or now_s > self._online[-1].arrival_s + self._scenario.drain_s

    def _first_generation_done(self) -> bool:
        if self._shared is not None:
            size = self._shared.first_generation_size
            return self._shared.first_generation_done or self._shared.num_done >= 2 * size
        return all(
            feed.first_generation_done or feed.num_ended >= 2 * feed.first_generation_size for feed in self._feeds()
        )

    def _reduced(self) -> ClusterRun:
        scenario, members, shared = self._scenario, self._members, self._shared
        end_s = max(member.replica.now_s for member in members)
        self._count_unserved()
        made_s = [m.replica.makespan_s for m in members if m.replica.makespan_s is not None]
        makespan_s = (min if shared is not None else max)(made_s, default=None)
        if shared is None and len(made_s) < len(members):
            makespan_s = None
        window_s = measured_window_s(scenario, self._online, makespan_s or end_s)
        dry_s = min((m.replica.dry_s for m in members if m.replica.dry_s is not None), default=None)
        dry_s = dry_s if dry_s is not None and dry_s <= window_s[1] else None
        waits_s = [wait_s for m in members if (wait_s := longest_wait_s(m.replica, end_s)) is not None]
        if shared is not None and scenario.offline:
            waits_s.append(shared.longest_wait_s(end_s))
        misses = sum(member.replica.ledger.misses(end_s) for member in members)
        ends = RunEnds(
            end_s=end_s,
            makespan_s=makespan_s,
            longest_wait_s=max(waits_s, default=None),
            deadline_misses=misses if shared is None else shared.misses(end_s),
            is_valid=dry_s is None,
        )
        measures = Measures.merged([member.replica.measures for member in members], scenario.tpot_slo_s)
        plan_s = array("d", [seconds for member in members for seconds in member.replica.plan_s])
        wall_s = time.perf_counter() - self._started_s
        whole = reduced(scenario, measures, window_s, ends, plan_s, wall_s, self._devices(window_s))
        result = self._with_replicas(whole, window_s, end_s)
        feeds = self._feeds()
        left_out = len(scenario.online) - len(self._online) + sum(feed.num_left_out for feed in feeds)
        cut = num_cut(scenario, self._online) + sum(feed.num_cut for feed in feeds)
        if shared is not None:
            left_out, cut = left_out + shared.num_left_out, cut + shared.num_cut
        unfinished = sum(not record.is_done for record in measures.online.values())
        failed = sum(member.replica.num_failed for member in members)
        return ClusterRun(result, Run(result, measures, window_s, left_out, cut, unfinished, failed, dry_s))

    def _devices(self, window_s: Window) -> Devices:
        """The number of replicas that served on average. A step that ran when its replica was lost counts too."""
        spans_s = [
            (m.ready_s, math.inf if m.ended_s is None else max(m.ended_s, m.replica.now_s)) for m in self._members
        ]
        inside_s = [min(to_s, window_s[1]) - max(from_s, window_s[0]) for from_s, to_s in spans_s]
        length_s = window_s[1] - window_s[0]
        served_s = sum(seconds for seconds in inside_s if seconds > 0.0)
        caches = sum(seconds >= 0.0 for seconds in inside_s)
        return Devices(served_s / length_s if length_s > 0.0 else 0.0, caches)

    def _count_unserved(self) -> None:
        """Counts requests that were never handed to an engine as arrived."""
        measures = self._members[0].replica.measures
        waiting: Sequence[tuple[str, TraceRequest]] = [
            *self._unrouted,
            *(one for member in self._members for one in member.replica.take_inbox()),
        ]
        for request_id, request in waiting:
            measures.arrived(request_id, request.arrival_s)

    def _with_replicas(self, whole: sim_result.SimResult, window_s: Window, end_s: float) -> ClusterResult:
        members, shared, feeds = self._members, self._shared, self._feeds()
        rows = RowsResult(
            done=shared.num_done if shared is not None else sum(feed.num_ended for feed in feeds),
            open=shared.num_open if shared is not None else sum(f.num_submitted - f.num_ended for f in feeds),
            given_back=shared.num_given_back if shared is not None else 0,
        )
        stops_s = [end_s if member.ended_s is None else member.ended_s for member in members]
        lasted_s = sum(max(stop_s - m.begins_s, 0.0) for m, stop_s in zip(members, stops_s, strict=True))
        return ClusterResult(
            **{name: getattr(whole, name) for name in whole.__struct_fields__},
            placement=self._fleet.placement,
            router=self._fleet.router,
            replica_hours=lasted_s / 3600.0,
            failed_online=sum(member.num_failed_online for member in members),
            rows=rows,
            replicas=[self._of_member(member, window_s, end_s) for member in members],
            sizes=self._sizes,
        )

    def _of_member(self, member: Member, window_s: Window, end_s: float) -> ReplicaResult:
        scenario, replica = self._scenario, member.replica
        measures, misses = replica.measures, replica.ledger.misses(end_s)
        slos_s = (scenario.ttft_slo_s, scenario.tpot_slo_s)
        no_bounds: dict[str, float | None] = {"long_run": None, "window": None}
        waited_s = longest_wait_s(replica, end_s)
        return ReplicaResult(
            name=member.name,
            state=member.state.value,
            begins_s=member.begins_s,
            ready_s=member.ready_s,
            ended_s=member.ended_s,
            steps=measures.num_steps,
            online=sim_result.online_result(measures, window_s, end_s, slos_s),
            offline=sim_result.offline_result(measures, window_s, replica.makespan_s, waited_s, misses, no_bounds),
            kv=sim_result.kv_result(measures, window_s, None),
        )
