"""Peers of a bundle in 8 bits: the tools that quantise models for ONNX Runtime, OpenVINO and torch, as their makers
advise.

Each starts from the exporter's fp32 graph, or from the module, and calibrates on the bundle's real data where it needs
some.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from attnforge.arrays import Array
from attnforge.bench.contenders.engines import Runner
from attnforge.bench.contenders.peers import Peer, PeerJob, plain_file, torch_runner, with_threads
from attnforge.errors import UnavailableError
from attnforge.precision import precision_named
from attnforge.quiet import quiet
from attnforge.runtime.cases import make_inputs
from attnforge.runtime.parity.verify import stored_inputs

PRODUCTS = ["MatMul", "Gemm"]


def _check_quantised(job: PeerJob) -> None:
    """Check that somebody asked for a quantised peer.

    Raises:
        UnavailableError: the bundle is in no 8 bits.
    """
    if job.bundle.manifest.quantised is None:
        raise UnavailableError(f"it quantises to 8 bits, and the bundle is {job.precision.name}")


def _fp32_file(job: PeerJob) -> Path:
    """The exporter's graph in fp32.

    Raises:
        UnavailableError: the bundle is in no 8 bits.
    """
    _check_quantised(job)
    return plain_file(job, "fp32")


def _real_data(job: PeerJob) -> list[dict[str, Array]]:
    """The bundle's real inputs.

    Raises:
        UnavailableError: it was deployed without.
    """
    manifest, stored = job.bundle.manifest, stored_inputs(job.bundle)
    data = [make_inputs(case, manifest.inputs, stored) for case in manifest.cases if case.kind == "data"]
    if not data:
        raise UnavailableError("it calibrates on real data, and the bundle was deployed without")
    return data


def _dynamic_file(job: PeerJob) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file = job.folder / "onnxruntime-dynamic.onnx"
    if not file.exists():
        with quiet():
            quantize_dynamic(
                _fp32_file(job), file, PRODUCTS, per_channel=True, weight_type=QuantType.QInt8,
                use_external_data_format=True, extra_options={"MatMulConstBOnly": True},
            )  # fmt: skip
    return file


def _static_file(job: PeerJob) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, data: Iterator[dict[str, Array]]) -> None:
            self._data = data

        def get_next(self) -> dict[str, Array] | None:
            return next(self._data, None)

    file = job.folder / "onnxruntime-static.onnx"
    if not file.exists():
        source, data = _fp32_file(job), _real_data(job)
        with quiet():
            quantize_static(
                source, file, Reader(iter(data)), QuantFormat.QDQ, PRODUCTS, per_channel=True,
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
                use_external_data_format=True, extra_options={"MatMulConstBOnly": True},
            )  # fmt: skip
    return file


def _nncf_file(job: PeerJob) -> Path:
    if importlib.util.find_spec("nncf") is None:
        raise UnavailableError("nncf is not installed; pip install nncf")
    import openvino

    os.environ.setdefault("NNCF_CI", "1")  # else it sends its maker what it is used for
    nncf: Any = importlib.import_module("nncf")
    file = job.folder / "openvino-nncf.xml"
    if not file.exists():
        source, data = _fp32_file(job), _real_data(job)
        with quiet():
            model = openvino.Core().read_model(source)
            transformer = nncf.ModelType.TRANSFORMER
            model = nncf.quantize(model, nncf.Dataset(data), model_type=transformer, subset_size=len(data))
            openvino.save_model(model, file, compress_to_fp16=False)
    return file


def _open_torchao(job: PeerJob, stack: ExitStack) -> Runner:
    """Weights by output channel, and inputs by token, as torchao ranges them on every call."""
    _check_quantised(job)
    if importlib.util.find_spec("torchao") is None:
        raise UnavailableError("torchao is not installed; pip install torchao")
    torchao: Any = importlib.import_module("torchao.quantization")
    fp32 = precision_named("fp32")
    with_threads(job.threads, stack)
    torch.compiler.reset()
    module = copy.deepcopy(job.torch_module(fp32))
    torchao.quantize_(module, torchao.Int8DynamicActivationInt8WeightConfig())
    return torch_runner(torch.compile(module, dynamic=False), fp32)


QUANTISED: dict[str, Peer] = {
    "onnxruntime-dynamic": Peer("ONNX Runtime's own quantize_dynamic", "onnxruntime", _dynamic_file),
    "onnxruntime-static": Peer("ONNX Runtime's own quantize_static", "onnxruntime", _static_file),
    "openvino-nncf": Peer("OpenVINO on what NNCF quantised, for transformers", "openvino", _nncf_file),
    "torchao-int8": Peer("torchao's int8 through torch.compile", module=_open_torchao, any_sizes=False),
}
"""By name."""
