"""TensorRT's backend on a GPU that TensorRT-RTX does not support, where NVIDIA's package index cannot be reached.

TensorRT's lean runtime, which runs plans but cannot build them, is on PyPI in current versions, and so is TensorRT 8.6
with its builder. TensorRT 10's lean runtime runs a version-compatible plan of 8.6 with the copy of 8.6's lean runtime
that the plan contains (TensorRT Developer Guide, "Version Compatibility"); TensorRT 11 refuses it. So 10.16 runs here
what 8.6 builds from the model that is in every bundle for TensorRT, in attnforge's own session.

8.6 has no strongly typed networks: each layer is held to the type of its output, and inputs of int64 become int32. The
plan has fewer functions than one of 10.16, and :class:`.plans.LeanTensorRT` does without these.

Set up, on a machine with an NVIDIA GPU: an environment of Python 3.10 with `tensorrt==8.6.0` and
`tensorrt_lean==8.6.0`; in this environment `tensorrt_lean_cu13_bindings==10.16.1.11` and the `_libs` of that name.
Then, with `ATTNFORGE_TENSORRT_8` set to the first one's `python`:

    python -m benchmarks.gpu
    python -m benchmarks.gpu.lean BUNDLE…
    python -m pytest -p benchmarks.gpu.lean.plugin tests/runtime/test_gpu.py -k "not rtx and not onnxruntime"
"""
