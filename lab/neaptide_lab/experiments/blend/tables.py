"""What the experiments on blended pools show of their runs in the same way."""

from collections.abc import Mapping, Sequence
from typing import Any

from neaptide_lab.experiments.blend.pools import Size
from neaptide_lab.experiments.blend.runs import OVERLAP_KAPPA, SEATS, STEP_TOKENS, BlendCase, Ran, Runs
from neaptide_lab.experiments.result import Row

COMPARED = ("dfs", "blendserve", "neaptide")
MIN_OPTIMUM, MIN_KEPT = 0.95, 0.99
OPTIMUM_NOTE = (
    "The practical optimum has the mix of the whole pool in every step and memory always full; weights, launches and "
    "what kappa leaves of the overlap are in it. The paper's is put together from kernels that were measured."
)


def describe(size: Size, where: str, overlap_kappa: float | None = OVERLAP_KAPPA) -> str:
    kappa = "" if overlap_kappa is None else f", overlap kappa {overlap_kappa}"
    return (
        f"Whole runs on {where}{kappa}, {SEATS:,} seats, {STEP_TOKENS:,} tokens a step, planning not counted, as in "
        "the paper, and all of the memory for every policy: nothing is kept for online work. "
        f"Shrunk by {size.shrink}: answers are {size.shrink} times shorter, memory holds {size.shrink} times fewer "
        f"tokens, and to read one takes {size.shrink} times longer. Long answers, whose lengths are known "
        f"as those of videos are, take {size.lasting} times as many steps as the longest of them; those of the paper's "
        "400,000 requests 2.1 times at a density of 1.4."
    )


def gain(ways: Mapping[str, Ran], way: str, base: str = "dfs") -> float:
    return ways[base].seconds / ways[way].seconds


def of_optimum(case: BlendCase, ran: Ran) -> float:
    return case.optimum_s / ran.seconds


def kept(case: BlendCase, ran: Ran) -> float:
    """Fraction of the sharing that a cache without limit would find."""
    return ran.sharing / case.sharing if case.sharing else 1.0


def at_least(value: float, least: float) -> bool:
    """As far as three digits show it."""
    return value >= least - 5e-4


def compared(name: str, case: BlendCase, ways: Mapping[str, Ran], paper_gain: float | None = None) -> list[Row]:
    """Rows of one pool under ``COMPARED``."""
    ours = gain(ways, "neaptide", "blendserve")
    return [
        Row(f"{name}: blendserve over dfs", gain(ways, "blendserve"), paper_gain, "", 3),
        Row(f"{name}: neaptide over blendserve", ours, None, "", 3, at_least(ours, 1.0)),
    ]


def summary(
    cases: Mapping[str, BlendCase],
    found: Runs,
    *,
    is_judged: bool,
    paper_gain: float | None,
    paper_optimum: float | None,
) -> list[Row]:
    """Means and extremes of all pools."""
    gains = {way: [gain(ways, way) for ways in found.values()] for way in COMPARED[1:]}
    shares = {way: [of_optimum(cases[name], ways[way]) for name, ways in found.items()] for way in COMPARED}
    least_kept = min(kept(cases[name], ways["neaptide"]) for name, ways in found.items())
    optimum = mean(shares["neaptide"])
    return [
        Row("mean: blendserve over dfs", mean(gains["blendserve"]), paper_gain, "", 3),
        Row("mean: neaptide over dfs", mean(gains["neaptide"]), None, "", 3),
        Row("mean: dfs, of the practical optimum", mean(shares["dfs"]), None, "", 3),
        Row("mean: blendserve, of the practical optimum", mean(shares["blendserve"]), paper_optimum, "", 3),
        Row(
            "mean: neaptide, of the practical optimum",
            optimum,
            None,
            "",
            3,
            at_least(optimum, MIN_OPTIMUM) if is_judged else None,
        ),
        Row("least: neaptide, of the practical optimum", min(shares["neaptide"]), None, "", 3),
        Row(
            "least: neaptide, sharing of the bound",
            100 * least_kept,
            None,
            "%",
            2,
            at_least(least_kept, MIN_KEPT) if is_judged else None,
        ),
    ]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def numbers(cases: Mapping[str, BlendCase], found: Runs) -> dict[str, dict[str, dict[str, float]]]:
    """For the JSON."""
    return {name: {way: numbers_of(cases[name], ran) for way, ran in ways.items()} for name, ways in found.items()}


def numbers_of(case: BlendCase, ran: Ran) -> dict[str, float]:
    return {
        "seconds": ran.seconds,
        "of_optimum": of_optimum(case, ran),
        "of_roofline": case.roofline_s / ran.seconds,
        "sharing_kept": kept(case, ran),
        "computed_again": ran.again,
        "overlapped": ran.overlapped,
        "compute_bound": ran.compute_bound,
        "steps": float(len(ran.steps)),
        "steps_over_least": len(ran.steps) / case.least_steps,
    }


def bars(figure: Any, found: Runs, ways: Sequence[str] = COMPARED[1:]) -> None:
    """Gains over depth first."""
    axes, width = figure.subplots(), 0.8 / len(ways)
    for index, way in enumerate(ways):
        places = [place + width * index for place in range(len(found))]
        axes.bar(places, [gain(of_case, way) for of_case in found.values()], width, label=way)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(found))], list(found), rotation=90, fontsize=6)
    axes.set_ylabel("throughput over dfs")
    axes.legend()
