"""The process that plans: its plans, and what its failures cost."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from neaptide.engine.messages import DualScanPlan, PlanReady
from neaptide.engine.offline.density import DensityModel
from neaptide.engine.offline.planning.plan import PromptPool, plan_pool
from neaptide.engine.offline.planning.prompts import Prompts
from neaptide.engine.offline.token_file import TokenFile, TokenFileWriter
from neaptide.launch.planner import made
from neaptide.server.batches.planning.planner import Planner
from neaptide.server.batches.planning.request import JobRows, PlanRequest, check_plan, packed, unpacked

PROMPTS = {
    "one": [[20] * 32 + [1], [10] * 16 + [1], [20] * 32 + [2]],
    "two": [[10] * 16 + [2], [3], [10] * 16 + [3]],
}
BAD = "tests.server.batches.planning.bad_planner"


@pytest.fixture(autouse=True)
def children_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the tests as children; only our package is installed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))


def asked(directory: Path, order: str, salts: tuple[str, str] = ("", ""), ended: tuple[int, ...] = ()) -> PlanRequest:
    """For the rows of two jobs, of which those of the first that have ended are left out."""
    jobs = []
    for (name, prompts), salt in zip(PROMPTS.items(), salts, strict=True):
        with TokenFileWriter(directory / name) as writer:
            for prompt in prompts:
                writer.append(prompt)
        gone = list(ended) if name == "one" else []
        rows = [row for row in range(len(prompts)) if row not in gone]
        jobs.append(
            JobRows(
                batch_id=name,
                path=str(directory / name),
                salt=salt,
                num_rows=len(prompts),
                rows=packed(rows),
                limits=packed([8] * len(rows)),
                ended_rows=packed(gone),
                ended_tokens=packed([5] * len(gone)),
            )
        )
    return PlanRequest(jobs, order, token_s=1e-4, kv_token_s=1e-7, kv_tokens=10_000, unit_tokens=16)


def entries(plan: PlanReady) -> list[tuple[str, int]]:
    batches = [plan.batch_ids[number] for number in unpacked(plan.batches).tolist()]
    return list(zip(batches, unpacked(plan.rows).tolist(), strict=True))


async def test_a_process_plans_over_all_jobs(tmp_path: Path) -> None:
    plan = await Planner().plan(asked(tmp_path, "neaptide"))
    assert plan is not None
    assert entries(plan) == [("one", 0), ("one", 2), ("one", 1), ("two", 0), ("two", 2), ("two", 1)]
    assert plan.ends is None


def test_jobs_of_different_salts_share_nothing(tmp_path: Path) -> None:
    # Row 1 of the first job and rows 0 and 2 of the second begin with the same 16 tokens, which are held once less.
    held = []
    for salts in (("", ""), ("a", "b")):
        ends = made(asked(tmp_path, "ends", salts)).ends
        assert ends is not None
        held.append(unpacked(ends.held_tokens).sum())
    assert held[1] - held[0] == 16


def test_rows_that_have_ended_are_not_planned_but_tell_of_others(tmp_path: Path) -> None:
    request = asked(tmp_path, "ends", ended=(0,))
    plan = made(request)
    assert ("one", 0) not in entries(plan)
    assert len(entries(plan)) == 5
    check_plan(plan, request)
    # Every answer is taken to be as long as the one that has ended: 5 tokens, of which half are held in the mean.
    assert plan.ends is not None
    held = dict(zip(entries(plan), unpacked(plan.ends.held_tokens).tolist(), strict=True))
    assert held["one", 2] == 33 + 2


def lasting(plan: PlanReady) -> dict[tuple[str, int], int]:
    assert plan.ends is not None
    return dict(zip(entries(plan), unpacked(plan.ends.lasting_steps).tolist(), strict=True))


def test_answers_that_run_tell_of_others(tmp_path: Path) -> None:
    request = asked(tmp_path, "ends", ended=(0,))
    first, second = request.jobs
    # Row 2 of the first job begins as row 0 does, which has ended after 5 tokens, and has put out 2 so far: those of
    # its kind have 5 sqrt(1 + 4 / 25). A row that has ended meanwhile tells nothing.
    first = msgspec.structs.replace(first, running_rows=packed([2, 0]), running_tokens=packed([2, 4]))
    found = lasting(made(msgspec.structs.replace(request, jobs=[first, second])))
    assert found["one", 2] == 7
    assert ("one", 0) not in found


def test_a_job_of_which_nothing_is_known_has_its_samples_run_first(tmp_path: Path) -> None:
    """Before either end; of jobs of so few rows all are samples."""
    plan = made(asked(tmp_path, "ends"))
    assert plan.ends is not None
    assert plan.ends.num_first == 6
    plan = made(asked(tmp_path, "ends", ended=(0,)))
    assert plan.ends is not None
    assert plan.ends.num_first == 3
    assert [name for name, _ in entries(plan)] == ["two"] * 3 + ["one"] * 2
    assert unpacked(plan.ends.turns).tolist()[:3] == [0, 1, 2]


def test_a_plan_for_a_job_alone_is_the_planners(tmp_path: Path) -> None:
    request = asked(tmp_path, "neaptide")
    prompts = Prompts([TokenFile(job.path) for job in request.jobs])
    model = DensityModel.in_seconds(1e-4, 1e-7)
    (rows,) = plan_pool(PromptPool.of(prompts, np.full(6, 8.0), model, 10_000, 16), "neaptide")
    assert [3 * (name == "two") + row for name, row in entries(made(request))] == rows.tolist()


def test_attention_over_long_prompts_counts(tmp_path: Path) -> None:
    """One row of 33 tokens that puts out 8: 2 ms for a pair, of which a causal kernel computes half, in 33 x 33."""
    request = asked(tmp_path, "ends")
    job = msgspec.structs.replace(request.jobs[0], rows=packed([0]), limits=packed([8]))
    densities = []
    for pair_s in (0.0, 2e-3):
        ends = made(msgspec.structs.replace(request, jobs=[job], pair_s=pair_s)).ends
        assert ends is not None
        densities.append(ends.root_density)
    compute_s, memory_s = 1e-4 * (33 + 8), 1e-7 * (33 * 8 + 8 * 8 / 2)
    assert densities == pytest.approx([compute_s / memory_s, (compute_s + 1e-3 * 33**2) / memory_s])


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("die", "its process ended"),
        ("torn", "its process ended"),
        ("rubbish", "Expected `object`"),
        ("long", "a frame has 4294967295 bytes"),
        ("other", "the plan is of other batches"),
        ("failed", "its process says: MemoryError"),
    ],
)
async def test_a_planner_that_fails_costs_the_plan(
    tmp_path: Path, behaviour: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await Planner(module=BAD).plan(asked(tmp_path, behaviour)) is None
    assert "the offline pool could not be planned" in caplog.text
    assert said in caplog.text


async def test_a_planner_that_hangs_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await Planner(patience_s=0.05, module=BAD).plan(asked(tmp_path, "hang")) is None
    assert "it took longer than" in caplog.text


async def test_whoever_stops_waiting_ends_the_process(tmp_path: Path) -> None:
    planning = asyncio.create_task(Planner(module=BAD).plan(asked(tmp_path, "hang")))
    await asyncio.sleep(0)
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning


async def test_a_token_file_that_is_gone_is_no_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    request = asked(tmp_path, "neaptide")
    (tmp_path / "two.offsets").unlink()
    assert await Planner().plan(request) is None
    assert "FileNotFoundError" in caplog.text


ENDS = DualScanPlan(packed([1] * 6), packed([1] * 6), [1.0] * 6, [1.0] * 6, 1.0, 1.0, 1.0, packed([0, 1, 2, 3, 4, 5]))

WITH_STARTS = msgspec.structs.replace(ENDS, starts=packed([-1, -1, -1, 3, 0, 1]), kv_tokens=100)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"batch_ids": ["one"]}, "other batches"),
        ({"batches": packed([0] * 5)}, "batches that it was not given"),
        ({"batches": packed([0, 0, 0, 1, 1, 2])}, "batches that it was not given"),
        ({"rows": packed([0, 1, 2, 0, 1, 3])}, "rows that its batches do not have"),
        ({"rows": packed([0, 1, -1, 0, 1, 2])}, "rows that its batches do not have"),
        ({"rows": packed([0, 1, 1, 0, 1, 2])}, "omits or repeats rows"),
        ({"ends": msgspec.structs.replace(ENDS, held_tokens=packed([1]))}, "what its rows hold"),
        ({"ends": msgspec.structs.replace(ENDS, lasting_steps=packed([-1] * 6))}, "how long its rows last"),
        ({"ends": msgspec.structs.replace(ENDS, turns=packed([0, 1, 2, 3, 4, 4]))}, "does not order its rows"),
        ({"ends": msgspec.structs.replace(ENDS, densities=[1.0])}, "densities of other windows"),
        ({"ends": msgspec.structs.replace(ENDS, starts=packed([0] * 5))}, "timetable of other rows"),
        ({"ends": msgspec.structs.replace(ENDS, starts=packed([0, -1, -1, 0, 1, 2]))}, "timetable of other rows"),
        ({"ends": msgspec.structs.replace(ENDS, kv_tokens=-1)}, "timetable of other rows"),
        ({"ends": msgspec.structs.replace(ENDS, num_first=7)}, "puts more rows first"),
        ({"ends": msgspec.structs.replace(ENDS, num_first=-1)}, "puts more rows first"),
        ({"ends": msgspec.structs.replace(ENDS, tile_tokens=0)}, "tile size below 1"),
        ({"ends": msgspec.structs.replace(ENDS, root_density=float("nan"))}, "invalid numbers"),
        ({"ends": msgspec.structs.replace(ENDS, densities=[1.0] * 5 + [-1.0])}, "invalid numbers"),
    ],
)
def test_a_plan_that_is_none_is_refused(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    request = asked(tmp_path, "ends")
    plan = PlanReady(["one", "two"], packed([0, 0, 0, 1, 1, 1]), packed([0, 1, 2, 0, 1, 2]), ENDS)
    check_plan(plan, request)
    check_plan(msgspec.structs.replace(plan, ends=WITH_STARTS), request)
    with pytest.raises(ValueError, match=said):
        check_plan(msgspec.structs.replace(plan, **changed), request)
