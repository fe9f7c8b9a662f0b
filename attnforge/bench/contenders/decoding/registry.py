"""The contenders of decoding by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec

from attnforge.bench.contenders.decoding.in_onnxruntime import concat, concat_products, genai_operator
from attnforge.bench.contenders.decoding.in_torch import compiled_static, eager_dynamic, eager_static
from attnforge.bench.contenders.decoding.stepper import DecodingJob, Stepper
from attnforge.errors import UnavailableError


@dataclass(frozen=True)
class DecodingPeer:
    """Another way to decode with the same weights.

    Attributes:
        what: a line about it.
        open: makes it; raises whatever refuses the model.
        stays: whether it stays open for all rounds, because to open it takes long.
        in_torch: whether it runs the module, and not the bundle's graph.
    """

    what: str
    open: Callable[[DecodingJob, ExitStack], Stepper]
    stays: bool = False
    in_torch: bool = False


def _not_written(package: str, name: str) -> Callable[[DecodingJob, ExitStack], Stepper]:
    """A library that decodes by its own loop and files, for which there is no contender."""

    def refuse(job: DecodingJob, stack: ExitStack) -> Stepper:
        if find_spec(package) is None:
            raise UnavailableError(f"{name} is not installed here")
        raise UnavailableError(f"{name} is installed, but it runs models in files of its own; not measured")

    return refuse


DECODING_PEERS: dict[str, DecodingPeer] = {
    "eager-static": DecodingPeer("the module, with a cache of fixed size", eager_static, in_torch=True),
    "eager-dynamic": DecodingPeer(
        "the module, with transformers' default cache, which grows", eager_dynamic, in_torch=True
    ),
    "torch-compile": DecodingPeer(
        "the module with a cache of fixed size, its steps through torch.compile",
        compiled_static,
        stays=True,
        in_torch=True,
    ),
    "onnxruntime-concat": DecodingPeer(
        "ONNX Runtime on the canonical step with caches by concatenation, and the standard Attention", concat
    ),
    "onnxruntime-concat-products": DecodingPeer(
        "the same with attention as products and softmax, as optimum exports it", concat_products
    ),
    "onnxruntime-genai-operator": DecodingPeer(
        "ONNX Runtime on the canonical step with onnxruntime-genai's operator: GroupQueryAttention with do_rotary",
        genai_operator,
    ),
    "onnxruntime-genai": DecodingPeer("the library", _not_written("onnxruntime_genai", "onnxruntime-genai")),
    "openvino-genai": DecodingPeer("the library", _not_written("openvino_genai", "OpenVINO GenAI")),
}
"""By name."""
