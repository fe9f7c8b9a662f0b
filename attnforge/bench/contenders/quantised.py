"""Peers of an 8-bit bundle: the quantisation tools for ONNX Runtime, OpenVINO and torch, as their authors recommend.

Each starts from the exporter's fp32 graph, or from the module, and calibrates on the bundle's real data if it needs
calibration.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from attnforge.arrays import Array
from attnforge.bench.contenders.engines import Runner
from attnforge.bench.contenders.peers import Peer, PeerJob, fp32_file, torch_runner
from attnforge.errors import UnavailableError
from attnforge.precision import precision_named
from attnforge.runtime.cases import make_inputs
from attnforge.runtime.parity.verify import stored_inputs

PRODUCTS = ["MatMul", "Gemm"]


OPTIONS: dict[str, Any] = {
    "per_channel": True, "use_external_data_format": True, "extra_options": {"MatMulConstBOnly": True},
}  # fmt: skip
"""Options that ONNX Runtime's authors recommend for transformers with int8 weights."""


def _real_data(job: PeerJob) -> list[dict[str, Array]]:
    """Return the bundle's real inputs.

    Raises:
        UnavailableError: it was deployed without real data.
    """
    manifest, stored = job.bundle.manifest, stored_inputs(job.bundle)
    data = [make_inputs(case, manifest.inputs, stored) for case in manifest.cases if case.kind == "data"]
    if not data:
        raise UnavailableError("it calibrates on real data, but the bundle was deployed without any")
    return data


def _dynamic_file(job: PeerJob) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    def write(file: Path) -> None:
        quantize_dynamic(fp32_file(job), file, PRODUCTS, weight_type=QuantType.QInt8, **OPTIONS)

    return job.file("onnxruntime-dynamic.onnx", write)


def _static_file(job: PeerJob) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, data: list[dict[str, Array]]) -> None:
            self._data = iter(data)

        def get_next(self) -> dict[str, Array] | None:
            return next(self._data, None)

    def write(file: Path) -> None:
        source, reader = fp32_file(job), Reader(_real_data(job))
        types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(source, file, reader, QuantFormat.QDQ, PRODUCTS, **types, **OPTIONS)

    return job.file("onnxruntime-static.onnx", write)


def _nncf_file(job: PeerJob) -> Path:
    nncf = _installed("nncf")
    import openvino

    def write(file: Path) -> None:
        source, data = openvino.Core().read_model(fp32_file(job)), _real_data(job)
        kind = nncf.ModelType.TRANSFORMER
        model = nncf.quantize(source, nncf.Dataset(data), model_type=kind, subset_size=len(data))
        openvino.save_model(model, file, compress_to_fp16=False)

    return job.file("openvino-nncf.xml", write)


def _torchao(job: PeerJob, stack: ExitStack) -> Runner:
    """Quantise with torchao: weights per output channel, and inputs per token with ranges computed on every call."""
    torchao, fp32 = _installed("torchao.quantization"), precision_named("fp32")
    module = copy.deepcopy(job.torch_module(fp32))
    torchao.quantize_(module, torchao.Int8DynamicActivationInt8WeightConfig())
    return torch_runner(torch.compile(module, dynamic=False), fp32)


def _installed(module: str) -> Any:
    """Import a tool's module.

    Raises:
        UnavailableError: its package is not installed.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        name = "'attnforge[peers]'" if package == "nncf" else package
        raise UnavailableError(f"{package} is not installed; pip install {name}")
    os.environ.setdefault("NNCF_CI", "1")  # otherwise nncf sends usage telemetry
    return importlib.import_module(module)


QUANTISED: dict[str, Peer[Runner]] = {
    "onnxruntime-dynamic": Peer("ONNX Runtime's own quantize_dynamic", "onnxruntime", _dynamic_file, quantises=True),
    "onnxruntime-static": Peer("ONNX Runtime's own quantize_static", "onnxruntime", _static_file, quantises=True),
    "openvino-nncf": Peer("OpenVINO on what NNCF quantised, for transformers", "openvino", _nncf_file, quantises=True),
    "torchao-int8": Peer("torchao's int8 through torch.compile", make=_torchao, any_sizes=False, quantises=True),
}
"""Quantised peers, by name."""
