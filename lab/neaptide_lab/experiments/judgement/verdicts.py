"""Verdicts on what must be true of our policy, from the runs that there are. A claim begins with its number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from neaptide_lab.experiments.judgement.cell import Cell
from neaptide_lab.experiments.judgement.compare import Interval, Pair, Summary, not_below
from neaptide_lab.experiments.judgement.runs import BOUND, OURS
from neaptide_lab.experiments.judgement.worker import Figures

PLANNED = f"{OURS}+plan"
TitleOf = Callable[[Cell], str | None]


@dataclass(slots=True, frozen=True)
class Verdict:
    claim: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}  {self.claim}: {self.found}"


@dataclass(slots=True, frozen=True)
class Judged:
    """The runs that verdicts are made of."""

    cells: Sequence[Cell]
    figures: Mapping[tuple[str, str], Figures]
    """By cell and title of the policy."""
    before: str | None = None
    """Title of our policy of the commit before."""
    caps: Mapping[str, str] = field(default_factory=dict)
    """Title of the best cap of each cell of the design, by the cell's name."""

    def group(self, name: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.group == name]

    def by_case(self, group: str) -> dict[str, list[Cell]]:
        found: dict[str, list[Cell]] = {}
        for cell in self.group(group):
            found.setdefault(cell.case, []).append(cell)
        return found

    def of_before(self, cell: Cell) -> str | None:
        return self.before

    def of_cap(self, cell: Cell) -> str | None:
        return self.caps.get(cell.name)

    def of_rival(self, policy: str) -> TitleOf:
        """The title under which a rival ran, on whichever code."""
        titles = f"before:{policy}", policy
        return lambda cell: next((title for title in titles if (cell.name, title) in self.figures), None)

    def pairs(self, cells: Sequence[Cell], other: TitleOf, ours: str = OURS) -> Summary:
        """Ours with the other in every cell that has both."""
        found = ((cell, self.figures.get((cell.name, ours)), other(cell)) for cell in cells)
        return Summary(
            tuple(
                Pair(cell.name, mine, self.figures[cell.name, title], cell.case)
                for cell, mine, title in found
                if mine is not None and title is not None and (cell.name, title) in self.figures
            )
        )


def title_of(title: str) -> TitleOf:
    """The same title for every cell."""
    return lambda cell: title


def verdicts(judged: Judged) -> list[Verdict]:
    """Every requirement of which there are runs."""
    parts = (_constant, _live, _overload, _bros, _echo, _long, _rivals, _wrong)
    return [verdict for part in parts for verdict in part(judged)]


def _constant(judged: Judged) -> Iterator[Verdict]:
    whole = judged.pairs(judged.group("constant"), judged.of_cap)
    if whole.points is None:
        return
    claim = f"1 attainment minus the best cap's, mean of {len(whole.pairs)} cells at least 0"
    yield Verdict(claim, _shown(whole.points), whole.points.mean >= 0.0)
    for trace, cells in judged.by_case("constant").items():
        points = judged.pairs(cells, judged.of_cap).points
        if points is not None:
            yield Verdict(f"1 {trace}: at least -0.5", _shown(points), points.mean >= -0.5)
    yield from _at_least("1 offline work of the best cap's", whole.offline_ratio, 0.98)


def _live(judged: Judged) -> Iterator[Verdict]:
    for case, cells in judged.by_case("w5").items():
        one = judged.pairs(cells, judged.of_before)
        yield from _not_below(f"2 W5 {case}", one)
        yield from _at_least(f"2 W5 {case}: offline work of before's", one.offline_ratio, 0.99)


def _overload(judged: Judged) -> Iterator[Verdict]:
    for case, cells in judged.by_case("overload").items():
        yield from _not_below(f"2 overload {case}", judged.pairs(cells, judged.of_before))
        near = [cell for cell in cells if " 0.8x " in cell.name or " 1x " in cell.name]
        ratio = judged.pairs(near, judged.of_before).offline_ratio
        yield from _at_least(f"2 overload {case}: offline work of before's at 0.8 and 1 times", ratio, 0.98)


def _bros(judged: Judged) -> Iterator[Verdict]:
    cells = judged.group("bros")
    latencies = _ratios(judged.pairs(cells, judged.of_rival("fcfs-v0")), lambda one: one.latency_s)
    if latencies:
        cut = 100.0 * (1.0 - sum(latencies) / len(latencies))
        yield Verdict("2 BROS: latency below fcfs-v0's by at least 74%", f"{cut:.1f}%", cut >= 74.0)
    work = _ratios(judged.pairs(cells, judged.of_rival("fcfs")), lambda one: one.work)
    yield from _at_least("2 BROS: least work of any cell of fcfs's", min(work, default=None), 0.96)
    gaps = _ratios(judged.pairs(cells, judged.of_before), lambda one: one.gap_p99_s)
    if gaps:
        claim = "2 BROS: gaps at p99 of before's at most 1.1 in every cell"
        yield Verdict(claim, f"{max(gaps):.3f}", max(gaps) <= 1.1)


