"""JSON requests and responses of the Open Inference Protocol: tensors by name, with shape, datatype and data.

https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnforge.arrays import BFLOAT16, Array, without_bfloat16
from attnforge.errors import InputError, RunError, first_line, shortened

DATATYPES = {
    "bool": "BOOL", "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "uint8": "UINT8",
    "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "float16": "FP16", "bfloat16": "BF16",
    "float32": "FP32", "float64": "FP64",
}  # fmt: skip
"""The protocol's datatypes, by NumPy's names."""

_TAKEN = {"b": "b", "i": "iu", "u": "iu"}
"""Kinds of numbers, as NumPy reads them, that are accepted for each kind; others would be silently rounded or cut."""

_TYPES = {theirs: BFLOAT16 if ours == BFLOAT16.name else np.dtype(ours) for ours, theirs in DATATYPES.items()}


def inputs_of(body: bytes) -> dict[str, Array]:
    """Return the inputs of a request, by name.

    Raises:
        InputError: the body is not a valid request; the message shows the format.
    """
    try:
        return {str(tensor["name"]): _array(tensor) for tensor in json.loads(body)["inputs"]}
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"not a valid inference request ({type(error).__name__}: {shortened(first_line(error), 120)}); send "
            '{"inputs": [{"name": …, "shape": [1, …], "datatype": "FP32", "data": […]}]}'
        ) from error


def _array(tensor: Mapping[str, Any]) -> Array:
    name, kind, shape = tensor["name"], tensor["datatype"], tensor["shape"]
    if kind not in _TYPES:
        raise InputError(f"input {name!r} is {kind!r}; the datatypes are {', '.join(sorted(_TYPES))}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise InputError(f"input {name!r} has shape {shape}; give a whole number for every dim")
    try:
        given, dtype = np.asarray(tensor["data"]), _TYPES[kind]
        if given.size and given.dtype.kind not in _TAKEN.get(dtype.kind, "iuf"):
            raise TypeError(f"{given.dtype.name} was given")
        array = np.asarray(tensor["data"], dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(f"the data of input {name!r} are not {kind}: {shortened(first_line(error), 120)}") from error
    if array.size != math.prod(shape):
        raise InputError(f"input {name!r} has {array.size} numbers; its shape {shape} takes {math.prod(shape)}")
    return array.reshape(shape)


def document_of(model: str, outputs: Mapping[str, Array]) -> dict[str, Any]:
    """Return the response as a document.

    Args:
        model: name of the model.
        outputs: outputs by name.

    Raises:
        RunError: an output has values that JSON cannot represent.
    """
    return {"model_name": model, "outputs": [_tensor(name, array) for name, array in outputs.items()]}


def _tensor(name: str, array: Array) -> dict[str, Any]:
    numbers = without_bfloat16(array)
    if not np.isfinite(numbers).all():
        raise RunError(f"output {name!r} has NaN or infinity, which JSON cannot represent; use a Ray Serve handle")
    kind = DATATYPES[array.dtype.name]
    return {"name": name, "shape": list(array.shape), "datatype": kind, "data": numbers.ravel().tolist()}
