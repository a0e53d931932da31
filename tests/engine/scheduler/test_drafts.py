"""Drafts of every policy, on random histories: pure, repeatable, done as said, and harmless where they fail."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neaptide.engine.kv.draft import KVDraft
from neaptide.engine.offline.pool_draft import PoolDraft
from neaptide.engine.params import INTERNAL_ERROR, RequestClass
from neaptide.engine.request import Request
from neaptide.engine.scheduler.actions import Admit
from neaptide.engine.scheduler.base import PlanningError
from neaptide.engine.scheduler.budget import StepBudget
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.policies import POLICIES
from neaptide.engine.steps.step import Step
from neaptide.engine.steps.timer import StepTimer
from tests.engine.device import text_of
from tests.engine.harness import Harness, batch, online
from tests.engine.histories import SMALL_POOL, History
from tests.engine.snapshot import all_requests, cache_state, described, frozen, queue_state, request_state, state

DEPTHS = (0, 1)


def admissions(draft: Draft) -> list[Admit]:
    return [action for action in draft.actions if isinstance(action, Admit)]


def watched(harness: Harness, on_draft: Callable[[Draft], None], on_step: Callable[[Draft, Step | None], None]) -> None:
    """Calls back with every draft before it is applied, and with the step that came of it."""
    scheduler = harness.core.scheduler
    apply = scheduler.apply

    def watched_apply(draft: Draft, timer: StepTimer) -> Step | None:
        on_draft(draft)
        step = apply(draft, timer)
        on_step(draft, step)
        return step

    scheduler.apply = watched_apply  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_making_a_draft_changes_nothing_and_the_same_state_gives_the_same_draft(
    policy: str, depth: int, tmp_path: Path
) -> None:
    harness = Harness(policy=policy, overlap_depth=depth, **SMALL_POOL)
    scheduler = harness.core.scheduler
    make, num_actions = scheduler.draft, 0

    def checked(now_s: float) -> Draft:
        nonlocal num_actions
        if scheduler.index % 3:
            return make(now_s)
        before = state(harness.core)
        first = make(now_s)
        said = described(first)
        assert state(harness.core) == before
        second = make(now_s)
        assert described(second) == said
        assert state(harness.core) == before
        num_actions += len(second.actions)
        return second

    scheduler.draft = checked  # type: ignore[method-assign]
    History(3, tmp_path).play(harness, 40)
    assert num_actions > 10


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_apply_does_what_the_draft_said(policy: str, depth: int, tmp_path: Path) -> None:
    harness = Harness(policy=policy, overlap_depth=depth, **SMALL_POOL)
    core = harness.core
    queues, kv = core.scheduler.queues, core.kv
    said: dict[str, Any] = {}
    num_admissions = num_victims = 0

    def on_draft(draft: Draft) -> None:
        said.clear()
        said.update(expectation(draft))

    def on_step(draft: Draft, step: Step | None) -> None:
        nonlocal num_admissions, num_victims
        assert (step is None) == (not said["parts"])
        if step is not None:
            plan = step.plan
            assert list(zip(plan.request_ids, plan.num_tokens.tolist(), strict=True)) == said["parts"]
            assert plan.shape == draft.budget.shape
            starts = dict(zip(plan.request_ids, plan.num_computed.tolist(), strict=True))
            for request_id, cached_tokens, block_ids in said["admissions"]:
                request = queues.find(request_id)
                assert request is not None
                assert starts[request_id] == cached_tokens
                assert request.block_ids[: len(block_ids)] == block_ids
            assert step.preempted.request_ids[-len(said["victims"]) :] == said["victims"] or not said["victims"]
        occupancy = kv.occupancy()
        assert kv.available == said["available"]
        assert (occupancy.online, occupancy.offline) == (said["online blocks"], said["offline blocks"])
        assert list(kv._pool.ref_counts) == said["readers"]
        assert (queues.num_running, len(queues.running_offline)) == said["running"]
        assert [r.request_id for r in queues.waiting_online] == said["waiting"]
        assert len(queues.pool) == said["pooled"]
        if not said["passed by"]:
            assert next((r.request_id for r in queues.pool), None) == said["first pooled"]
        for request, block_ids in said["tables"]:
            assert request.block_ids == block_ids
        num_admissions += len(said["admissions"])
        num_victims += len(said["victims"])

    watched(harness, on_draft, on_step)
    History(3, tmp_path).play(harness, 40)
    assert num_admissions > 10
    assert num_victims > 0 or policy == "lpm"  # it reserves so much that it seldom preempts


def expectation(draft: Draft) -> dict[str, Any]:
    """What the draft says the step will be, and what it leaves."""
    head = draft.pool.peek()
    return {
        "parts": [(request.request_id, num_tokens) for request, num_tokens in draft.parts()],
        "admissions": [
            (a.request.request_id, a.hit.num_tokens, list(a.hit.block_ids))
            for a in (action for action in draft.actions if isinstance(action, Admit))
        ],
        "victims": list(draft.preempted.request_ids),
        "available": draft.kv.available,
        "online blocks": draft.kv.pool.num_online,
        "offline blocks": draft.kv.pool.num_offline,
        "readers": [draft.kv.pool.ref_cnt(block) for block in range(draft.kv.pool.num_blocks)],
        "running": (draft.num_running, draft.num_running_offline),
        "waiting": [request.request_id for request in draft.waiting_online],
        "pooled": len(draft.pool),
        "passed by": bool(draft.notes),
        "first pooled": None if head is None else head.request_id,
        "tables": [
            (action.request, draft.kv.blocks_of(action.request))
            for action in (action for action in draft.actions if isinstance(action, Admit))
        ],
    }


# ---- planning that fails ----

OWNERS = (Draft, KVDraft, PoolDraft, StepBudget)
METHODS = [
    (owner, name)
    for owner in OWNERS
    for name, value in vars(owner).items()
    if callable(value) and not name.startswith("_") and not isinstance(value, type)
]


class Failing:
    """Methods of a draft that the policy has called before raise at their k-th call, once it has been armed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._armed: tuple[type, str] | None = None
        self._calls_left = 0
        self._called: dict[tuple[type, str], None] = {}
        for owner, name in METHODS:
            monkeypatch.setattr(owner, name, self._guarded(owner, name))

    def arm(self, rng: random.Random) -> None:
        self._armed = rng.choice(list(self._called) or METHODS)
        self._calls_left = rng.choice([1, 1, 2, 3, 5, 8])

    @property
    def is_armed(self) -> bool:
        return self._armed is not None

    def disarm(self) -> None:
        self._armed = None

    def _guarded(self, owner: type, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._called[owner, name] = None
            if self._armed == (owner, name):
                self._calls_left -= 1
                if self._calls_left == 0:
                    self.disarm()
                    raise RuntimeError("poisoned")
            return original(*args, **kwargs)

        return call


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_anywhere_in_planning_leaves_every_other_request_as_it_was(
    policy: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(policy=policy, overlap_depth=depth, **SMALL_POOL)
    history = History(4, tmp_path, interrupts=False)
    rng = random.Random(policy)
    failing = Failing(monkeypatch)
    core, make = harness.core, harness.core.scheduler.draft
    blamed: set[str] = set()

    def checked(now_s: float) -> Draft:
        if not failing.is_armed:
            return make(now_s)
        before = state(core)
        try:
            return make(now_s)
        except PlanningError as error:
            blamed.add(error.request.request_id)
            raise
        finally:
            failing.disarm()
            assert state(core) == before

    core.scheduler.draft = checked  # type: ignore[method-assign]
    for index in range(90):
        history.turn(harness)
        if index % 3 == 2:
            failing.arm(rng)
        try:
            harness.step()
        except RuntimeError:  # no request was being looked at
            core.check_integrity()
    harness.run()
    assert len(blamed) > 0
    for request_id, prompt in history.prompts.items():
        (end,) = harness.ends[request_id]
        assert (end.error == INTERNAL_ERROR) == (request_id in blamed)
        tokens = harness.tokens[request_id]
        assert tokens == text_of(prompt, len(tokens))


@pytest.mark.parametrize("policy", POLICIES)
def test_only_the_request_that_planning_failed_at_ends(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(policy=policy, **SMALL_POOL)
    history = History(5, tmp_path, interrupts=False)
    rng = random.Random(policy)
    failing = Failing(monkeypatch)
    core, make = harness.core, harness.core.scheduler.draft
    num_compared = 0

    def planned(now_s: float) -> Draft:
        try:
            return make(now_s)
        finally:
            failing.disarm()  # what comes then only reads the draft

    core.scheduler.draft = planned  # type: ignore[method-assign]
    for _ in range(40):
        history.turn(harness)
        before = {request.request_id: request_state(request, with_nodes=False) for request in all_requests(core)}
        queues, cache, num_ends = queue_state(core), cache_state(core), len(harness.ends)
        waiting = {request.request_id for request in core.scheduler.queues.waiting_online}
        failing.arm(rng)
        try:
            has_failed = harness.step() == {} and len(harness.ends) > num_ends
        except RuntimeError:
            assert queue_state(core) == queues
            assert cache_state(core) == cache
            continue
        if not has_failed:
            continue
        (gone,) = list(harness.ends)[num_ends:]
        after = {request.request_id: request_state(request, with_nodes=False) for request in all_requests(core)}
        before.pop(gone, None)
        assert after == before
        if gone in waiting:
            assert cache_state(core) == cache
        num_compared += 1
    assert num_compared > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_between_requests_passes_and_nothing_has_changed(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(policy=policy)
    core = harness.core
    harness.core.handle(online("a", [7] * 8))
    harness.step()
    pack = core.scheduler.pack

    def failing_pack(draft: Draft) -> float:
        draft.preempt(draft.running(RequestClass.ONLINE)[0])
        pack(draft)
        draft.at = None
        raise RuntimeError("poisoned")

    core.scheduler.pack = failing_pack  # type: ignore[method-assign]
    before = queue_state(core), cache_state(core), frozen(core.scheduler.preempted)
    with pytest.raises(RuntimeError, match="poisoned"):
        core.step()
    assert (queue_state(core), cache_state(core), frozen(core.scheduler.preempted)) == before
    core.scheduler.pack = pack  # type: ignore[method-assign]
    harness.run()
    assert harness.tokens["a"] == text_of([7] * 8, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_row_that_planning_fails_at_ends_once_wherever_it_stands(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows before it are admitted in the same draft, and so are not when it fails."""
    harness = Harness(policy=policy)
    admit = Draft.admit

    def poisoned(draft: Draft, request: Request, *rest: Any) -> None:
        if request.request_id == "job:2":
            raise RuntimeError("poisoned")
        admit(draft, request, *rest)

    monkeypatch.setattr(Draft, "admit", poisoned)
    prompts = [[7 + row] * 8 for row in range(4)]
    harness.core.handle(batch(tmp_path, "job", prompts))
    harness.run()
    assert {name: [end.error for end in ends] for name, ends in harness.ends.items()} == {
        "job:0": [None],
        "job:1": [None],
        "job:2": [INTERNAL_ERROR],
        "job:3": [None],
    }
