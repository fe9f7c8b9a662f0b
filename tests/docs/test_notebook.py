"""The notebook of examples/ runs as a reader would run it, and is stored without outputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.docs.pages import ROOT

NOTEBOOK = ROOT / "examples" / "digits.ipynb"


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_from_a_module_to_a_verified_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests run at the same time
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    _, *outputs = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    trained, deployed, inspected, verified, page, _, used = outputs
    assert "of digits that it has not seen" in trained and "2 fused by onnxruntime" in deployed
    assert "blocks.0" in inspected and "passed" in verified and "digits.html" in page
    assert "with onnxruntime-cpu" in used and (tmp_path / "digits.html").stat().st_size > 100_000
