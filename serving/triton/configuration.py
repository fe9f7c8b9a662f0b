"""The complete `config.pbtxt` of a model, from the bundle's manifest.

The fields are those of `model_config.proto` (https://github.com/triton-inference-server/common), written as text, so
that packaging does not need Triton's protobuf definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import UnavailableError
from attnforge.serving.open_inference import DATATYPES


class Word(str):
    """A string that is written without quotes: the name of an enum value."""


Message = Mapping[str, Any]


def tensor(spec: TensorSpec, *, batched: bool) -> Message:
    """Return an input or output, without its batch dim if there is one.

    Args:
        spec: the tensor in the manifest.
        batched: whether Triton adds the first dim itself.

    Raises:
        UnavailableError: Triton does not support the tensor.
    """
    dims = [-1 if isinstance(dim, DimSpec) else dim for dim in spec.dims[1 if batched else 0 :]]
    if 0 in dims:
        raise UnavailableError(f"{spec.name} is {spec.text()}, but Triton does not support dims of size 0")
    return {
        "name": spec.name,
        "data_type": Word(f"TYPE_{DATATYPES[spec.dtype]}"),
        "dims": dims or [1],
        # Triton requires a dim, and removes it again; without a batch it would not
        "reshape": {} if batched and not dims else [],
    }


def sample(spec: TensorSpec, shape: Sequence[int], file: str) -> Message:
    """Return an input of a warm-up request.

    Args:
        spec: the input.
        shape: shape of the data in the file, with the batch if requests are not joined.
        file: name of the data file, in the model's folder `warmup`.
    """
    kind = Word(f"TYPE_{DATATYPES[spec.dtype]}")
    return {"key": spec.name, "value": {"data_type": kind, "dims": list(shape) or [1], "input_data_file": file}}


def text(message: Message) -> str:
    """Return a message in protobuf's text format (https://protobuf.dev/reference/protobuf/textformat-spec/).

    Args:
        message: values by field: messages, numbers, booleans, strings, and lists of these. An empty list is left out.
    """
    return "\n".join(_lines(message)) + "\n"


def _lines(message: Message) -> Iterator[str]:
    for field, value in message.items():
        if isinstance(value, list) and value and not isinstance(value[0], Mapping):
            yield f"{field}: [{', '.join(_scalar(item) for item in value)}]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield f"{field} {{"
                yield from (f"  {line}" for line in _lines(item))
                yield "}"
            else:
                yield f"{field}: {_scalar(item)}"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not isinstance(value, Word):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
