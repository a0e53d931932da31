"""Figures of BROS in parts: some cells, another window, and runs that are kept in a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from neaptide.simulation.scenario import Scenario
from neaptide_lab.experiments.bros import latency, runs
from neaptide_lab.experiments.bros.runs import Part, run_cells
from neaptide_lab.experiments.bros.setting import BROS, FULL, OPT_13B, OURS, POLICIES, Outcome, Size
from neaptide_lab.experiments.rivals.kept import KeptRuns, code_digest
from tests.simulation.scenes import constant, offline, online

TWO = Size((OPT_13B,), (12.0, 15.0), 30.0, batch_sizes=(16, 64), lengths=("LMSYS",))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """The scenarios that were run: each takes the place of a small one, whose end is told with another step time."""
    ended = runs.outcome_of(constant(online((0.0, 8, 2), (1.0, 8, 2)), [offline((0, 4, 1))]))
    ran: list[Scenario] = []

    def outcome_of(given: Scenario) -> Outcome:
        ran.append(given)
        return replace(ended, step_s=0.01 * len(ran))

    monkeypatch.setattr(runs, "outcome_of", outcome_of)
    monkeypatch.setattr(latency, "QUICK", TWO)
    return ran


def test_cells_are_chosen_by_a_part_of_their_names() -> None:
    size = Part(("OPT-30B, ShareGPT at 6/s", "70B, LMSYS"), 60.0).of(FULL)
    assert size.window_s == 60.0
    assert [str(cell) for cell in size.cells()] == [
        "OPT-30B, ShareGPT at 6/s",
        *(f"Llama-3-70B, LMSYS at {rate}/s" for rate in (3, 6, 9, 12, 15)),
    ]
    assert Part().of(FULL) == FULL
    assert len(FULL.cells()) == 2 * 3 * 5


def test_what_is_no_cell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is no cell 'OPT-66B'; there are: OPT-13B, LMSYS at 12/s; OPT-13B"):
        Part(("LMSYS", "OPT-66B")).of(TWO)


@pytest.mark.parametrize("window_s", [4.9, -60.0, float("nan"), float("inf")])
def test_a_window_in_which_too_little_arrives_is_refused(window_s: float) -> None:
    with pytest.raises(ValueError, match="at least"):
        Part(window_s=window_s)


def test_a_figure_that_was_cut_goes_on_and_says_the_same(
    ran: list[Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs"
    whole = latency.run_part(True, Part(kept=KeptRuns(Outcome, path)))
    assert len(ran) == len(path.read_text().splitlines()) == 2 * 6
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]) + lines[7][:40])
    ran.clear()
    kept = KeptRuns(Outcome, path)
    again = latency.run_part(True, Part(kept=kept))
    assert (kept.num_found, len(ran)) == (7, 5)
    assert again.rows == whole.rows
    part = latency.run_part(True, Part(("at 15/s",), kept=KeptRuns(Outcome, path)))
    assert len(ran) == 5
    assert part.data["runs"].keys() == {"OPT-13B, LMSYS at 15/s"}
    assert part.data["settings"]["rates_rps"] == [15.0]


def test_the_next_figure_runs_what_the_one_before_has_not(ran: list[Scenario], tmp_path: Path) -> None:
    cell = replace(TWO, rates_rps=(15.0,))

    def more(size: Size, *, has_offline: bool = True, has_alone: bool = False) -> list[tuple[str, bool]]:
        ran.clear()
        run_cells(size, KeptRuns(Outcome, tmp_path / "runs"), has_offline=has_offline, has_alone=has_alone)
        return [(given.policy, bool(given.offline)) for given in ran]

    everyone = [*(policy for policy in POLICIES if policy != BROS), BROS, BROS]
    assert more(cell) == [(policy, True) for policy in everyone]
    assert more(cell, has_alone=True) == [(OURS, False)]
    assert more(cell, has_offline=False) == [(policy, False) for policy in everyone if policy != OURS]
    assert more(replace(cell, window_s=40.0)) == [(policy, True) for policy in everyone]
    assert more(replace(cell, batch_sizes=(16, 32))) == [(BROS, True)]


def test_what_others_have_done_stands_when_our_policy_changes(
    ran: list[Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs"
    latency.run_part(True, Part(kept=KeptRuns(Outcome, path)))
    ran.clear()
    monkeypatch.setattr(runs, "code_digest", lambda also, besides=(): code_digest(also, besides) if besides else "new")
    latency.run_part(True, Part(kept=KeptRuns(Outcome, path)))
    assert [given.policy for given in ran] == [OURS, OURS]
