"""Blended pools that are shrunk: what they are made of, what runs of them tell, and what the experiments show."""

from types import ModuleType

import numpy as np
import pytest

from neaptide.engine.steps.plan import BatchShape
from neaptide.estimator.analytic import LLAMA_2_7B, LLAMA_3_1_8B
from neaptide.estimator.cost.roofline import RooflineModel
from neaptide.estimator.device_profile import load_profile
from neaptide.estimator.recipes import build_headroom
from neaptide.loadgen.workloads.blend_sets import DENSITY_TOKENS
from neaptide.simulation.scenario import Scenario
from neaptide.simulation.simulator import Run, simulate
from neaptide_lab.experiments.blend import grid, mixes, models, overlap, parallel, runs, throughput, usage
from neaptide_lab.experiments.blend.pools import AZURE, BURSTGPT, SHAREGPT, WILDCHAT, Chats, Mix, Size, blended, shrunk
from neaptide_lab.experiments.blend.runs import BlendCase, Ran, StepParts
from neaptide_lab.experiments.blend.setting import PROFILE
from neaptide_lab.experiments.blend.tables import at_least
from neaptide_lab.experiments.result import ExperimentResult

DEVICE = load_profile(PROFILE)
SMALL = Size(shrink=32, lasting=0.2)


def density_of(mix: Mix, size: Size) -> tuple[float, float]:
    """Density and sharing of all tokens, by decodes."""
    set_ = blended(mix, size, DEVICE)
    prompt = np.array([request.input_tokens for request in set_.requests], float)
    decodes = np.array([request.output_tokens - 1 for request in set_.requests], float)
    shared = set_.sharing().tokens - set_.sharing().unique_tokens
    tokens = float((prompt + decodes).sum())
    read = float((prompt * decodes + decodes**2 / 2.0).sum())
    return DENSITY_TOKENS / size.shrink * (tokens - shared) / read, shared / tokens


@pytest.mark.parametrize("shrink", [8, 32])
@pytest.mark.parametrize(("density", "sharing"), [(1.4, 0.35), (0.9, 0.05)])
def test_a_shrunk_pool_has_its_density_and_sharing(density: float, sharing: float, shrink: int) -> None:
    found = density_of(Mix(density, sharing), Size(shrink, 0.2))
    assert found[0] == pytest.approx(density, rel=0.05)
    assert found[1] == pytest.approx(sharing, abs=0.02)


@pytest.mark.parametrize("chats", [AZURE, SHAREGPT, WILDCHAT])
def test_other_chats_make_pools_as_well(chats: Chats) -> None:
    found = density_of(Mix(1.1, 0.4, chats), SMALL)
    assert found[0] == pytest.approx(1.1, rel=0.06)
    assert found[1] == pytest.approx(0.4, abs=0.03)


def test_a_mix_that_its_parts_cannot_make_is_refused() -> None:
    with pytest.raises(ValueError, match="no mix has a density"):
        blended(Mix(1.1, 0.02, WILDCHAT), SMALL, DEVICE)


@pytest.mark.parametrize(("chats", "density"), [(BURSTGPT, 17.78), (AZURE, 33.2), (SHAREGPT, 3.12), (WILDCHAT, 2.13)])
def test_chats_have_the_published_densities(chats: Chats, density: float) -> None:
    answer, prompt = chats.output_tokens, chats.prompt_tokens
    read = prompt * answer + (1.0 + chats.output_spread**2) / 2.0 * answer**2
    assert DENSITY_TOKENS * (1.0 - chats.sharing) * (prompt + answer) / read == pytest.approx(density, rel=0.02)


def test_a_shrunk_device_reads_its_memory_in_the_same_time() -> None:
    small = shrunk(DEVICE, 32)
    assert small.kv_capacity_tokens == pytest.approx(DEVICE.kv_capacity_tokens / 32, rel=0.01)
    assert small.costs["mixed"].kv_token_s == 32 * DEVICE.costs["mixed"].kv_token_s
    assert small.costs["mixed"].gemm_curve_s == DEVICE.costs["mixed"].gemm_curve_s


@pytest.mark.parametrize("spreads", [False, True])
def test_a_pool_lasts_as_long_as_is_asked_for(spreads: bool) -> None:
    size = Size(shrink=1, lasting=2.0, spreads=spreads)
    lengths = size.long_answers(np.random.default_rng(0), size.num_videos(DEVICE.kv_capacity_tokens)).astype(float)
    steps = (lengths**2).sum() / 2.0 / DEVICE.kv_capacity_tokens
    assert steps / lengths.max() == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("kappa", [0.0, 0.2, 1.0])
