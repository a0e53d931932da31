"""Tables of the judgement as text."""

from collections.abc import Iterable, Mapping, Sequence

from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.compare import Pair, Summary, not_below
from neaptide_lab.experiments.judgement.runs import Failed, Outcome
from neaptide_lab.experiments.judgement.worker import Figures

NOT_BELOW_POINTS = 0.5
HEAD = (
    "cell",
    "policy",
    "n",
    "both%",
    "TTFT%",
    "TPOT%",
    "offline",
    "TTFT p50/p99 ms",
    "TPOT p99",
    "gap p99/max ms",
    "longest%",
    "wait s",
    "hits%",
)
SUMMED = ("case", "cells", "n", "other%", "ours%", "points [90%]", "requests", "offline", "longest", "verdict")


def cells_table(cells: Iterable[Cell], outcomes: Mapping[str, Mapping[str, Outcome]]) -> str:
    """A line for each cell and policy. ``outcomes``: by cell and by policy's title."""
    lines: list[tuple[str, ...]] = [HEAD]
    for cell in cells:
        for number, (title, outcome) in enumerate(outcomes[cell.name].items()):
            name = "" if number else cell.name
            if isinstance(outcome, Failed):
                lines.append((name, title, f"FAILED: {outcome.reason}", *[""] * (len(HEAD) - 3)))
            else:
                lines.append((name, title, *_figures(outcome)))
    return _aligned(lines, left=2)


def _figures(one: Figures) -> tuple[str, ...]:
    return (
        str(one.requests),
        _percent(one.attained),
        _percent(one.ttft),
        _percent(one.tpot),
        _offline(one),
        f"{_ms(one.ttft_p50_s)}/{_ms(one.ttft_p99_s)}",
        _ms(one.tpot_p99_s, 1),
        f"{_ms(one.gap_p99_s)}/{_ms(one.gap_max_s)}",
        _percent(one.longest),
        "-" if one.wait_max_s is None else f"{one.wait_max_s:.1f}",
        _percent(one.online_hits),
    )


def _offline(one: Figures) -> str:
    """Nothing for a bound, which has no steps, where it is not known."""
    if not one.steps and not one.offline_tokens_per_s:
        return "-"
    return f"{one.offline_tokens_per_s:,.0f}" + ("" if one.valid else " dry")


def summary_table(summaries: Mapping[str, Summary]) -> str:
    """A line for each case, with the verdict whether ours is not below by ``NOT_BELOW_POINTS``."""
    lines = [SUMMED]
    for case, one in summaries.items():
        points, ratio, longest = one.points, one.offline_ratio, one.longest_points
        lines.append(
            (
                case,
                str(len(one.pairs)),
                str(one.num_requests),
                _mean_percent(pair.other for pair in one.pairs),
                _mean_percent(pair.ours for pair in one.pairs),
                "-" if points is None else f"{points.mean:+.2f} [{points.low:+.2f}, {points.high:+.2f}]",
                f"{one.requests:+d}",
                "-" if ratio is None else f"{ratio:.3f}",
                "-" if longest is None else f"{longest:+.1f}",
                "-" if points is None else "holds" if not_below(points, NOT_BELOW_POINTS) else "BELOW",
            )
        )
    return _aligned(lines, left=1)


def named_lines(summary: Summary) -> list[str]:
    """The cells that lose more than ``NAMED_POINTS``."""
    return [
        f"{pair.cell}: {pair.points:+.1f} points ({pair.requests:+d} of {pair.ours.requests}; longest "
        f"{0.0 if pair.longest_points is None else pair.longest_points:+.1f}), offline {_ratio(pair)}"
        for pair in summary.named
    ]


def _ratio(pair: Pair) -> str:
    return "-" if pair.offline_ratio is None else f"{pair.offline_ratio:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100.0 * share:.1f}"


def _mean_percent(figures: Iterable[Figures]) -> str:
    shares = [one.attained for one in figures if one.attained is not None]
    return _percent(sum(shares) / len(shares) if shares else None)


def _ms(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{digits}f}"


def _aligned(lines: Sequence[tuple[str, ...]], left: int) -> str:
    """Columns of equal width; the first ``left`` of them begin at the left. A long reason is not counted."""
    widths = [max(len(line[k]) for line in lines if not line[k].startswith("FAILED")) for k in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if k < left else text.rjust(width)
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
