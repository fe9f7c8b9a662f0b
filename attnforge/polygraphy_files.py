"""Polygraphy's JSON of inputs and of results, as `polygraphy run` reads and writes it (0.53), without Polygraphy.

Its arrays are NumPy's `.npy` in base64. Its own reader imports torch and decodes torch's tensors; this one decodes
numbers alone, so that a file of anybody's can be read.

- Inputs, `--load-inputs`: a list of `{input: array}`, one for each iteration.
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
from attnforge.errors import InputError, first_line, raised_as, shortened
from attnforge.files import open_regular
from attnforge.input_files import npy
from attnforge.memory import available

KIND = "polygraphy_class"
"""The key under which Polygraphy writes what an object is."""

MOST_VALUES = 200_000
"""Values in a file of results, beside the numbers of its arrays."""

COPIES = 4
"""How many times the bytes of a file reading it takes: the bytes, their text, and the arrays."""

Outputs = Mapping[str, str]
"""Outputs of one iteration by name, each an `.npy` in base64."""


def write_inputs(stream: IO[bytes], iterations: Iterable[Mapping[str, Array]]) -> None:
    """Write inputs for `--load-inputs`, one iteration after another.

    Args:
        stream: of the file.
        iterations: of each the inputs by name.
    """
    for place, feeds in enumerate(iterations):
        stream.write(b"[\n" if place == 0 else b",\n")
        stream.write(json.dumps({name: _encoded(array) for name, array in feeds.items()}).encode())
    stream.write(b"\n]\n")


def write_results(stream: IO[bytes], runner: str, iterations: Iterable[tuple[str, Mapping[str, Array]]]) -> None:
    """Write results of one runner for `--load-outputs`, one iteration after another.

    Args:
        stream: of the file.
        runner: its name.
        iterations: of each a name of the runner, and the outputs by name.
    """
    stream.write(f'{{"{KIND}": "RunResults", "lst": [[{json.dumps(runner)}, ['.encode())
    for place, (name, arrays) in enumerate(iterations):
        stream.write(b"\n" if place == 0 else b",\n")
        outputs = {output: {"values": _encoded(array), KIND: "LazyArray"} for output, array in arrays.items()}
        iteration = {"outputs": outputs, "runtime": None, "runner_name": name, KIND: "IterationResult"}
        stream.write(json.dumps(iteration).encode())
    stream.write(b"\n]]]}\n")


def _encoded(array: Array) -> dict[str, str]:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return {"array": base64.b64encode(stream.getvalue()).decode(), KIND: "ndarray"}


def read_results(file: Path) -> dict[str, list[Outputs]]:
    """The iterations of every runner in a file of `--save-outputs`. Arrays are decoded one by one, by :func:`array_of`.

    Raises:
        InputError: it is no such file, is too large for this machine's memory, or holds torch's tensors, which are
            pickles.
    """
    where = shortened(str(file))
    try:
        with open_regular(file, follow=True) as stream:
            size = file.stat().st_size
            if (left := available()) is not None and COPIES * size > left:
                raise InputError(
                    f"{where} has {size / 2**30:,.2f} GiB, and reading it takes {COPIES} times as much; this machine "
                    f"has {left / 2**30:,.1f} GiB left"
                )
            data = stream.read(size)
        if data.count(b",") > MOST_VALUES:
            raise InputError(f"{where} holds no results of Polygraphy: it has more than {MOST_VALUES:,} values")
        document = json.loads(data)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{where} cannot be read as results of Polygraphy: {first_line(error)}") from error
    if not isinstance(document, dict) or document.get(KIND) != "RunResults":
        raise InputError(f"{where} holds no results of Polygraphy; write them by polygraphy run --save-outputs")
    if not isinstance(document.get("lst"), list):
        raise InputError(f"{where} has no list of runs")
    runs: dict[str, list[Outputs]] = {}
    for run in document["lst"]:
        match run:
            case [str(name), [*iterations]] if name not in runs:
                runs[name] = [_outputs(iteration, f"{where}, {shortened(name, 80)}") for iteration in iterations]
            case [str(name), [*_]]:
                raise InputError(f"{where} has two runners of the name {shortened(name, 80)!r}; give each its own file")
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
            raise InputError(f"{where} is torch's, a pickle, which is not read; let the runner give NumPy arrays")
    raise InputError(f"{where} is no array")


def array_of(text: str, where: str) -> Array:
    """The array of an output.

    Args:
        text: an `.npy` in base64.
        where: it stands, for messages.

    Raises:
        InputError: it is none, or holds Python's objects.
    """
    with raised_as(InputError, f"{where} is no array that NumPy reads"):  # whose errors are of many kinds
        data = base64.b64decode(text, validate=True)
        return npy(io.BytesIO(data), len(data), where)
