"""Cells of the gym, and that those of ``tuned-rivals`` are among them."""

import itertools
from dataclasses import replace

import msgspec
import pytest

from neaptide.simulation.points import parse_points
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.judgement.cell import Cell, Part, online_of, scenario_of
from neaptide_lab.experiments.judgement.cells import CALIBRATION, REPORT, rivals
from neaptide_lab.experiments.judgement.runs import OURS
from neaptide_lab.experiments.judgement.worker import Task, figures_of
from neaptide_lab.experiments.rivals import loads as tuned
from neaptide_lab.gym.loads import DEVICES, LOADS, RATES, SEEDS, STARTS_S, cells, device_of
from neaptide_lab.gym.table import POLICIES, GymTable


def test_there_are_seven_loads_three_seeds_and_three_devices() -> None:
    every = cells()
    assert len({cell.name for cell in every}) == len(every) == 63
    assert {(cell.case, cell.seed, device_of(cell)) for cell in every} == {
        (load, seed, device) for load in LOADS for seed in SEEDS for device in DEVICES
    }


def test_the_first_cells_are_those_of_the_judgement() -> None:
    assert cells()[: len(LOADS)] == rivals(REPORT)


@pytest.mark.parametrize("number", range(7))
def test_the_first_cells_are_the_loads_of_tuned_rivals(number: int) -> None:
    ours, theirs = scenario_of(cells()[number], "neaptide")[0], tuned.scenario_of((*tuned.LOADS, *tuned.MOVING)[number])
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in ours.online] == [
        (r.arrival_s, r.input_tokens, r.output_tokens) for r in theirs.online
    ]
    assert ours.offline == theirs.offline
    assert replace(ours, online=(), with_bounds=True) == replace(theirs, online=())


@pytest.mark.parametrize(
    "policy",
    [
        "priority@1024x256",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("priority@512x256", "fcfs", "qoserve", "slidingserve")
        ),
    ],
)
def test_a_rival_does_in_the_gym_what_it_does_in_tuned_rivals(policy: str) -> None:
    """The first four seconds of the load, with rows that come and go soon."""
    rows = "batchllm-2000-200-s4"
    load = replace(tuned.CONV, window_s=(600.0, 604.0), offline=rows, warm_up_s=2.0)
    (point,) = parse_points(policy)
    theirs = simulate(replace(point.of(tuned.scenario_of(load)), with_bounds=False)).result
    part = Part("azure_conv_2023", (600.0, 604.0), 1.2)
    cell = msgspec.structs.replace(cells()[0], online=(part,), offline=rows, warm_up_s=2.0)
    ours = figures_of(Task(cell, policy))
    assert (ours.requests, ours.steps) == (theirs.online.requests, theirs.steps)
    assert ours.attained == theirs.attained
    assert ours.offline_tokens_per_s == theirs.offline_tokens_per_s > 0.0
    assert (ours.ttft_p99_s, ours.tpot_p99_s) == (theirs.online.ttft_s["p99"], theirs.online.tpot_s["p99"])
    assert ours.preempted_offline == theirs.preemptions.count_by_class["offline"]


@pytest.mark.parametrize(
    "policy",
    [
        "priority@512x256",
        *(pytest.param(name, marks=pytest.mark.full) for name in POLICIES if name not in (OURS, "priority@512x256")),
    ],
)
def test_a_kept_row_of_a_rival_is_what_the_code_does(policy: str) -> None:
    """Older code decided some rows of the table; their digits are still right, but for processor time."""
    (cell,) = (cell for cell in cells(quick=True) if cell.case == "code")
    kept, found = GymTable().figures(policy, cell), figures_of(Task(cell, policy))
    assert kept is not None
    for each in (kept, found):
        each.plan_mean_ms = each.plan_p99_ms = each.offline_bound_tokens_per_s = None
        each.wall_s = 0.0
    assert found == kept


def test_no_seed_and_no_window_of_the_calibration_is_in_the_gym() -> None:
    calibration = rivals(CALIBRATION)
    assert not {cell.seed for cell in calibration} & set(SEEDS)
    windows = [(part.source, part.window_s) for cell in calibration for part in cell.online]
    for part in (part for cell in cells() for part in cell.online if part.source in STARTS_S):
        for source, (from_s, to_s) in windows:
            assert source != part.source or part.window_s[1] <= from_s or to_s <= part.window_s[0]


def test_the_windows_of_a_trace_are_apart() -> None:
    for cell in cells()[: len(LOADS)]:
        same = [other for other in cells() if other.case == cell.case and other.profile == cell.profile]
        for number, part in enumerate(cell.online):
            if part.source in STARTS_S:
                windows_s = sorted(other.online[number].window_s for other in same)
                assert all(one[1] <= next_one[0] for one, next_one in itertools.pairwise(windows_s))


@pytest.mark.parametrize("load", ["chats", "day curve"])
def test_another_device_gets_its_share_of_the_requests_in_as_much_time(load: str) -> None:
    whole, *_, share = (online_of(cell) for cell in cells() if cell.case == load and cell.seed == 0)
    length_s, shares_s = (each[-1].arrival_s - each[0].arrival_s for each in (whole, share))
    assert shares_s == pytest.approx(length_s, rel=0.1)
    # A tenth of the trace's window has not exactly a tenth of its requests.
    assert len(share) / len(whole) == pytest.approx(min(RATES.values()), rel=0.3)


def test_the_quick_form_is_a_tenth_of_each_load() -> None:
    quick, whole = cells(quick=True), cells()[: len(LOADS)]
    assert [cell.case for cell in quick] == list(LOADS)
    assert [_seconds(cell) for cell in quick] == pytest.approx([0.1 * _seconds(cell) for cell in whole])
    burst = next(cell for cell in quick if cell.case == "burst")
    assert burst.online[0].window_s == (46_790.0, 46_810.0)


def _seconds(cell: Cell) -> float:
    part = cell.online[0]
    return (part.window_s[1] - part.window_s[0]) / part.speed
