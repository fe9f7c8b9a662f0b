"""What an ONNX model names outside itself. Importing this module imports onnx."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message
from onnx import ModelProto, TensorProto

_WITHOUT_TENSORS = ("ValueInfoProto", "StringStringEntryProto")


def messages(model: ModelProto) -> Iterator[Message]:
    """All that a model consists of, however deep, but descriptions of values and pairs of texts: its graphs, functions
    and training, their nodes with their attributes, and every tensor, also those that a sparse one consists of."""
    todo: list[Message] = [model]
    while todo:
        message = todo.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None and field.message_type.name not in _WITHOUT_TENSORS:
                todo += value if field.is_repeated else [value]


def locations(message: Message) -> list[str]:
    """The names of the files in which the numbers of a tensor stand, as the model has them: relative to its folder.
    Libraries differ on which counts where there are several, so each of them does."""
    if not isinstance(message, TensorProto):
        return []
    return [entry.value for entry in message.external_data if entry.key == "location"]
