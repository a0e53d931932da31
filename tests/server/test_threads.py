import os
from pathlib import Path

import pytest

from neaptide.executors import container_limits
from neaptide.launch.threads import LEAST_BYTES, default_num_threads


@pytest.fixture(autouse=True)
def no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of ours: where these tests run there may be one."""
    groups = tmp_path / "groups"
    groups.mkdir()
    monkeypatch.setattr(container_limits, "CGROUPS", groups)
    return groups


def model(directory: Path, weight_bytes: int) -> Path:
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)
    return directory


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 2), (8, 7)])
def test_a_large_model_takes_both_of_two_cores_and_all_but_one_of_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert default_num_threads(model(tmp_path, 100 * LEAST_BYTES)) == threads


@pytest.mark.parametrize(("weight_bytes", "threads"), [(0, 1), (2 * LEAST_BYTES - 1, 1), (3 * LEAST_BYTES, 3)])
def test_each_thread_has_enough_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_bytes: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert default_num_threads(model(tmp_path, weight_bytes)) == threads


def test_a_containers_limit_counts_as_its_cores(
    tmp_path: Path, no_container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for quota, threads in (("400000", 3), ("200000", 2), ("100000", 1)):
        (no_container / "cpu.max").write_text(f"{quota} 100000\n")
        assert default_num_threads(model(tmp_path, 100 * LEAST_BYTES)) == threads
