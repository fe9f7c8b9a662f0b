"""Gallery of the site: pages and pictures of real runs, made while the site is built.

A trained classifier of handwritten digits is deployed, verified and inspected here; the page of a benchmark shows the
recorded results, because times that are measured during a build are worth nothing.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from rich.console import Console
from rich.text import Text

import attnforge
from attnforge.bench import page, plots, results
from attnforge.bundle import Bundle
from attnforge.demo import real_example
from attnforge.model.registry import build_model
from attnforge.report.charts import Picture
from attnforge.report.error_charts import by_case
from attnforge.report.verify_page import write_page
from tests.support.bundles import rewrite

MODEL, BACKEND = "patch-attention-digits", "onnxruntime-cpu"
COLUMNS = 80


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the gallery's pages and pictures."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in _made(Path(folder)):
            files.append(File.generated(config, f"gallery/{name}", content=content))
    return files


def _made(folder: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the names and contents of the gallery's files."""
    module, _, shapes = build_model(MODEL)
    out, example = folder / "digits.bundle", (real_example(MODEL),)
    bundle = attnforge.deploy(module, example, out, shapes, "fp16", ["onnxruntime"], MODEL, tune=False)
    faulty = _with_another_scale(bundle, folder / "faulty.bundle")
    for name, tested in (("verify", bundle), ("failed", faulty)):
        report = attnforge.verify(tested, [BACKEND])
        if report.passed != (tested is bundle):
            raise RuntimeError(f"the gallery shows a bundle that passes and one that fails: {report.summary()}")
        yield f"{name}.html", write_page(report, tested, folder / f"{name}.html").read_bytes()
        yield f"{name}.svg", _svg(by_case(BACKEND, report.backends[BACKEND].comparisons, "error of each case"))
    yield "inspect.svg", _terminal("inspect", bundle.path)
    suite = results.read(Path(__file__).parent.parent / "benchmarks/results/suite.json")
    page.write_page(suite, folder / "bench.html")
    yield "bench.html", (folder / "bench.html").read_bytes()
    times = plots.latencies(next(model for model in suite.models if model.name == "bert-base"))
    assert times is not None
    yield "bench.svg", _svg(times)


def _with_another_scale(bundle: Bundle, folder: Path) -> Bundle:
    """A copy of the bundle whose second attention layer has scores that are 1% larger, and a manifest to match."""
    shutil.copytree(bundle.path, folder)
    file = folder / "onnxruntime/model.onnx"
    model = ir.load(file)
    node = next(node for node in model.graph if node.name == "attentions.1/MultiHeadAttention")
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.01 * node.attributes["scale"].as_float())
    ir.save(model, file)
    return rewrite(folder)


def _svg(picture: Picture) -> bytes:
    return base64.b64decode(picture.src.partition(",")[2])


def _terminal(command: str, path: Path) -> str:
    """A picture of a terminal with what a command prints about a bundle."""
    done = subprocess.run(
        [sys.executable, "-m", "attnforge", command, path.name],
        env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)},
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(done.stdout))
    return console.export_svg(title=f"attnforge {command} {path.name}")
