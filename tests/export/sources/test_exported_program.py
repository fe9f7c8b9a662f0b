"""torch may run code when it reads a `.pt2` file, so nothing of it is read unless its author is trusted."""

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

import attnforge
from attnforge.bundle import Source
from attnforge.errors import UntrustedError, UsageError
from attnforge.export.sources.exported_program import load_program, open_program
from attnforge.export.sources.named import rebuild


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
    """An object that touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def rewritten(honest: Path, to: Path, change: Callable[[str, bytes], bytes]) -> Path:
    """Write the program with its members changed, given their names within the archive."""
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


ENUM = '{"__enum__": true, "fqn": "antigravity.X", "name": "A"}'


def named(name: str) -> Callable[[str, bytes], bytes]:
    """The last input under another name, which torch.fx writes into the source of a function."""
    return lambda n, d: d.replace(b'"pair_y"', json.dumps(name).encode()) if n == "models/model.json" else d


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
    "a name": lambda ran: named(f"y=open({str(ran)!r},'w').write('1')"),
    "nothing": lambda ran: lambda n, d: d,
}  # fmt: skip


@pytest.mark.parametrize("which", HOSTILE)
def test_nothing_of_a_program_is_read_unless_its_author_is_trusted(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    ran = tmp_path / "ran"
    file = rewritten(honest, tmp_path / "program.pt2", HOSTILE[which](ran))
    with monkeypatch.context() as patch:
        for reader in (zipfile.ZipFile, torch.export.load):
            patch.setattr(f"{reader.__module__}.{reader.__name__}", pytest.fail)
        for read in (lambda: load_program(file), lambda: attnforge.deploy(file, None, tmp_path / "bundle")):
            with pytest.raises(UntrustedError, match=r"program\.pt2 .* --trust-source \(trust_source=True\)") as raised:
                read()
            assert "\n" not in str(raised.value)
    with pytest.raises(UntrustedError):
        rebuild(Source(kind="program", name=str(file)))
    assert not ran.exists() and not (tmp_path / "bundle").exists()
    if which in ("sample inputs", "weights", "a name"):  # which torch runs
        try:
            open_program(load_program(file, trusted=True))
        except UsageError as error:
            assert "cannot be read as an exported program" in str(error)
        assert ran.exists()


def test_a_program_that_is_trusted_is_read(honest: Path) -> None:
    assert list(open_program(load_program(honest, trusted=True)).dynamic_shapes) == ["x", "pair_y"]


def altered(document: dict[str, Any], *path: Any, value: object) -> None:
    *way, last = path
    for part in way:
        document = document[part]
    document[last] = value


@pytest.mark.parametrize(
    ("change", "rebuilds"),
    [
        (lambda m: altered(m, "graph_module", "module_call_graph", 0, "fqn", value="zz"), False),
        (lambda m: altered(m, "graph_module", "module_call_graph", 0, "fqn", value=[]), False),
        (lambda m: altered(m, "graph_module", "module_call_graph", value=[]), False),
        (lambda m: altered(m, "range_constraints", value={"zz": {"min_val": 2, "max_val": 64}}), True),
        (lambda m: altered(m, "range_constraints", value={}), True),
        (lambda m: altered(m, "graph_module", "graph", "inputs", value=[]), False),
        (lambda m: altered(m, "graph_module", "signature", "input_specs", 0, value={}), False),
    ],
    ids=["fqn", "no fqn", "no calls", "another symbol", "no symbol", "no inputs", "no signature"],
)
def test_a_trusted_program_whose_text_was_changed_ends_in_one_line(
    honest: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], rebuilds: bool
) -> None:
    file = rewritten(honest, tmp_path / "program.pt2", in_model(change))
    source = Source(kind="program", name=str(file))
    reads: list[Callable[[], object]] = [lambda: open_program(load_program(file, trusted=True))]
    if rebuilds:  # only the module, without the bounds of its dims
        assert rebuild(source, trusted=True).args
    else:
        reads.append(lambda: rebuild(source, trusted=True))
    for read in reads:
        with pytest.raises(UsageError, match="cannot be read as an exported program") as raised:
            read()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_program_that_draws_random_numbers_is_refused(by_keyword: bool) -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, True)

    program = torch.export.export(Drops(), (torch.randn(2, 4),))
    (node,) = (node for node in program.graph.nodes if node.op == "call_function")
    if by_keyword:  # as it may be in a file
        node.args, node.kwargs = (), {"input": node.args[0], "p": 0.5, "train": True}
    with pytest.raises(UsageError, match="draws random numbers"):
        open_program(program)
    node.args, node.kwargs = ((), {**node.kwargs, "train": False}) if by_keyword else ((*node.args[:2], False), {})
    assert open_program(program).precision == "fp32"
