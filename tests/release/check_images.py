"""`python tests/release/check_images.py`: what the Dockerfiles in serving/images say works, without docker.

The steps of each Dockerfile run in a folder and an empty environment of their own, in order; only the base image is
this machine's Python instead. Then the image's command runs, and commands of the guide on a bundle, without torch.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "serving/images"
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()

WITHOUT_TORCH = """
import sys, numpy, attnforge
from attnforge.serving.triton import model
assert attnforge.verify("bundle").passed
session = attnforge.load("bundle")
print(session.run({spec.name: numpy.zeros([2, 5, 16], spec.dtype) for spec in session.inputs}).keys())
assert not {"torch", "onnx", "onnxscript"} & set(sys.modules)
"""


class Image:
    """The last stage of a Dockerfile, built in a folder.

    Attributes:
        root: the image's working folder.
        user: the user that it runs as.
        command: entry point and arguments.
    """

    def __init__(self, file: Path, folder: Path) -> None:
        self.stages: dict[str, Path] = {}
        self.entry: list[str] = []
        self.arguments: list[str] = []
        self.user = ""
        for instruction, rest in instructions(file):
            if instruction == "FROM":
                name = rest.partition(" AS ")[2]
                self.root = self.stages[name] = folder / (name or "image")
                self.root.mkdir()
                venv.create(self.root / "env", with_pip=True)
            elif instruction == "COPY":
                self._copy(shlex.split(rest))
            elif instruction == "RUN":
                self.run(rest)
            elif instruction == "USER":
                self.user = rest
            elif instruction == "ENTRYPOINT":
                self.entry = json.loads(rest)
            elif instruction == "CMD":
                self.arguments = json.loads(rest)
            elif (instruction, rest) not in (("WORKDIR", "/app"), ("ARG", "TRITON")):
                sys.exit(f"{file} has {instruction} {rest}, which this check does not know")

    @property
    def command(self) -> list[str]:
        return [*self.entry, *self.arguments]

    def _copy(self, arguments: list[str]) -> None:
        *flags, source, target = arguments
        start = ROOT if not flags else self.stages[flags[0].removeprefix("--from=")]
        path = start / source.removeprefix("/app/")
        if path.is_dir():
            shutil.copytree(path, self.root / target, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
        else:
            shutil.copy(path, self.root / target)

    def run(self, command: str) -> str:
        """Run a shell command in the image and return what it prints."""
        path = f"{self.root / 'env/bin'}:{os.environ['PATH']}"
        inside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
        done = subprocess.run(command, shell=True, cwd=self.root, env=inside, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"`{command}` exits with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, each with the rest of its line."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            yield instruction, rest


def main() -> None:
    for file in sorted(IMAGES.glob("*.Dockerfile")):
        with tempfile.TemporaryDirectory() as folder:
            image = Image(file, Path(folder))
            if image.user.split(":")[0] in ("", "0", "root"):
                sys.exit(f"{file} runs as root")
            shutil.copytree(ROOT / "tests/golden/encoder-fp32", image.root / "bundle")
            image.run(f"python -c {shlex.quote(WITHOUT_TORCH)}")
            image.run("attnforge verify bundle")
            image.run("python -c 'import numpy; numpy.save(\"x.npy\", numpy.zeros((2, 5, 16), numpy.float32))'")
            image.run("attnforge run bundle x.npy")
            if image.command[0] == "attnforge":
                image.run(shlex.join(image.command))
            size = sum(path.stat().st_size for path in (image.root / "env").rglob("*") if path.is_file())
            print(f"{file.name}: its packages take {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
