"""A `.pt2` file that would run code while torch reads it is refused before torch reads it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnforge.errors import UntrustedError
from attnforge.export.sources.exported_program import load_program
from attnforge.export.sources.program_check import is_arithmetic, what_it_runs


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor, pair: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        twice = torch.cat([x, x]).reshape(-1, 2, 4)
        return self.inner(twice) + self.offset, [pair["y"] * x.shape[0]]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = Dim("rows", min=2, max=64)
    args = (torch.randn(6, 4), {"y": torch.randn(6, 4)})
    program = torch.export.export(Halved(), args, dynamic_shapes=({0: rows}, {"y": {0: rows}}))
    file = tmp_path_factory.mktemp("honest") / "program.pt2"
    torch.export.save(program, file)
    return file


class Touches:
    """What touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def rewritten(honest: Path, to: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """The program with its members changed, by their names within the archive."""
    with zipfile.ZipFile(honest) as old, zipfile.ZipFile(to, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, change(name.partition("/")[2], old.read(name)))
    return to


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save((value,), buffer)
    return buffer.getvalue()


def in_model(change: Callable[[dict[str, Any]], None]) -> Callable[[str, bytes], bytes]:
    def changed(name: str, data: bytes) -> bytes:
        if name != "models/model.json":
            return data
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return changed


def test_an_honest_program_holds_nothing_that_runs(honest: Path) -> None:
    assert what_it_runs(honest) is None
    assert load_program(honest).graph_module is not None


ENUM = '{"__enum__": true, "fqn": "antigravity.X", "name": "A"}'

HOSTILE: dict[str, Callable[[Path], Callable[[str, bytes], bytes]]] = {
    "sample inputs": lambda ran: lambda n, d: pickled(Touches(ran)) if n == "data/sample_inputs/model.pt" else d,
    "a bare pickle": lambda ran: lambda n, d: (
        pickle.dumps((Touches(ran),)) if n == "data/sample_inputs/model.pt" else d
    ),
    "weights": lambda ran: lambda n, d: (
        pickled(Touches(ran)) if n == "data/weights/weight_0"
        else d.replace(b'"use_pickle": false', b'"use_pickle": true') if n.endswith("weights_config.json") else d
    ),
    "an expression": lambda ran: in_model(
        lambda m: m["graph_module"]["graph"]["tensor_values"]["x"]["sizes"].__setitem__(
            0, {"as_expr": {"expr_str": f"__import__('pathlib').Path({str(ran)!r}).touch()", "hint": {"as_int": 6}}}
        )
    ),
    "a call": lambda ran: in_model(
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.serialization.os.system")
    ),
    "a library": lambda ran: in_model(
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.load_library")
    ),
    "a file": lambda ran: in_model(
        lambda m: m["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.aten.from_file.default")
    ),
    "an import": lambda ran: in_model(
        lambda m: m["graph_module"]["module_call_graph"][0]["signature"].update(
            in_spec=json.dumps([1, {"type": "builtins.dict", "context": ENUM, "children_spec": []}])
        )
    ),
    "an older format": lambda ran: lambda n, d: b"" if n == "x" else d,
}  # fmt: skip


@pytest.mark.parametrize("which", [name for name in HOSTILE if name != "an older format"])
def test_a_program_that_runs_code_is_refused_unless_it_is_trusted(honest: Path, tmp_path: Path, which: str) -> None:
    ran = tmp_path / "ran"
    file = rewritten(honest, tmp_path / "program.pt2", HOSTILE[which](ran))
    with pytest.raises(UntrustedError, match=r"to be trusted like a program: .*--trust-source \(trust_source=True\)"):
        load_program(file)
    assert not ran.exists()
    if which in ("sample inputs", "weights"):  # torch runs these, so this is what the check is for
        try:
            load_program(file, trusted=True)
        except Exception as error:
            assert "no exported program" in str(error)
        assert ran.exists()


def test_compiled_libraries_duplicates_and_older_formats_are_refused(honest: Path, tmp_path: Path) -> None:
    extra = tmp_path / "library.pt2"
    rewritten(honest, extra, lambda name, data: data)
    with zipfile.ZipFile(extra, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/data/aotinductor/model/model.so", b"")
    assert "a compiled library" in (what_it_runs(extra) or "")
    with zipfile.ZipFile(tmp_path / "older.pt2", "w") as archive:
        archive.writestr("version", "8.0")
        archive.writestr("serialized_example_inputs.pt", pickled(1))
    assert "an older format" in (what_it_runs(tmp_path / "older.pt2") or "")
    rewritten(honest, extra, lambda name, data: data)
    with zipfile.ZipFile(extra, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(next(name for name in archive.namelist() if name.endswith("models/model.json")), b"{}")
    assert "two members" in (what_it_runs(extra) or "")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("Symbol('s31', positive=True, integer=True)", True),
        ("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(1))", True),
        ("FloorDiv(Symbol('s0'), Integer(2))", True),
        ("2*s0 + 1", True),
        ("Pow(Symbol('s0'), Integer(2))", True),
        ("__import__('os').system('touch x')", False),
        ("exec(chr(97))", False),
        ("Symbol(__import__('os'))", False),
        ("().__class__", False),
        ("[x for x in (1,)]", False),
        ("lambda: 0", False),
        ("9**9**9**9", False),
        ("Pow(Integer(9), Pow(Integer(9), Integer(9)))", False),
        ("f'{1}'", False),
        ("(" * 5000 + "1" + ")" * 5000, False),
        ("1+" * 6000 + "1", False),
        (7, False),
        ("", False),
    ],
)
def test_expressions(text: object, safe: bool) -> None:
    assert is_arithmetic(text) is safe
