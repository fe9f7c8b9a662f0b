"""The peers by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from attnforge.bench.contenders.peers import FLOATING
from attnforge.bench.contenders.quantised import QUANTISED
from attnforge.machine import cuda_devices

PEERS = {**FLOATING, **QUANTISED}

ON_GPU = ("onnxruntime-cuda-plain", "torch-tensorrt")


def expanded(against: Iterable[str], every: Callable[[], Iterable[str]]) -> list[str]:
    """Return the names of peers, each once, with `all` replaced by the names of `every`."""
    return list(dict.fromkeys(name for given in against for name in (every() if given == "all" else [given])))


def peers_here(precisions: Collection[str] = ()) -> list[str]:
    """Return the peers that can run on this machine: GPU peers only if it has a GPU, and quantised peers only if int8
    is among the bundles' precisions."""
    return [
        name
        for name in PEERS
        if (name not in ON_GPU or cuda_devices()) and (name not in QUANTISED or "int8" in precisions)
    ]