def _echo(judged: Judged) -> Iterator[Verdict]:
    alone = next((cell for cell in judged.group("echo") if not cell.offline), None)
    for cell in judged.group("echo"):
        for title in (OURS, PLANNED) if cell.offline else ():
            ratio = judged.pairs([cell], judged.of_rival("echo"), title).offline_ratio
            yield from _at_least(f"2 Echo {cell.case}: offline work of {title} of echo's", ratio, 1.0)
            if alone is not None:
                yield from _beside(judged, f"2 Echo {cell.case}, {title}", alone, cell, title)


def _long(judged: Judged) -> Iterator[Verdict]:
    for case, cells in judged.by_case("long").items():
        (alone, beside) = (next((c for c in cells if bool(c.offline) == has), None) for has in (False, True))
        if alone is None or beside is None:
            continue
        yield from _beside(judged, f"3 {case}", alone, beside, OURS)
        both = judged.figures.get((alone.name, OURS)), judged.figures.get((beside.name, OURS))
        if both[0] is not None and both[1] is not None and both[0].online_hits:
            kept = (both[1].online_hits or 0.0) / both[0].online_hits
            yield from _at_least(f"3 {case}: online hits beside of alone's", kept, 0.8)
        ratio = judged.pairs([beside], judged.of_before).offline_ratio
        yield from _at_least(f"3 {case}: offline work of before's", ratio, 0.92)


def _beside(judged: Judged, claim: str, alone: Cell, beside: Cell, title: str) -> Iterator[Verdict]:
    """Beside offline work at most a point is lost."""
    a, b = judged.figures.get((alone.name, OURS)), judged.figures.get((beside.name, title))
    if a is not None and b is not None and a.attained is not None and b.attained is not None:
        points = round(100.0 * (b.attained - a.attained), 9)
        yield Verdict(f"{claim}: points beside over alone at least -1", f"{points:+.2f}", points >= -1.0)


def _rivals(judged: Judged) -> Iterator[Verdict]:
    """A point of a rival counts where it attains at most a point less than ours."""
    for cell in judged.group("rivals"):
        ours = judged.figures.get((cell.name, OURS))
        points = {t: one for (name, t), one in judged.figures.items() if name == cell.name and _is_rival(t)}
        if ours is None or not points:
            continue
        keeping = {t: one for t, one in points.items() if (one.attained or 0.0) >= (ours.attained or 0.0) - 0.01}
        claim = f"4 {cell.case}: offline work of the best rival's that keeps up"
        if not keeping:
            yield Verdict(claim, f"none of {len(points)} keeps up", holds=True)
            continue
        best = max(keeping, key=lambda title: keeping[title].offline_tokens_per_s)
        ratio = ours.offline_tokens_per_s / keeping[best].offline_tokens_per_s
        yield from _at_least(f"{claim} ({best})", ratio, 1.0)


def _is_rival(title: str) -> bool:
    policy = title.removeprefix("before:").partition("@")[0]
    return policy not in (OURS, PLANNED, BOUND)


def _wrong(judged: Judged) -> Iterator[Verdict]:
    for cell in judged.group("wrong"):
        points = judged.pairs([cell], judged.of_before).points
        if points is not None:
            yield Verdict(f"5 {cell.name}: points over before at least -1", f"{points.mean:+.2f}", points.mean >= -1.0)


def _not_below(claim: str, one: Summary) -> Iterator[Verdict]:
    if one.points is not None:
        yield Verdict(f"{claim}: not below before by 0.5", _shown(one.points), not_below(one.points, 0.5))


def _at_least(claim: str, ratio: float | None, least: float) -> Iterator[Verdict]:
    if ratio is not None:
        yield Verdict(f"{claim} at least {least:g}", f"{ratio:.3f}", ratio >= least)


def _ratios(one: Summary, figure: Callable[[Figures], float | None]) -> list[float]:
    """Ours over the other's, of the pairs that have the figure."""
    both = ((figure(pair.ours), figure(pair.other)) for pair in one.pairs)
    return [ours / other for ours, other in both if ours is not None and other]


def _shown(interval: Interval) -> str:
    return f"{interval.mean:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"
