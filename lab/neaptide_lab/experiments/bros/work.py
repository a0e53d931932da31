"""Work that requests got done in a window, in seconds of the device: what throughput is when prompt tokens, output
tokens and long contexts cost different things."""

from dataclasses import dataclass, field

from neaptide.engine.observer import EngineObserver
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.scheduler.draft import Draft
from neaptide.engine.steps.plan import BatchShape
from neaptide.engine.steps.step import Step
from neaptide.estimator.device_profile import DeviceProfile
from neaptide.simulation.bound import UnitCosts
from neaptide.simulation.measures import Window
from neaptide.simulation.replica import ONLINE_PREFIX


@dataclass(slots=True, frozen=True)
class WindowWork:
    """What was done per second of a window, tokens that were computed again left out."""

    online_tokens_per_s: float
    """Prompt tokens and output tokens."""
    online: float
    """Seconds of the device that they cost; see ``WorkTally``."""
    offline: float

    @property
    def total(self) -> float:
        return self.online + self.offline


@dataclass(slots=True)
class _Progress:
    prompt_tokens: int
    reached_tokens: int = 0


@dataclass(slots=True)
class WorkTally(EngineObserver):
    """Adds up the work of steps that are planned in the window.

    A token's work is what the profile's roofline charges for it apart from what a step shares: matrix products,
    attention to what stands before it, its row of the output projection, its part of the links. It depends on the
    request alone, not on chunks, batches or drops, so the sum says who got more done.
    """

    window_s: Window
    online: BatchShape = field(default_factory=BatchShape)
    offline: BatchShape = field(default_factory=BatchShape)
    _progress: dict[str, _Progress] = field(default_factory=dict)

    def planned(self, step: Step, draft: Draft, scheduler: Scheduler) -> None:
        plan, progress = step.plan, self._progress
        for request_id in plan.finished_ids:
            progress.pop(request_id, None)
        for new in plan.new_requests:
            progress.setdefault(new.request_id, _Progress(len(new.prompt_token_ids)))
        is_inside = self.window_s[0] <= draft.now_s <= self.window_s[1]
        ends = (plan.num_computed + plan.num_tokens).tolist()
        for request_id, end in zip(plan.request_ids, ends, strict=True):
            one = progress[request_id]
            if end > one.reached_tokens:
                if is_inside:
                    shape = self.online if request_id.startswith(ONLINE_PREFIX) else self.offline
                    _add(shape, one.prompt_tokens, one.reached_tokens, end)
                one.reached_tokens = end

    def work(self, profile: DeviceProfile) -> WindowWork:
        costs = UnitCosts.of(profile)
        online_s, offline_s = (costs.work(shape).lines_s(1.0)[0] for shape in (self.online, self.offline))
        online_tokens = self.online.num_tokens + self.online.prefill_requests
        length_s = self.window_s[1] - self.window_s[0]
        return WindowWork(online_tokens / length_s, online_s / length_s, offline_s / length_s)


def _add(shape: BatchShape, prompt_tokens: int, start: int, end: int) -> None:
    """Tokens ``start`` to ``end`` of a request; the last one of its prompt brings its first output token."""
    if start < prompt_tokens:
        last = min(end, prompt_tokens)
        shape.prefill_tokens += last - start
        shape.prefill_attention_pairs += (last * (last + 1) - start * (start + 1)) // 2
        shape.prefill_requests += last == prompt_tokens
    first = max(start, prompt_tokens)
    if end > first:
        shape.add_decodes(end - first, (end * (end + 1) - first * (first + 1)) // 2, end)
