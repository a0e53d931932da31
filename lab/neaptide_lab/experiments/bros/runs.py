"""The runs of BROS's figures: all cells, or some of them over a window of their own, and what was run before."""

import logging
import math
from dataclasses import dataclass, field, replace

from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.bros.gaps import OfflineGaps
from neaptide_lab.experiments.bros.planning import PlanningTime
from neaptide_lab.experiments.bros.setting import (
    ALONE,
    BROS,
    OURS,
    POLICIES,
    Cell,
    CellRuns,
    Outcome,
    Runs,
    Size,
    scenario,
)
from neaptide_lab.experiments.bros.work import WorkTally
from neaptide_lab.experiments.rivals.kept import OUR_CODE, KeptRuns, code_digest

LEAST_WINDOW_S = 5.0
"""Shortest window that may be requested: some requests must arrive in it at every rate."""
DECIDING = tuple(f"experiments/bros/{name}.py" for name in ("gaps", "planning", "runs", "setting", "work"))
"""What of the experiment decides what an ``Outcome`` says."""


@dataclass(slots=True, frozen=True)
class Part:
    """What is run of a figure.

    Raises:
        ValueError: a window that is too short.
    """

    cells: tuple[str, ...] = ()
    """Those whose names have one of these in them; all if there is none."""
    window_s: float | None = None
    """The figure's own if None."""
    kept: KeptRuns[Outcome] = field(default_factory=lambda: KeptRuns(Outcome))
    """What was run before, and where it is kept."""

    def __post_init__(self) -> None:
        if self.window_s is not None and not LEAST_WINDOW_S <= self.window_s < math.inf:
            raise ValueError(f"the window must be of {LEAST_WINDOW_S:g} s at least")

    def of(self, whole: Size) -> Size:
        """Raises ValueError if a name in ``cells`` is in that of no cell."""
        names = [str(cell) for cell in whole.cells()]
        for part in self.cells:
            if not any(part in name for name in names):
                raise ValueError(f"there is no cell {part!r}; there are: {'; '.join(names)}")
        return replace(whole, only=self.cells, window_s=self.window_s or whole.window_s)


def run_cells(
    size: Size, kept: KeptRuns[Outcome] | None = None, *, has_offline: bool = True, has_alone: bool = False
) -> Runs:
    """Every policy on every load, ``bros`` with each initial batch size."""
    runner = _Runner(size.window_s, KeptRuns(Outcome) if kept is None else kept)
    return {cell: runner.cell(cell, size.batch_sizes, has_offline, has_alone) for cell in size.cells()}


def worth(one: Outcome) -> tuple[float, float, float]:
    """Whole points of attainment, then offline tokens, then latency."""
    return round(one.attained("both"), 2), one.offline_tokens_per_s, -one.latency_s


class _Runner:
    """Runs what has not been kept."""

    def __init__(self, window_s: float, kept: KeptRuns[Outcome]) -> None:
        self._window_s, self._kept = window_s, kept
        self._our_code, self._others_code = code_digest(DECIDING), code_digest(DECIDING, besides=OUR_CODE)

    def cell(self, cell: Cell, batch_sizes: tuple[int, ...], has_offline: bool, has_alone: bool) -> CellRuns:
        both = scenario(cell, self._window_s)
        given = both if has_offline else replace(both, offline=())
        scenarios = {policy: replace(given, policy=policy) for policy in POLICIES if policy != BROS}
        if has_alone:
            scenarios[ALONE] = replace(both, policy=OURS, offline=())
        outcomes = {name: self._outcome(cell, one) for name, one in scenarios.items()}
        bros = {
            initial: self._outcome(cell, replace(given, policy=BROS, bros_initial_batch_size=initial))
            for initial in batch_sizes
        }
        return CellRuns(outcomes | {BROS: max(bros.values(), key=worth)}, bros)

    def _outcome(self, cell: Cell, given: Scenario) -> Outcome:
        initial = f" from {given.bros_initial_batch_size}" if given.policy == BROS else ""
        alone = "" if given.offline else " without offline work"
        name = f"{cell} for {self._window_s:g} s under {given.policy}{initial}{alone}"

        def simulated() -> Outcome:
            logging.getLogger(__name__).info("%s", name)
            return outcome_of(given)

        code = self._our_code if given.policy == OURS else self._others_code
        return self._kept.run(name, code, 0.0, simulated)


def outcome_of(given: Scenario) -> Outcome:
    """Raises what ``simulate`` raises."""
    window_s = given.online[0].arrival_s, given.online[-1].arrival_s
    planning, tally, gaps = PlanningTime(), WorkTally(window_s), OfflineGaps(window_s)
    run = simulate(given, observers=[planning, tally, gaps])
    step_s = float(run.measures.steps((-math.inf, math.inf))["duration_s"].mean())
    work = tally.work(given.profile)
    return Outcome(run.result, work, run.num_unfinished, step_s, planning.mean_s, str(gaps))
