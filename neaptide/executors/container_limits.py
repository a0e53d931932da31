"""CPU and memory limits of a container, read from its control groups (v1 and v2).

A limit may be set on the process's own group or on any ancestor. Inside a container the group's path may be the host's
path, of which only the end is mounted. The groups are then looked up from the mount point, which is the container's
own.
"""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    limit = cpu_limit(_membership(), CGROUPS)
    return cores if limit is None else max(1, min(cores, int(limit)))


def free_in_container() -> int | None:
    """``free_memory`` of this process."""
    return free_memory(_membership(), CGROUPS)


def cpu_limit(membership: str, root: Path) -> float | None:
    """The CPU limit in cores; None without a limit.

    Args:
        membership: content of /proc/self/cgroup.
        root: mount point of the control groups.
    """
    limits: list[float] = []
    for group in _groups(membership, root, "cpu"):
        words = _read(group / "cpu.max").split()
        if not words:
            words = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quota, period = words
        if quota.isdigit() and period.isdigit():  # skips "max" and -1
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def free_memory(membership: str, root: Path) -> int | None:
    """Bytes up to the nearest memory limit. Page cache counts as free.

    Without a limit the result is None, or more than any machine has.

    Args:
        membership: content of /proc/self/cgroup.
        root: mount point of the control groups.
    """
    free: list[int] = []
    for group in _groups(membership, root, "memory"):
        for limit_file, used_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(group / limit_file).strip(), _read(group / used_file).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines() if " " in line)
                free.append(max(0, int(limit) - int(used) + int(stat.get(cached, 0))))
    return min(free, default=None)


def _groups(membership: str, root: Path, controller: str) -> Iterator[Path]:
    """The process's group and its ancestors, in v2 and in the controller's own v1 hierarchy."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", controller) or controller in controllers.split(","):
            base = root / controllers if controllers else root
            own = base / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(base))


def _read(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _membership() -> str:
    return _read(MEMBERSHIP)
