"""Simulations that are kept in a file: what is run again, and what is not."""

from collections.abc import Callable
from pathlib import Path

import pytest

import neaptide
import neaptide_lab
from neaptide.simulation.measures import OutOfReach
from neaptide.simulation.result import SimResult
from neaptide.simulation.simulator import simulate
from neaptide_lab.experiments.rivals.kept import OUR_CODE, KeptRuns, code_digest
from tests.simulation.scenes import constant, offline, online


@pytest.fixture(scope="module")
def result() -> SimResult:
    return simulate(constant(online((0.0, 8, 1), (1.0, 8, 1)), [offline((0, 4, 1))])).result


def given(result: SimResult) -> Callable[[], SimResult]:
    return lambda: result


def given_up() -> SimResult:
    raise OutOfReach("3 of 8 missed")


def not_to_be_run() -> SimResult:
    raise AssertionError("it was kept")


def test_what_was_run_is_not_run_again(tmp_path: Path, result: SimResult) -> None:
    first = KeptRuns(SimResult, tmp_path / "runs")
    assert first.run("a", "code", 0.9, given(result)) == result
    assert first.num_found == 0
    second = KeptRuns(SimResult, tmp_path / "runs")
    assert second.run("a", "code", 0.99, not_to_be_run) == result
    assert second.num_found == 1


def test_other_code_or_another_point_is_run(tmp_path: Path, result: SimResult) -> None:
    KeptRuns(SimResult, tmp_path / "runs").run("a", "code", 0.9, given(result))
    kept = KeptRuns(SimResult, tmp_path / "runs")
    for name, code in (("a", "other"), ("b", "code")):
        with pytest.raises(OutOfReach):
            kept.run(name, code, 0.9, given_up)
    assert kept.num_found == 0


def test_what_was_given_up_is_run_again_only_if_less_is_asked(tmp_path: Path, result: SimResult) -> None:
    with pytest.raises(OutOfReach, match="3 of 8 missed"):
        KeptRuns(SimResult, tmp_path / "runs").run("a", "code", 0.9, given_up)
    kept = KeptRuns(SimResult, tmp_path / "runs")
    for least in (0.9, 0.95):
        with pytest.raises(OutOfReach, match="3 of 8 missed"):
            kept.run("a", "code", least, not_to_be_run)
    assert kept.run("a", "code", 0.89, given(result)) == result


def test_half_a_line_is_dropped(tmp_path: Path, result: SimResult) -> None:
    path = tmp_path / "runs"
    KeptRuns(SimResult, path).run("a", "code", 0.9, given(result))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    kept = KeptRuns(SimResult, path)
    assert path.read_bytes() == whole
    kept.run("b", "code", 0.9, given(result))
    assert KeptRuns(SimResult, path).run("b", "code", 0.9, not_to_be_run) == result


@pytest.mark.parametrize("content", ["one line without an end", "a,b\n1,2\n", '{"name": "a"}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine"
    path.write_text(content)
    with pytest.raises(ValueError, match="run of this experiment"):
        KeptRuns(SimResult, path)
    assert path.read_text() == content


def test_the_code_of_our_policy_is_known_by_its_files() -> None:
    """What rivals have done stands when only these change; those of the sweep and of BROS's figures import none."""
    assert code_digest(()) == code_digest(()) != code_digest((), besides=OUR_CODE)
    root, lab = Path(neaptide.__file__).parent, Path(neaptide_lab.__file__).parent
    assert all((root / name).is_file() for name in OUR_CODE)
    names = [Path(name).stem for name in OUR_CODE]
    modules = [
        root / "engine" / "scheduler" / f"{name}.py"
        for name in ("baselines/vllm_v1", "baselines/one_queue", "base", "draft", "budget", "queues")
    ]
    modules += [lab / "policies" / f"{name}.py" for name in ("vllm_v0", "round_robin", "bros", "whole_prompts")]
    for module in modules:
        text = module.read_text()
        assert [name for name in names if f"scheduler.{name} import" in text] == []
