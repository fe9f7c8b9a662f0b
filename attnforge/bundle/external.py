"""External files that an ONNX model refers to. Importing this module imports onnx."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message
from onnx import ModelProto, TensorProto

_WITHOUT_TENSORS = ("ValueInfoProto", "StringStringEntryProto")


def messages(model: ModelProto) -> Iterator[Message]:
    """Yield all messages of a model, at any depth, except value infos and metadata entries: graphs, functions, training
    information, nodes, attributes and tensors, including the parts of sparse tensors."""
    todo: list[Message] = [model]
    while todo:
        message = todo.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None and field.message_type.name not in _WITHOUT_TENSORS:
                todo += value if field.is_repeated else [value]


def locations(message: Message) -> list[str]:
    """Return the names of the files with a tensor's external data, relative to the model's folder. Libraries differ on
    which of several entries counts, so all are returned."""
    if not isinstance(message, TensorProto):
        return []
    return [entry.value for entry in message.external_data if entry.key == "location"]