def test_the_parts_of_a_step_make_its_time(kappa: float) -> None:
    parts = StepParts(DEVICE, kappa)
    shape = BatchShape()
    shape.add(900, 0)
    shape.add_decodes(40, 300_000, 9000)
    seconds = parts.predict(shape).seconds
    assert seconds == RooflineModel.from_profile(DEVICE, kappa).predict(shape).seconds
    (compute_s, memory_s, noted_s), weights_s = parts.table[0], DEVICE.costs["mixed"].weights_s
    longer, shorter = max(compute_s, memory_s), min(compute_s, memory_s)
    if compute_s > memory_s:
        shorter -= weights_s
    assert noted_s == seconds
    assert seconds - DEVICE.costs["mixed"].fixed_s <= longer + kappa * shorter + 1e-9
    assert seconds >= longer


def test_overlap_is_told_step_by_step() -> None:
    apart = Ran(4.0, 0.0, 0.0, np.array([[1.0, 0.0, 1.0], [0.0, 2.0, 3.0]]))
    assert apart.overlapped == 0.0
    assert apart.compute_bound == 0.25
    assert Ran(2.0, 0.0, 0.0, np.array([[0.5, 1.0, 1.0], [0.5, 1.0, 1.0]])).overlapped == 1.0


def test_runs_stay_below_the_optimum_and_find_what_is_shared() -> None:
    case = BlendCase.of(Mix(1.4, 0.35), Size(shrink=64, lasting=0.2), DEVICE)
    ran = case.ran("neaptide")
    assert case.roofline_s < case.optimum_s < ran.seconds
    assert ran.seconds == pytest.approx(ran.steps[:, 2].sum())
    assert 0.9 < ran.sharing / case.sharing < 1.02
    assert len(ran.steps) >= case.least_steps


@pytest.mark.parametrize("way", ["dfs", "neaptide"])
def test_every_policy_has_all_of_the_memory(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    asked = list[Scenario]()

    def noted(scenario: Scenario) -> Run:
        asked.append(scenario)
        return simulate(scenario)

    monkeypatch.setattr(runs, "simulate", noted)
    BlendCase.of(Mix(1.4, 0.35), Size(shrink=64, lasting=0.05), DEVICE).ran(way)
    (scenario,) = asked
    assert scenario.engine_config().scheduler.offline_max_kv_ratio == 1.0
    assert build_headroom(scenario.headroom, 1000).headroom_blocks(0.0) == 0


def test_at_least_forgives_what_is_not_shown() -> None:
    assert at_least(0.9996, 1.0)
    assert not at_least(0.999, 1.0)


def test_densities_of_models_count_parameters_and_cached_bytes() -> None:
    assert models.density_tokens(LLAMA_3_1_8B) == pytest.approx(DENSITY_TOKENS, rel=0.001)
    assert models.density_tokens(LLAMA_2_7B) < DENSITY_TOKENS / 4  # every head has keys of its own


SECONDS = {"dfs": 1.3, "balance": 1.4, "blendserve": 1.1, "neaptide": 1.0}
"""Time of each policy, as a multiple of the optimum's."""


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(case: BlendCase, way: str) -> Ran:
        steps = np.abs(np.random.default_rng(len(way)).normal(1.0, 0.01 * len(way), (400, 3)))
        return Ran(SECONDS[way] * case.optimum_s, case.sharing, 0.0, steps)

    monkeypatch.setattr(BlendCase, "ran", ran)
    for module in (throughput, grid, overlap, models, mixes, usage, parallel):
        monkeypatch.setattr(module, "QUICK", SMALL)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("module", [throughput, grid, overlap, models, mixes, usage])
def test_experiments_show_gains_beside_the_papers(module: ModuleType) -> None:
    from matplotlib.figure import Figure

    result: ExperimentResult = module.run(quick=True)
    assert result.plot is not None
    result.plot(Figure())
    gains = [row for row in result.rows if row.case.endswith("neaptide over blendserve")]
    assert [row.ours for row in gains] == [pytest.approx(1.1)] * len(gains)
    assert bool(gains) == (module is not usage)
    assert not [row for row in gains if not row.holds]


@pytest.mark.usefixtures("made_up")
def test_the_grid_has_the_papers_cells() -> None:
    assert len(grid.CELLS) == 65
    (row,) = (row for row in grid.run(quick=True).rows if row.case == "1.30, 25%: blendserve over dfs")
    assert (row.paper, row.ours) == (1.34, pytest.approx(1.3 / 1.1))
    printed = [gain for gains in grid.PAPER.values() for gain in gains if gain is not None]
    assert np.mean(printed) == pytest.approx(grid.PAPER_MEAN, abs=0.01)


@pytest.mark.usefixtures("made_up")
def test_a_policy_that_is_slower_than_blendserve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "neaptide", 1.2)
    assert {row.case.split(": ")[1] for row in throughput.run(quick=True).failed} >= {"neaptide over blendserve"}


@pytest.mark.usefixtures("made_up")
def test_parts_of_a_pool_take_less_time_by_their_number() -> None:
    result = parallel.run(quick=True)
    (row,) = (row for row in result.rows if row.case == "trace 1, 2 devices: blendserve")
    assert row.paper == 1.85
    assert 1.0 < row.ours <= 2.0
