"""What control groups allow, by files as the kernel writes them."""

from pathlib import Path

import pytest
import torch

from neaptide.executors import container_limits
from neaptide.executors.container_limits import cpu_limit, free_memory, usable_cores
from neaptide.executors.torch import device

GIB = 1 << 30
V2, V1 = "0::/pod/box\n", "5:memory:/docker/box\n4:cpu,cpuacct:/docker/box\n0::/\n"


def write(root: Path, **files: str) -> None:
    """``a__b="text"``: file b of group a, dots as ``_dot_``."""
    for name, text in files.items():
        path = root.joinpath(*name.replace("_dot_", ".").split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_no_groups_no_limits(tmp_path: Path) -> None:
    for membership in ("", V1, V2):
        assert (cpu_limit(membership, tmp_path), free_memory(membership, tmp_path)) == (None, None)


def test_limits_of_the_group_and_of_those_that_hold_it(tmp_path: Path) -> None:
    write(tmp_path, pod__box__cpu_dot_max="max 100000\n", pod__cpu_dot_max="250000 100000\n")
    write(tmp_path, pod__box__memory_dot_max="max\n", pod__box__memory_dot_current=f"{GIB}\n")
    write(tmp_path, pod__memory_dot_max=f"{4 * GIB}\n", pod__memory_dot_current=f"{3 * GIB}\n")
    assert cpu_limit(V2, tmp_path) == 2.5
    assert free_memory(V2, tmp_path) == GIB
    write(tmp_path, pod__memory_dot_stat=f"anon 5\nfile {2 * GIB}\ninactive_file {GIB // 2}\nactive_file 7\n")
    assert free_memory(V2, tmp_path) == GIB + GIB // 2
    write(tmp_path, pod__box__cpu_dot_max="50000 100000\n", pod__box__memory_dot_max=f"{GIB // 2}\n")
    assert (cpu_limit(V2, tmp_path), free_memory(V2, tmp_path)) == (0.5, 0), "the least of them, and more than it used"


@pytest.mark.parametrize("membership", ["0::/\n", "0::/kubepods/pod7/box\n"], ids=["own", "the machine's"])
def test_from_inside_the_mount_is_the_container(tmp_path: Path, membership: str) -> None:
    write(tmp_path, cpu_dot_max="200000 100000\n", memory_dot_max=f"{GIB}\n", memory_dot_current="0\n")
    assert (cpu_limit(membership, tmp_path), free_memory(membership, tmp_path)) == (2.0, GIB)


@pytest.mark.parametrize("path", ["", "docker/box/"], ids=["inside", "outside"])
def test_the_first_version(tmp_path: Path, path: str) -> None:
    cpu, memory = tmp_path / "cpu,cpuacct" / path, tmp_path / "memory" / path
    write(cpu, cpu_dot_cfs_quota_us="150000\n", cpu_dot_cfs_period_us="100000\n")
    write(memory, memory_dot_limit_in_bytes=f"{2 * GIB}\n", memory_dot_usage_in_bytes=f"{GIB}\n")
    write(memory, memory_dot_stat="inactive_file 3\ntotal_inactive_file 5\n")
    assert (cpu_limit(V1, tmp_path), free_memory(V1, tmp_path)) == (1.5, GIB + 5)
    write(cpu, cpu_dot_cfs_quota_us="-1\n")
    assert cpu_limit(V1, tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "cores"), [("max", 8), ("50000", 1), ("150000", 1), ("200000", 2), ("390000", 3), ("6400000", 8)]
)
def test_whole_cores_of_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    """Threads that wait for each other take the time of the one that is held back."""
    write(tmp_path, cpu_dot_max=f"{quota} 100000\n")
    monkeypatch.setattr(container_limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(container_limits.os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores() == cores


def test_free_memory_of_a_cpu_is_the_lesser_of_machine_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_limits, "CGROUPS", tmp_path)
    machine = device.free_bytes(torch.device("cpu"))
    assert machine is not None
    write(tmp_path, memory_dot_max="5000000\n", memory_dot_current="1000000\n")
    assert device.free_bytes(torch.device("cpu")) == 4000000
    write(tmp_path, memory_dot_max=f"{1 << 60}\n")
    assert device.free_bytes(torch.device("cpu")) == pytest.approx(machine, rel=0.5)
