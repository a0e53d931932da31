"""Explains one step's content and the reasons for what is not in it, and what limited the steps of a run."""

from collections import Counter, defaultdict
from operator import itemgetter

from neaptide.engine.observer import EngineObserver
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.scheduler.judged import Candidate
from neaptide.engine.steps.plan import ScheduledRequest, StepPlan
from neaptide.engine.steps.step import Step

LISTED = 12
"""Most requests of one kind that are listed; the others are counted."""


class Explainer(EngineObserver):
    """Keeps the explanation of one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.text: str | None = None
        """None until the step has been planned."""

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        if step.plan.step == self._step:
            self.text = "\n".join(_lines(step, scheduler))


class StepLimits(EngineObserver):
    """Counts what ended offline work in a window's steps, by their predicted time."""

    def __init__(self, window_s: tuple[float, float]) -> None:
        self._window_s = window_s
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By limit."""

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        first_s, last_s = self._window_s
        if first_s <= draft.now_s < last_s and draft.offline_ended_by is not None:
            self.seconds[draft.offline_ended_by] += step.plan.predicted_s

    def __str__(self) -> str:
        whole_s = sum(self.seconds.values())
        most_first = sorted(self.seconds.items(), key=itemgetter(1), reverse=True)
        return ", ".join(f"{what} {seconds / whole_s:.0%}" for what, seconds in most_first)


def _lines(step: Step, scheduler: Scheduler) -> list[str]:
    plan, now_s, queues = step.plan, step.draft.now_s, scheduler.queues
    blocks, shape = scheduler.kv.occupancy(), plan.shape
    budget = f"budget {1e3 * plan.budget_s:.2f} ms" if plan.budget_s else "no time budget"
    lines = [
        f"step {plan.step} at {now_s:.4f} s: predicted {1e3 * plan.predicted_s:.2f} ms + margin "
        f"{1e3 * plan.margin_s:.2f} ms, {budget}",
        *_limit_lines(step.draft),
        f"  {shape.num_tokens} of {scheduler.max_step_tokens} tokens: {shape.prefill_requests} prompts with "
        f"{shape.prefill_tokens} tokens, {shape.decode_requests} decodes reading {shape.decode_context_tokens} tokens",
        f"  KV blocks: {blocks.online} online, {blocks.offline} offline, {blocks.cached} cached, "
        f"{blocks.free} free; headroom {scheduler.headroom.headroom_blocks(now_s)} for online work",
    ]
    for name, running in (("online", queues.running_online), ("offline", queues.running_offline)):
        lines += _class_lines(name, plan, running, scheduler)
    lines.append(f"  waiting: {len(queues.waiting_online)} online, {len(queues.pool)} offline")
    return lines


def _limit_lines(draft: Draft) -> list[str]:
    """The limits that the policy noted."""
    lines = []
    for kind, what in (("prompts", "online prompts"), ("offline", "offline work")):
        found = [candidate for candidate in draft.candidates if candidate.kind == kind]
        if found:
            lines.append(f"  step lengths compared for {what}:")
            chosen = {id(candidate) for candidate in draft.chosen}
            lines += [_candidate_text(candidate, id(candidate) in chosen) for candidate in found]
    if draft.offline_ended_by is not None:
        lines.append(f"  offline work ended by: {draft.offline_ended_by}")
    if draft.kept_blocks:
        kept = [f"{num_blocks} for {request_id}" for request_id, num_blocks in draft.kept_blocks.items()]
        lines.append(f"  KV blocks reserved: {', '.join(kept)}")
    return lines


def _candidate_text(candidate: Candidate, is_chosen: bool) -> str:
    value = "" if candidate.value is None else f", {candidate.value:.3f} s of offline work a second"
    reason = "fewest late, then longest" if candidate.value is None else "most for its time, or nearly"
    chosen = f" <- chosen: {reason}" if is_chosen else ""
    return f"    {1e3 * candidate.length_s:.2f} ms: {candidate.num_late:.3f} requests late{value}{chosen}"


def _class_lines(name: str, plan: StepPlan, running: dict[str, Request], scheduler: Scheduler) -> list[str]:
    parts = [part for part in plan.scheduled if part.request_id in running]
    lines = [f"  {name}: {len(parts)} scheduled"]
    lines += [f"    {_part_text(part)}" for part in parts[:LISTED]]
    if len(parts) > LISTED:
        lines.append(f"    and {len(parts) - LISTED} more")
    taken = {part.request_id for part in parts}
    out = [request for request in running.values() if request.request_id not in taken]
    if out:
        reasons = Counter(_reason(request, plan, scheduler) for request in out)
        lines.append(f"  {name}: {len(out)} not scheduled, keeping their KV:")
        lines += [f"    {count} x {reason}" for reason, count in reasons.most_common()]
        lines.append("    " + ", ".join(request.request_id for request in out[:LISTED]))
    return lines


def _part_text(part: ScheduledRequest) -> str:
    num_tokens = len(part.token_ids)
    tokens = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    return f"{part.request_id}: {tokens} on {part.num_computed_tokens}" + (", samples" if part.sample else "")


def _reason(request: Request, plan: StepPlan, scheduler: Scheduler) -> str:
    """The first limit that one more token of the request would break. It is found afterwards, not reported by the
    policy."""
    if plan.shape.num_tokens >= scheduler.max_step_tokens:
        return "the step's tokens are used up"
    seconds, margin_s = scheduler.cost_model.predict(plan.shape.plus(1, request.num_computed_tokens))
    if plan.budget_s and seconds + margin_s > plan.budget_s:
        return "one more token would exceed the time budget"
    if scheduler.kv.draft().blocks_needed(request, 1) > scheduler.kv.available:
        return "no KV block is left"
    return "the policy chose others, or reserved blocks"
