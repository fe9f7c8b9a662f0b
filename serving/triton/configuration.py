"""A model's `config.pbtxt`, whole, from the bundle's manifest.

The fields are those of `model_config.proto` (https://github.com/triton-inference-server/common), written as text, so
that packaging needs no protobuf of Triton's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import UnavailableError
from attnforge.serving.open_inference import DATATYPES


class Word(str):
    """A text without quotes: the name of an enumeration's value."""


Message = Mapping[str, Any]


def tensor(spec: TensorSpec, *, batched: bool) -> Message:
    """An input or output, without the batch where there is one.

    Args:
        spec: as the manifest has it.
        batched: whether Triton counts the first dim itself.

    Raises:
        UnavailableError: Triton cannot hold it.
    """
    dims = [-1 if isinstance(dim, DimSpec) else dim for dim in spec.dims[1 if batched else 0 :]]
    if 0 in dims:
        raise UnavailableError(f"{spec.name} is {spec.text()}, and Triton knows no dim of size 0")
    message: dict[str, Any] = {
        "name": spec.name,
        "data_type": Word(f"TYPE_{DATATYPES[spec.dtype]}"),
        "dims": dims or [1],
    }
    if batched and not dims:  # Triton wants a dim, and takes it away again; without a batch it would not
        message["reshape"] = {}
    return message


def sample(spec: TensorSpec, shape: Sequence[int], file: str) -> Message:
    """An input of a warm-up request.

    Args:
        spec: the input.
        shape: of the numbers in the file, with the batch where requests are not joined.
        file: name of the file with the numbers, in the model's folder `warmup`.
    """
    kind = Word(f"TYPE_{DATATYPES[spec.dtype]}")
    return {"key": spec.name, "value": {"data_type": kind, "dims": list(shape) or [1], "input_data_file": file}}


def text(message: Message) -> str:
    """A message in protobuf's text format (https://protobuf.dev/reference/protobuf/textformat-spec/).

    Args:
        message: values by field: messages, numbers, truth values, texts, and lists of these.
    """
    return "\n".join(_lines(message)) + "\n"


def _lines(message: Message) -> Iterator[str]:
    for field, value in message.items():
        if isinstance(value, list) and not any(isinstance(item, Mapping) for item in value):
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
