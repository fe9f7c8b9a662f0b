"""Whole deploys and rebuilds, killed at random moments: the old bundle or the new one is there and verifies, and after
the next run nothing is left of those that were killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnforge
from attnforge.bundle import Bundle
from attnforge.cache import VARIABLE
from tests.support.bundles import DeploySmall

TIMES = int(os.environ.get("ATTNFORGE_KILLS", "6"))
"""Number of times a process is killed: 100 in `make kill`."""

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked"),
    pytest.mark.xdist_group("killed"),
]


class Workers:
    """Processes that deploy and rebuild, forked from a warm one; what they write next to bundles is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.cache, self.temporary = folder / "cache", folder / "temporary"
        self.temporary.mkdir()
        environment = {**os.environ, VARIABLE: str(self.cache), "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "tests.support.killed"]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def run(self, work: str, bundle: Path, seed: int, killed_after: float | None = None) -> tuple[int, float]:
        """The exit code and the seconds of a process that does the work, or is killed after so many seconds."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([work, str(bundle), seed, killed_after]) + "\n")
        self._server.stdin.flush()
        process, code, seconds = self._server.stdout.readline().split()
        self._wait_for_children(int(process))
        return int(code), float(seconds)

    def _wait_for_children(self, session: int) -> None:
        """Wait until no process of the session is left.

        Raises:
            AssertionError: one outlives the worker by half a minute.
        """
        end = time.monotonic() + 30
        while left := [stat for stat in Path("/proc").glob("[0-9]*/stat") if _session(stat) == session]:
            assert time.monotonic() < end, f"a child goes on without its parent: {left}"
            time.sleep(0.02)

    def close(self) -> None:
        self._server.communicate()


def _session(stat: Path) -> int:
    try:
        state, _, _, session = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[:4]
    except OSError:  # ended meanwhile
        return 0
    return 0 if state == "Z" else int(session)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = Workers(tmp_path_factory.mktemp("workers"))
    yield workers
    workers.close()


def check_whole(bundle: Path) -> None:
    """The bundle is whole, and gives what it says."""
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed
    Bundle(bundle)


@pytest.mark.parametrize(("work", "part"), [("deploy", 0.7), ("rebuild", 0.3)])
def test_killed_at_any_moment_the_old_or_the_new_bundle_verifies(
    small: DeploySmall, workers: Workers, tmp_path: Path, work: str, part: float
) -> None:
    bundle = Path(shutil.copytree(small("fp32").path, tmp_path / "bundle"))
    code, whole = workers.run(work, bundle, 0)
    assert code == 0
    rng = random.Random(0)
    times = max(2, round(part * TIMES))  # one alone may end before it is killed
    ended = []
    for i in range(times):
        code, seconds = workers.run(work, bundle, 1 + i, (i + rng.random()) / times * whole)
        ended.append(code)
        if code == 0:  # it ended before it could be killed: the first run was one of a machine that was busy
            whole = min(whole, seconds)
        check_whole(bundle)
    assert -signal.SIGKILL in ended, "none was killed at work"
    assert workers.run(work, bundle, 1 + times)[0] == 0
    check_whole(bundle)
    assert {path.name for path in tmp_path.iterdir()} == {"bundle"}
    assert not list(bundle.rglob(".*")) and not Bundle(bundle).unlisted()
    assert list(workers.temporary.iterdir()) == []
    if work == "deploy":
        entries = list(workers.cache.iterdir())
        assert entries and not [entry for entry in entries if entry.name.startswith(".")]
