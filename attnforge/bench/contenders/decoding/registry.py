"""The contenders of decoding by name."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec

from attnforge.bench.contenders.decoding.in_onnxruntime import concat, concat_products, genai_operator
from attnforge.bench.contenders.decoding.in_torch import compiled_static, eager_dynamic, eager_static
from attnforge.bench.contenders.decoding.stepper import Stepper
from attnforge.bench.contenders.peers import Peer, PeerJob
from attnforge.errors import UnavailableError


def _not_written(package: str, name: str) -> Peer[Stepper]:
    """A library that decodes by its own loop and files, for which there is no contender."""

    def refuse(job: PeerJob, stack: ExitStack) -> Stepper:
        if find_spec(package) is None:
            raise UnavailableError(f"{name} is not installed here")
        raise UnavailableError(f"{name} is installed, but it runs models in files of its own; not measured")

    return Peer("the library", package, make=refuse)


IN_ORT = "onnxruntime"

DECODING_PEERS: dict[str, Peer[Stepper]] = {
    "eager-static": Peer("the module, with a cache of fixed size", make=eager_static),
    "eager-dynamic": Peer("the module, with transformers' default cache, which grows", make=eager_dynamic),
    "torch-compile": Peer(
        "the module with a cache of fixed size, its steps through torch.compile", make=compiled_static, any_sizes=False
    ),
    "onnxruntime-concat": Peer(
        "ONNX Runtime on the canonical step with caches by concatenation, and the standard Attention",
        IN_ORT,
        make=concat,
    ),
    "onnxruntime-concat-products": Peer(
        "the same with attention as products and softmax, as optimum exports it", IN_ORT, make=concat_products
    ),
    "onnxruntime-genai-operator": Peer(
        "ONNX Runtime on the canonical step with onnxruntime-genai's operator: GroupQueryAttention with do_rotary",
        IN_ORT,
        make=genai_operator,
    ),
    "onnxruntime-genai": _not_written("onnxruntime_genai", "onnxruntime-genai"),
    "openvino-genai": _not_written("openvino_genai", "OpenVINO GenAI"),
}
"""By name."""
