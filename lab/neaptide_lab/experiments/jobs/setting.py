"""Batch jobs of several API keys together with chats: the common part of the experiments on shares and deadlines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from neaptide.engine.observer import EngineObserver
from neaptide.engine.params import FinishReason
from neaptide.engine.request import Request
from neaptide.engine.scheduler.base import Scheduler
from neaptide.engine.steps.plan import StepResult
from neaptide.engine.steps.step import Step
from neaptide.loadgen.workloads.offline_sets import OfflineSet, load_offline
from neaptide.simulation.scenario import Scenario
from neaptide_lab.experiments.rivals.loads import CONV, PROFILE, STEP_NOISE, scenario_of

ROWS = "bros-be"
"""Prompts of 512 to 1,024 tokens and answers of 32 to 128: rows that come and go soon, so that a share is not a few
long answers."""
WARM_UP_S = 10.0


def job(number: int, rows: int, **fields: object) -> OfflineSet:
    """Rows that no job of another number has."""
    drawn = load_offline(ROWS, seed=number, limit=rows)
    return replace(drawn.refill(number), batch_size=None, **fields)  # type: ignore[arg-type]


def scenario_beside_chats(
    jobs: Sequence[OfflineSet], window_s: float, share_weights: Mapping[str, float] = MappingProxyType({})
) -> Scenario:
    """A scenario with chats for this long, after ``WARM_UP_S`` of offline work alone."""
    load = replace(CONV, window_s=(600.0, 600.0 + window_s * CONV.speed), warm_up_s=WARM_UP_S)
    return replace(scenario_of(load), offline=jobs, share_weights=share_weights, refill=False, with_bounds=False)


def conditions(window_s: float) -> str:
    """For the notes."""
    chats = f"{CONV.trace} at {CONV.speed:g} times its speed for {window_s:.0f} s"
    return f"Rows of {ROWS} beside {chats}; {PROFILE}, steps with {STEP_NOISE:.0%} noise."


@dataclass(slots=True)
class JobEnds:
    """What has ended of a job."""

    num_rows: int = 0
    num_tokens: int = 0
    last_end_s: float = 0.0


@dataclass(slots=True)
class JobWatch(EngineObserver):
    """When rows ended, and how many tokens they had."""

    _rows: list[tuple[float, str, str, int]] = field(default_factory=list)
    """Time, job, share, tokens of prompt and answer."""
    _ended: list[Request] = field(default_factory=list)
    """In the step that is being committed."""

    def ended(self, request: Request, reason: FinishReason) -> None:
        if not request.is_online:
            self._ended.append(request)

    def committed(self, step: Step, result: StepResult, scheduler: Scheduler) -> None:
        for request in self._ended:
            tokens = request.num_prompt_tokens + request.num_output_tokens
            self._rows.append((step.timer.executed_at_s, request.request_id.partition(":")[0], request.share, tokens))
        self._ended = []

    def tokens_of(self, share: str, window_s: tuple[float, float]) -> int:
        return sum(tokens for at_s, _, of, tokens in self._rows if of == share and window_s[0] <= at_s <= window_s[1])

    def num_tokens(self, start_s: float, end_s: float) -> int:
        return sum(tokens for at_s, _, _, tokens in self._rows if start_s <= at_s <= end_s)

    def jobs(self) -> list[JobEnds]:
        """In the order in which they were submitted."""
        jobs: dict[str, JobEnds] = {}
        for at_s, name, _, tokens in self._rows:
            ends = jobs.setdefault(name, JobEnds())
            ends.num_rows, ends.num_tokens, ends.last_end_s = ends.num_rows + 1, ends.num_tokens + tokens, at_s
        return [jobs[name] for name in sorted(jobs, key=lambda name: (len(name), name))]
