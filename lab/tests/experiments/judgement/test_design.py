"""The design covers every pair, and what is chosen on is not what is reported."""

from itertools import combinations, product

from neaptide_lab.experiments.judgement import design
from neaptide_lab.experiments.judgement.cell import MADE, Cell
from neaptide_lab.experiments.judgement.cells import CALIBRATION, REPORT, SETS, cells_of, quick_cells


def levels(cell: Cell) -> tuple[object, ...]:
    """Trace, device, replicas, load and whether a flood runs beside it."""
    load = cell.name.split()[-2]
    return cell.case, cell.profile, cell.replicas, load, bool(cell.offline)


def test_every_pair_of_levels_stands_in_a_cell() -> None:
    found = [levels(cell) for cell in design.cells(is_report=True)]
    every = (
        design.TRACES,
        design.DEVICES.values(),
        (1, design.FIVE),
        [f"{load:g}x" for load in design.LOADS],
        (False, True),
    )
    for one, other in combinations(range(len(every)), 2):
        assert {(cell[one], cell[other]) for cell in found} == set(product(every[one], every[other]))


def test_the_design_is_of_about_150_cells_and_half_of_them_have_a_flood() -> None:
    found = design.cells(is_report=True)
    assert len(found) == len({levels(cell) for cell in found}) == 143
    assert sum(bool(cell.offline) for cell in found) in range(65, 79)


def test_a_trace_with_twice_the_load_comes_twice_as_fast() -> None:
    recorded, made = (design.part_of(trace, 3.0, is_report=True) for trace in ("azure_conv_2023", "made-code"))
    faster, more = (design.part_of(trace, 6.0, is_report=True) for trace in ("azure_conv_2023", "made-code"))
    assert faster.speed == 2 * recorded.speed
    assert (more.rate_rps, more.window_s[1]) == (2 * made.rate_rps, made.window_s[1] / 2)


def test_a_made_window_has_300_to_900_requests_and_that_of_five_replicas_300_for_each() -> None:
    sizes: dict[int, set[int]] = {1: set(), design.FIVE: set()}
    for cell in design.cells(is_report=True):
        if cell.case in MADE:
            (part,) = cell.online
            sizes[cell.replicas].add(round(part.rate_rps * part.window_s[1]))
    assert sizes[design.FIVE] == {1500}
    assert (min(sizes[1]), max(sizes[1])) == (300, 900)


def test_the_names_of_a_set_are_its_own() -> None:
    for name in SETS:
        names = [cell.name for cell in cells_of(name)]
        assert len(names) == len(set(names))


def test_no_window_of_a_recorded_trace_and_no_seed_is_in_both_sets() -> None:
    calibration, report = cells_of(CALIBRATION), cells_of(REPORT)
    groups = {cell.group for cell in report}
    for group in groups:
        ours, theirs = ([cell for cell in cells if cell.group == group] for cells in (calibration, report))
        for one, other in product(ours, theirs):
            for a, b in product(one.online, other.online):
                if a.source != b.source:
                    continue
                is_apart = a.window_s[1] <= b.window_s[0] or b.window_s[1] <= a.window_s[0]
                assert is_apart or one.seed != other.seed, (one.name, other.name)


def test_the_quick_form_is_a_dozen_cells_of_the_calibration() -> None:
    assert len(quick_cells()) == 12
