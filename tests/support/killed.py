"""A process that has loaded attnforge's libraries and forks workers that deploy or rebuild plans, to be killed.

`python -m tests.support.killed` serves requests, one line of JSON each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def deploy(bundle: str, seed: int, cache: bool = True) -> None:
    """Deploy the small model with weights from a seed, replacing the existing bundle."""
    import torch

    import attnforge
    from tests.support.bundles import small_example

    module, args, shapes = small_example()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + seed / 10)
    attnforge.deploy(
        module, args, bundle, shapes, "fp32", ["onnxruntime"], "small", tune=False, force=True, cache=cache
    )


def rebuild(bundle: str, seed: int) -> None:
    """Add a plan for another device, which depends on the seed."""
    from attnforge.bundle import Bundle
    from attnforge.export.tensorrt import rebuild

    rebuild.rebuild(Bundle(bundle), "tensorrt_rtx", ("SM86", "SM89", "SM120")[seed % 3])


WORK: dict[str, Callable[[str, int], None]] = {"deploy": deploy, "rebuild": rebuild}


def serve() -> None:
    """Answer every request with the process id of its worker, the exit code and the seconds. A deploy before the first
    request loads what torch's exporter loads at its first use, so that no worker has to."""
    with tempfile.TemporaryDirectory() as folder:
        deploy(str(Path(folder, "bundle")), 0, cache=False)
    for line in sys.stdin:
        work, bundle, seed, killed_after = json.loads(line)
        start = time.monotonic()
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.setsid()
                sys.stdout = sys.stderr
                WORK[work](bundle, seed)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        if killed_after is not None:
            time.sleep(killed_after)
            os.kill(process, signal.SIGKILL)  # works even after it ended, as it was not waited for
        _, status = os.waitpid(process, 0)
        print(process, os.waitstatus_to_exitcode(status), time.monotonic() - start, flush=True)


if __name__ == "__main__":
    serve()
