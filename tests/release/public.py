"""What is public, as CONTRIBUTING.md defines it, in one list: `python -m tests.release.public` writes `public.json`.

An entry is `python: load(backend)`, `record: Report.passed`, `command: verify --html` or `document: doctor build`.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import typer
from pydantic import BaseModel

import attnforge
from attnforge import errors
from attnforge.bench.results import DecodingResults, Results
from attnforge.bundle import Manifest
from attnforge.cli import app, main
from attnforge.demo import Demo
from attnforge.export.diagnosis.diagnose import Diagnosis
from attnforge.export.options import DeployOptions
from attnforge.keywords import ALIASES
from attnforge.runtime.decoding.decoder import Decoder
from attnforge.runtime.parity.verify import Report
from tests.support.keys import new_key

FILE = Path(__file__).with_name("public.json")
GOLDEN = Path(__file__).parents[1] / "golden"
COMMAND = "python -m tests.release.public"
RECORDS = (Report, Diagnosis, Results, DecodingResults, Manifest)

RUNS = """
models
models vit
deploy worked-example --no-tune --target onnxruntime --out bundle
run ENCODER x.npy --out y.npz
generate DECODER --ids 1,2 --max-new-tokens 2
verify bundle --backend onnxruntime-cpu --html page.html
diagnose bundle
bench bundle --quick --rounds 2 --openings 1 --backend onnxruntime-cpu
inspect bundle
sign bundle --key my.key
package bundle --for triton --out served
package bundle --for polygraphy --out compared
doctor
verify absent
verify --help
""".strip().splitlines()
"""Command lines whose `--json` documents together have every key at the top. The keys of records in them are listed as
records."""


def public() -> list[str]:
    """Return every public entry, sorted; takes about a minute."""
    return sorted({*of_python(), *of_records(), *of_commands(), *of_documents()})


def of_python() -> Iterator[str]:
    for name in attnforge.__all__:
        yield f"python: {name}"
        value = getattr(attnforge, name)
        if inspect.isclass(value):
            yield from _members(value)
        elif callable(value):
            yield from _parameters(name, value)
    yield from _members(Decoder)
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.AttnforgeError):
            yield f"python: errors.{name}"
    yield from (f"python: deploy({name})" for name in inspect.signature(DeployOptions).parameters)
    yield from (f"python: alias {name}" for name in ALIASES)
    with attnforge.load(GOLDEN / "encoder-fp32", "onnxruntime-cpu") as session:
        for kept in (session, session.bundle):
            yield from (f"python: {type(kept).__name__}.{name}" for name in vars(kept) if not name.startswith("_"))


def _members(of: type) -> Iterator[str]:
    yield from _parameters(of.__name__, of)
    fields = {*inspect.get_annotations(of), *getattr(of, "__dataclass_fields__", ())}
    for name, member in [*inspect.getmembers(of), *((name, None) for name in fields)]:
        if not name.startswith("_") or name == "__call__":
            yield f"python: {of.__name__}.{name}"
            if inspect.isfunction(member):
                yield from _parameters(f"{of.__name__}.{name}", member)


def _parameters(name: str, function: Any) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters:
        if parameter != "self" and not parameter.startswith("_"):
            yield f"python: {name}({parameter})"


def of_records() -> Iterator[str]:
    for record in RECORDS:
        yield from _fields(record)


def _fields(record: type[BaseModel]) -> Iterator[str]:
    schema = record.model_json_schema(mode="serialization")
    for name, definition in {record.__name__: schema, **schema.get("$defs", {})}.items():
        yield from (f"record: {name}.{field}" for field in definition.get("properties", {}))


def of_commands() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    for command in (group, *group.commands.values()):
        name = "" if command is group else f"{command.name} "
        for parameter in command.params:
            flags = [*parameter.opts, *parameter.secondary_opts]
            yield from (f"command: {name}{flag}" for flag in flags)


def of_documents() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        new_key(Path("my.key"))
        np.save("x.npy", np.ones((1, 7, 16), np.float32))
        for line in RUNS:
            command = line.split()[0]
            document = _document(line)
            if line == "models":
                document = next(iter(document.values()))  # by the models' names
            yield from (f"document: {command} {key}" for key in document)
    yield from (f"document: demo {field.name}" for field in fields(Demo))


def _document(line: str) -> Any:
    places = {"ENCODER": str(GOLDEN / "encoder-fp32"), "DECODER": str(GOLDEN / "decoder-fp32")}
    before, sys.argv = sys.argv, ["attnforge", *(places.get(word, word) for word in line.split()), "--json"]
    try:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
            main()
    except SystemExit:
        pass
    finally:
        sys.argv = before
    return json.loads(out.getvalue())


if __name__ == "__main__":
    FILE.write_text(json.dumps(public(), indent=0) + "\n", encoding="utf-8")
