"""Echo's figure 9: the fraction of offline prompts found in the cache, over time, under online load."""

import logging
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from neaptide.simulation.simulator import Run, simulate
from neaptide_lab.experiments.echo import load
from neaptide_lab.experiments.echo.load import OURS, OnlineLoad
from neaptide_lab.experiments.result import ExperimentResult, Row

NAME = "echo-hit-rate"
ABOUT = "prefix hits of offline prompts over time beside online load (Echo, figure 9)"

POLICIES = ("bs+e+s", "echo", OURS)
"""The paper leaves its base and BS+E out: they do not reorder requests."""
PAPER_HIT_RATE = 78.6
"""Echo's value in percent."""
FULL_PART_S, QUICK_PART_S = 10.0, 5.0
PEAK_SHARE = 0.25
"""Fraction of the parts of the run that are the peak: those with the most online prompt tokens."""

Column = npt.NDArray[np.float64]


class Series(NamedTuple):
    """By part of the run, in order of time; parts in which nothing was admitted are left out."""

    start_s: Column
    admitted_tokens: Column
    """Tokens of offline prompts admitted in the part."""
    cached_tokens: Column
    """Those of them that were in the cache."""
    online_tokens: Column
    """Tokens of online prompts admitted in the part."""

    @property
    def hits(self) -> Column:
        return self.cached_tokens / self.admitted_tokens

    @property
    def is_peak(self) -> npt.NDArray[np.bool_]:
        num_peak = max(round(PEAK_SHARE * len(self.start_s)), 1)
        is_peak = np.zeros(len(self.start_s), np.bool_)
        is_peak[np.argsort(-self.online_tokens, kind="stable")[:num_peak]] = True
        return is_peak

    @property
    def lost_at_peak(self) -> float:
        """Share of hits outside the peak less that in it. Of all prompt tokens: at the peak few rows are admitted, and
        a part in which a document's first question is the only one would count as much as one of forty rows."""
        if len(self.start_s) < 2:
            return 0.0
        peak = self.is_peak
        return float(
            self.cached_tokens[~peak].sum() / self.admitted_tokens[~peak].sum()
            - self.cached_tokens[peak].sum() / self.admitted_tokens[peak].sum()
        )


def run(quick: bool) -> ExperimentResult:
    logger = logging.getLogger(__name__)
    online = OnlineLoad.of(load.BURST_QUICK if quick else load.BURST, logger)
    part_s = QUICK_PART_S if quick else FULL_PART_S
    runs: dict[str, Run] = {}
    for policy in POLICIES:
        logger.info("policy %s", policy)
        runs[policy] = simulate(online.beside(policy, load.QUESTIONS))
    series = {policy: _series(one.measures.steps(one.window_s), part_s) for policy, one in runs.items()}
    ratios = {policy: one.result.kv.hit_ratio or 0.0 for policy, one in runs.items()}
    bound = runs[OURS].result.kv.saving_ratio_bound or 0.0
    data: dict[str, Any] = {
        "settings": online.settings(),
        "part_s": part_s,
        "hit_ratio": ratios,
        "bound": bound,
        "series": {
            policy: {name: column.tolist() for name, column in one._asdict().items()} for policy, one in series.items()
        },
    }
    notes = [
        *online.notes(),
        f"Prompt tokens of admitted offline requests that were in the cache, by {part_s:g} s. The peak is the "
        f"{PEAK_SHARE:.0%} of these parts with the most online prompt tokens. The paper prints one number, "
        f"{PAPER_HIT_RATE}% under Echo, and says that Echo's hits stay at the peak while those of BS+E+S fall.",
    ]
    return ExperimentResult(NAME, _rows(ratios, bound, series), notes, data, lambda figure: _plot(figure, series))


def _series(steps: dict[str, Column], part_s: float) -> Series:
    if not len(steps["end_s"]):
        return Series(*np.zeros((4, 0)))
    part = ((steps["end_s"] - steps["end_s"][0]) // part_s).astype(np.int64)
    names = ("admitted_tokens", "cached_tokens", "online_admitted_tokens")
    admitted, cached, online = (np.bincount(part, steps[name]).astype(np.float64) for name in names)
    kept = np.flatnonzero(admitted)
    return Series(kept.astype(np.float64) * part_s, admitted[kept], cached[kept], online[kept])


def _rows(ratios: dict[str, float], bound: float, series: dict[str, Series]) -> list[Row]:
    rows = []
    for policy in POLICIES:
        paper = PAPER_HIT_RATE if policy == "echo" else None
        rows.append(Row(f"{policy}: prefix hits, bound {bound:.1%}", 100 * ratios[policy], paper, "%"))
    for policy in POLICIES:
        rows.append(Row(f"{policy}: hits lost at the peak", 100 * series[policy].lost_at_peak, None, "points"))
    more = 100 * (ratios["echo"] - ratios["bs+e+s"])
    return [*rows, Row("hits of echo above those of bs+e+s", more, None, "points")]


def _plot(figure: Any, series: dict[str, Series]) -> None:
    hits, online = figure.subplots(2, 1, sharex=True)
    for policy, one in series.items():
        hits.plot(one.start_s, 100 * one.hits, label=policy)
    one = series["echo"]
    online.step(one.start_s, one.online_tokens, where="post")
    hits.axhline(PAPER_HIT_RATE, linestyle=":", color="black", label="paper, Echo")
    hits.set_ylabel("prefix hits, %")
    online.set_ylabel("online prompt tokens")
    online.set_xlabel("s")
    hits.legend()
