"""Polygraphy's JSON files of inputs and results, as `polygraphy run` (0.53) reads and writes them, without Polygraphy.

Arrays are `.npy` files in base64. Polygraphy's reader imports torch and unpickles torch tensors; this one decodes only
numbers, so that untrusted files can be read.

- Inputs, `--load-inputs`: a list of `{input: array}`, one per iteration.
- Results, `--load-outputs` and `--save-outputs`: by runner, a list of `{output: array}`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from attnforge.arrays import Array
from attnforge.errors import InputError, raised_as, shortened
from attnforge.files import open_regular
from attnforge.input_files import npy
from attnforge.memory import available

KIND = "polygraphy_class"
"""Key of an object's type in Polygraphy's JSON."""

MOST_VALUES = 200_000
"""Maximum number of values in a file of results, not counting elements of arrays."""

COPIES = 4
"""Memory for reading a file, as a multiple of its size: the bytes, their text, and the arrays."""

Outputs = Mapping[str, str]
"""Outputs of one iteration by name, each an `.npy` in base64."""


def write_inputs(stream: IO[bytes], iterations: Iterable[Mapping[str, Array]]) -> None:
    """Write inputs for `--load-inputs`, one iteration after another.

    Args:
        stream: the open file.
        iterations: inputs by name, per iteration.
    """
    for index, feeds in enumerate(iterations):
        stream.write(b"[\n" if index == 0 else b",\n")
        stream.write(json.dumps({name: _encoded(array) for name, array in feeds.items()}).encode())
    stream.write(b"\n]\n")


def write_results(stream: IO[bytes], runner: str, iterations: Iterable[tuple[str, Mapping[str, Array]]]) -> None:
    """Write results of one runner for `--load-outputs`, one iteration after another.

    Args:
        stream: the open file.
        runner: name of the runner.
        iterations: name of the runner and outputs by name, per iteration.
    """
    stream.write(f'{{"{KIND}": "RunResults", "lst": [[{json.dumps(runner)}, ['.encode())
    for index, (name, arrays) in enumerate(iterations):
        stream.write(b"\n" if index == 0 else b",\n")
        outputs = {output: {"values": _encoded(array), KIND: "LazyArray"} for output, array in arrays.items()}
        iteration = {"outputs": outputs, "runtime": None, "runner_name": name, KIND: "IterationResult"}
        stream.write(json.dumps(iteration).encode())
    stream.write(b"\n]]]}\n")


def _encoded(array: Array) -> dict[str, str]:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return {"array": base64.b64encode(stream.getvalue()).decode(), KIND: "ndarray"}


def read_results(file: Path) -> dict[str, list[Outputs]]:
    """Return the iterations of every runner in a file of `--save-outputs`. :func:`array_of` decodes the arrays one by
    one.

    Raises:
        InputError: it is not such a file, is too large for this machine's memory, or contains torch tensors, which are
            pickles.
    """
    where = shortened(str(file))
    with raised_as(InputError, f"{where} cannot be read as Polygraphy results"):
        with open_regular(file, follow=True) as stream:
            size = file.stat().st_size
            if (left := available()) is not None and COPIES * size > left:
                raise InputError(
                    f"{where} has {size / 2**30:,.2f} GiB, and reading it takes {COPIES} times as much; this machine "
                    f"has {left / 2**30:,.1f} GiB left"
                )
            data = stream.read(size)
        if data.count(b",") > MOST_VALUES:
            raise InputError(f"{where} has no Polygraphy results: it has more than {MOST_VALUES:,} values")
        document = json.loads(data)
    if not isinstance(document, dict) or document.get(KIND) != "RunResults":
        raise InputError(f"{where} has no Polygraphy results; write them with polygraphy run --save-outputs")
    if not isinstance(document.get("lst"), list):
        raise InputError(f"{where} has no list of runs")
    runs: dict[str, list[Outputs]] = {}
    for run in document["lst"]:
        match run:
            case [str(name), [*iterations]] if name not in runs:
                runs[name] = [_outputs(iteration, f"{where}, {shortened(name, 80)}") for iteration in iterations]
            case [str(name), [*_]]:
                raise InputError(f"{where} has two runners named {shortened(name, 80)!r}; give each its own file")
            case _:
                raise InputError(f"{where} has a run without a name and iterations")
    return runs


def _outputs(iteration: Any, where: str) -> Outputs:
    match iteration:
        case {"polygraphy_class": "IterationResult", "outputs": dict(outputs)}:
            return {name: _text(value, f"{where}, {shortened(name, 80)}") for name, value in outputs.items()}
    raise InputError(f"{where} has an iteration without outputs")


def _text(value: Any, where: str) -> str:
    match value:
        case {"polygraphy_class": "LazyArray", "values": {"polygraphy_class": "ndarray", "array": str(text)}}:
            return text
        case {"polygraphy_class": "LazyArray", "values": {"polygraphy_class": "Tensor"}}:
            raise InputError(f"{where} is a torch tensor, a pickle, which is not read; save NumPy arrays instead")
    raise InputError(f"{where} is not an array")


def array_of(text: str, where: str) -> Array:
    """Decode the array of an output.

    Args:
        text: an `.npy` in base64.
        where: location of the array, for messages.

    Raises:
        InputError: it is not an `.npy`, or contains Python objects.
    """
    with raised_as(InputError, f"{where} is not an array that NumPy reads"):  # which raises many types of errors
        data = base64.b64decode(text, validate=True)
        return npy(io.BytesIO(data), len(data), where)
