"""A model's `config.pbtxt`, whole, from the bundle's manifest.

The fields are those of `model_config.proto` (https://github.com/triton-inference-server/common), written as text, so
that packaging needs no protobuf of Triton's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import UnavailableError
from attnforge.serving.open_inference import DATATYPES


class Word(str):
    """A text without quotes: the name of an enumeration's value."""


Message = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """An input of a warm-up request.

    Attributes:
        spec: the input.
        shape: of the numbers in the file, with the batch where requests are not joined.
        file: name of the file with the numbers, in the model's folder `warmup`.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Warmup:
    """A warm-up request: Triton runs it before the model is ready.

    Attributes:
        name: of the reference case.
        batch: how many of it are joined.
        samples: the inputs.
    """

    name: str
    batch: int
    samples: Sequence[Sample]


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


def warmup(sample: Warmup) -> Message:
    """A warm-up request."""
    inputs = [
        {
            "key": part.spec.name,
            "value": {
                "data_type": Word(f"TYPE_{DATATYPES[part.spec.dtype]}"),
                "dims": list(part.shape) or [1],
                "input_data_file": part.file,
            },
        }
        for part in sample.samples
    ]
    return {"name": sample.name, "batch_size": sample.batch, "inputs": inputs}


def parameters(values: Mapping[str, str]) -> list[Message]:
    """The parameters that a backend reads."""
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items()]


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
