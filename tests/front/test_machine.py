"""The number of processors of a process, also if a container's quota is lower."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from attnforge import machine
from attnforge.machine import cpu_quota, processors
from attnforge.memory import available


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Make a file system with these cgroups of this process, and these files in them."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "9:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n3:cpuset:/\n0::/\n"
CASES: dict[str, tuple[str, dict[str, str], float]] = {
    "version 2": ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, of the folder above": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
    "version 2, the least": ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, 2),
    "version 2, a namespace": ("0::/\n", {"cpu.max": "400000 100000"}, 4),
    "version 2, none": ("0::/a\n", {"a/cpu.max": "max 100000"}, math.inf),
    "version 1": (V1, {"cpu/docker/a/cpu.cfs_quota_us": "250000", "cpu/docker/a/cpu.cfs_period_us": "100000"}, 2.5),
    "version 1, a mount of its own": (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2),
    "version 1, none": (
        V1,
        {"cpu/docker/a/cpu.cfs_quota_us": "-1", "cpu/docker/a/cpu.cfs_period_us": "100000"},
        math.inf,
    ),
    "outside": ("0::/../other\n", {"cpu.max": "100000 100000"}, 1),
    "nonsense": ("0::/a\n", {"a/cpu.max": "many few", "cpu.max": "1"}, math.inf),
    "no time": ("0::/a\n", {"a/cpu.max": "100000 0"}, math.inf),
    "nothing": ("", {}, math.inf),
}


@pytest.mark.parametrize("case", CASES)
def test_the_quota_of_processors(tmp_path: Path, case: str) -> None:
    groups, files, quota = CASES[case]
    assert cpu_quota(system(tmp_path, groups, files)) == quota


def test_another_system_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == math.inf


@pytest.mark.parametrize(("quota", "count"), [(0.5, 1), (1.0, 1), (1.5, 2), (6.1, 7), (64.0, 8), (math.inf, 8)])
def test_a_quota_is_rounded_up(monkeypatch: pytest.MonkeyPatch, quota: float, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    assert processors() == count


LIMITED = {
    "version 2": ("0::/its\n", "its", "memory.max", "memory.current"),
    "version 1, a mount of its own": (
        "4:memory,other:/its\n0::/\n",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
}


@pytest.mark.parametrize("case", LIMITED)
def test_a_cgroup_limits_what_is_available(tmp_path: Path, case: str) -> None:
    groups, folder, limit, used = LIMITED[case]
    texts = {limit: "1000000", used: "300000", "memory.stat": "anon 7\ninactive_file 50000\n"}
    root = system(tmp_path, groups, {f"{folder}/{name}": text for name, text in texts.items()})
    assert available(root) == 750_000
    (root / "sys/fs/cgroup" / folder / limit).write_text("max")
    assert available(root) is None


def test_the_memory_of_the_folder_above_is_the_limit(tmp_path: Path) -> None:
    above = {"a/memory.max": "900", "a/memory.current": "700", "a/memory.stat": "anon 500\ninactive_file 100\n"}
    own = {"a/b/memory.max": "max", "a/b/memory.current": "200", "a/b/memory.stat": "inactive_file 0\n"}
    root = system(tmp_path, "0::/a/b\n", above | own)
    assert available(root) == 300
    (root / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 0 kB\n")
    assert available(root) == 0
    (root / "proc/self/cgroup").unlink()
    (root / "proc/meminfo").unlink()
    assert available(root) is None
