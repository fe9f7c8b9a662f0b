"""Peers: other ways to run the same weights, which a deployed model is compared with.

Peers in ONNX Runtime and OpenVINO run the exporter's graph, which is written once; those in torch run the module that
was deployed. All have the same number of threads, and compute at the bundle's precision.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from torch.export import Dim

from attnforge.arrays import Array, to_numpy, to_torch
from attnforge.bench.contenders.engines import ENGINES, Runner, Setup, why_no_products, wide
from attnforge.bundle import CANONICAL, Decoding, DimSpec, Source, TensorSpec
from attnforge.errors import UnavailableError, UntrustedError
from attnforge.export.graphs.saving import load_graph, save
from attnforge.export.sources.named import check_trusted, rebuild
from attnforge.export.sources.onnx_file import Imported, import_graph
from attnforge.export.sources.torch_module import capture
from attnforge.export.sources.widened import Float64
from attnforge.precision import Precision, precision_named
from attnforge.quiet import quiet
from attnforge.runtime.backends.eager import as_written, at_precision, named_outputs, run, torch_dtype

T = TypeVar("T")
"""The runner of a contender: a function of inputs, or a decoder that takes steps."""


@dataclass
class PeerJob(Setup):
    """The setup that peers are loaded for.

    Attributes:
        folder: folder of their files, each written once and shared with other processes.
        given: the module that was deployed, if the bundle does not say how to rebuild it.
        trust_source: whether what the bundle's manifest names may be imported, opened and run.
        precision: the bundle's precision.
    """

    folder: Path
    given: Any = None
    trust_source: bool = False
    precision: Precision = field(init=False)

    def __post_init__(self) -> None:
        self.precision = precision_named(self.bundle.manifest.precision)

    @cached_property
    def module(self) -> Any:
        """The module, or the graph, that the bundle was deployed from.

        Raises:
            UntrustedError: the manifest names code or a file, and `trust_source` is not set.
            UsageError: the bundle was deployed from a module that is not given, or from a file that no longer exists.
        """
        if self.given is not None:
            return self.given
        manifest = self.bundle.manifest
        if manifest.source.kind != "onnx":
            return rebuild(manifest.source, self.trust_source).module
        check_trusted(manifest.source, self.trust_source)
        ranges = {name: tuple(map(int, str(text).split(":"))) for name, text in manifest.source.options.items()}
        return import_graph(manifest.source.name, ranges, manifest.eager_precision)  # type: ignore[arg-type]

    @property
    def decoding(self) -> Decoding:
        """The manifest's record of the cache, for a bundle with a cache."""
        decoding = self.bundle.manifest.decoding
        assert decoding is not None
        return decoding

    @property
    def batch(self) -> int:
        """Number of samples decoded at once; the feeds are the tokens of the longest run, `(batch, tokens)`."""
        return len(self.feeds[self.decoding.tokens])

    @property
    def output(self) -> str:
        """The name of the logits: the model's first output."""
        return self.bundle.manifest.outputs[0].name

    def file(self, name: str, write: Callable[[Path], object]) -> Path:
        """Return a file of this name in the folder; `write` creates it if it does not exist yet, without output."""
        file = self.folder / name
        if not file.exists():
            with quiet():
                write(file)
        return file

    def torch_module(self, precision: Precision | None = None) -> torch.nn.Module:
        """Return the module at a precision, by default the bundle's.

        Raises:
            UnavailableError: the bundle was deployed from an ONNX graph.
        """
        if isinstance(self.module, Imported):
            raise UnavailableError("the bundle was deployed from an ONNX graph; there is no torch module to run")
        return at_precision(self.module, precision or self.precision)


def why_no_module(source: Source, trust_source: bool) -> str | None:
    """Return why the module that a bundle was deployed from cannot be rebuilt; None if it can."""
    if source.kind == "module":
        return "the bundle does not say how to make its module again; give it to attnforge.benchmark (module=)"
    try:
        check_trusted(source, trust_source)
    except UntrustedError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Peer(Generic[T]):
    """A way to run, or to decode with, the same weights: another one, or a backend of the bundle.

    Attributes:
        what: one-line description.
        engine: name of the engine that runs its file (:data:`ENGINES`), or of the library that `make` uses; `backend`
            for a backend of the bundle.
        file: writes its file, once; raises any error of the tool that refuses the model.
        make: returns its runner, for a peer without a file.
        any_sizes: whether it runs at other sizes than those of the job.
        quantises: whether it computes in 8 bits, and so is a peer of 8-bit bundles only.
    """

    what: str
    engine: str = "torch"
    file: Callable[[PeerJob], Path] | None = None
    make: Callable[[PeerJob, ExitStack], T] | None = None
    any_sizes: bool = True
    quantises: bool = False

    @property
    def compiles(self) -> bool:
        """Whether torch compiles the module and caches the result on disk for the next process. That takes minutes, so
        a run loads the peer once."""
        return self.make is not None and not self.any_sizes

    def open(self, job: PeerJob, stack: ExitStack) -> T:
        """Return the runner of the model; raises any error of the tool that refuses it."""
        if self.engine == "onnxruntime" and (reason := why_no_products(job.precision.name)) is not None:
            raise UnavailableError(reason)  # before a model is exported in vain
        if self.quantises and job.bundle.manifest.quantised is None:
            raise UnavailableError(f"it quantises to 8 bits, but the bundle is {job.precision.name}")
        if self.file is not None:
            return ENGINES[self.engine](job, self.file(job), stack)  # type: ignore[return-value]
        assert self.make is not None
        if self.engine == "torch":
            with_threads(job.threads, stack)
        if self.compiles:
            torch.compiler.reset()  # torch.compile stops compiling after a number of models
        return self.make(job, stack)


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_runner(module: Callable[..., Any], precision: Precision, device: str = "cpu") -> Runner:
    """Return a function that runs a module on a device, with floating-point inputs converted to `precision`."""
    dtype = torch_dtype(precision)

    def run_module(feeds: dict[str, Array]) -> dict[str, Array]:
        tensors = [to_torch(array).to(device, copy=True) for array in feeds.values()]  # a module may write to them
        with torch.no_grad(), as_written():
            result = module(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors))
        return {name: to_numpy(name, value) for name, value in named_outputs(result, feeds).items()}

    return run_module


def _eager(job: PeerJob, stack: ExitStack) -> Runner:
    return torch_runner(job.torch_module(), job.precision)


def _compiled(job: PeerJob, stack: ExitStack) -> Runner:
    return torch_runner(torch.compile(job.torch_module(), dynamic=False), job.precision)


def _flex(job: PeerJob, stack: ExitStack) -> Runner:
    make = getattr(job.torch_module(), "with_flex_attention", None)
    if make is None:
        raise UnavailableError("its module has no method with_flex_attention that returns a module with flex_attention")
    return torch_runner(make(), job.precision)


def _sdpa(job: PeerJob, stack: ExitStack) -> Runner:
    source = job.bundle.manifest.source
    if source.kind == "huggingface" and job.given is None:
        options = {**source.options, "attention": "sdpa"}
        module = rebuild(source.model_copy(update={"options": options}), job.trust_source).module
        return torch_runner(at_precision(module, job.precision), job.precision)
    module = job.torch_module()

    def run_module(*tensors: Tensor) -> Any:
        with using_sdpa() as calls:
            result = module(*tensors)
        if not calls:
            raise UnavailableError(
                "its attention is not attnforge's, so torch's fused attention cannot replace it; modules of "
                "attnforge.model and hf: models can run this peer"
            )
        return result

    return torch_runner(run_module, job.precision)


@contextmanager
def using_sdpa() -> Iterator[list[None]]:
    """Make attnforge's modules compute attention with torch's `scaled_dot_product_attention`; yields a list that every
    call appends to."""
    decomposed: Any = importlib.import_module("attnforge.model.attention")  # the package has a function of that name
    calls: list[None] = []
    before = decomposed.attention

    def fused(query: Tensor, key: Tensor, value: Tensor, *, scale: float, attn_mask: Tensor | None = None) -> Tensor:
        calls.append(None)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)

    decomposed.attention = fused
    try:
        yield calls
    finally:
        decomposed.attention = before


def with_threads(threads: int, stack: ExitStack) -> None:
    """Set torch's number of threads until the stack closes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    stack.callback(torch.set_num_threads, before)


def _torch_tensorrt(job: PeerJob, stack: ExitStack) -> Runner:
    if importlib.util.find_spec("torch_tensorrt") is None:
        raise UnavailableError("torch_tensorrt is not installed; pip install torch-tensorrt")
    if not torch.cuda.is_available():
        raise UnavailableError("no CUDA device")
    compiled = torch.compile(job.torch_module().cuda(), backend="torch_tensorrt", dynamic=False)
    return torch_runner(compiled, job.precision, "cuda")


# --- the exporter's graph ---------------------------------------------------------------------------------------------


def plain_file(job: PeerJob, wide_precision: str | None = None) -> Path:
    """Return the exporter's unmodified graph, at the bundle's precision or a wider one, with its dynamic dims."""
    precision = precision_named(wide_precision or job.precision.name)

    def write(file: Path) -> None:
        if not isinstance(job.module, Imported):
            feeds = job.feeds if precision == job.precision else wide(job.feeds)
            example = [to_torch(array) for array in feeds.values()]
            save(capture(job.module, example, _dynamic_shapes(job.bundle.manifest.inputs), precision).model, file)
        elif precision == job.precision:
            save(job.module.original, file)
        else:
            raise UnavailableError(f"the bundle was deployed from an ONNX graph that is not in {precision.name}")

    return job.file(f"plain-{precision.name}.onnx", write)


def fp32_file(job: PeerJob) -> Path:
    """Return the exporter's graph in fp32: for quantisation tools, and for OpenVINO, which converts it to the requested
    precision."""
    return plain_file(job, "fp32")


def _older_file(job: PeerJob) -> Path:
    """Return the exporter's graph at opset 18, the newest that third-party optimizers support."""

    def write(file: Path) -> None:
        tensors = tuple(to_torch(array) for array in job.feeds.values())
        names = [spec.name for spec in job.bundle.manifest.outputs]
        export_at_18(job.torch_module(), tensors, _dynamic_shapes(job.bundle.manifest.inputs), file, names)

    return job.file(f"opset18-{job.precision.name}.onnx", write)


def export_at_18(
    module: torch.nn.Module, args: tuple[Tensor, ...], shapes: Any, file: Path, outputs: list[str] | None = None
) -> None:
    """Write a module with torch's exporter at opset 18."""
    module.eval()
    with quiet(), torch.no_grad(), as_written():
        program = torch.onnx.export(
            module, args, output_names=outputs, dynamo=True, opset_version=18, dynamic_shapes=shapes, verbose=False
        )
    assert program is not None
    program.save(str(file))


def _dynamic_shapes(inputs: list[TensorSpec]) -> dict[str, dict[int, Any]]:
    """Return the dynamic shapes that the bundle was deployed with, from its manifest."""
    roots: dict[str, Any] = {}
    for dim in (d for spec in inputs for d in spec.dims if isinstance(d, DimSpec)):
        low, high = (bound // dim.factor for bound in (dim.min or 0, dim.max or 0))
        roots.setdefault(dim.symbol, Dim(dim.symbol, min=low, max=high))
    return {
        spec.name: {
            i: roots[dim.symbol] if dim.factor == 1 else dim.factor * roots[dim.symbol]
            for i, dim in enumerate(spec.dims)
            if isinstance(dim, DimSpec)
        }
        for spec in inputs
    }


# --- third-party optimizers -------------------------------------------------------------------------------------------


def _by_optimizer(job: PeerJob) -> Path:
    of_text = any(spec.dtype.startswith("int") for spec in job.bundle.manifest.inputs)
    kinds = ("bert" if of_text else "vit",)  # encoders only: every other kind takes seconds for a large model

    def write(file: Path) -> None:
        onnx.save(transformers_optimizer(_older_file(job), load_graph(job.bundle, CANONICAL), kinds), file)

    return job.file(f"onnxruntime-optimizer-{job.precision.name}.onnx", write)


def _by_fusions(job: PeerJob) -> Path:
    name = f"ort-fusions-{job.precision.name}.onnx"
    return job.file(name, lambda file: onnx.save(ort_fusions(_older_file(job)), file))


KINDS = ("bert", "gpt2", "vit", "clip", "t5", "swin")
"""Model types of ONNX Runtime's optimizer."""


def transformers_optimizer(file: Path, canonical: ir.Model, kinds: Sequence[str] = KINDS) -> onnx.ModelProto:
    """Optimize a model with `onnxruntime.transformers.optimizer`; of all attempts, return the one that fuses most
    attention.

    Args:
        file: the model.
        canonical: the same model's canonical graph, which gives the numbers of heads and hidden sizes; the optimizer
            does not detect them if the batch is dynamic.
        kinds: model types to try.

    Raises:
        RuntimeError: the optimizer refuses the model with every model type.
    """
    from onnxruntime.transformers import optimizer

    models: list[onnx.ModelProto] = []
    with quiet():
        for kind, (heads, hidden) in itertools.product(kinds, widths_of(canonical)):
            with suppress(Exception):  # a model type that does not fit
                models.append(optimizer.optimize_model(str(file), kind, heads, hidden, opt_level=0).model)
    if not models:
        raise RuntimeError("it refuses the model with every model type")
    return max(models, key=fused_operators)


def widths_of(canonical: ir.Model) -> set[tuple[int, int]]:
    """Return the number of heads and the total width of all heads, for every canonical Attention node where both are
    known; zeros, which let the optimizer detect them, if no node has them."""
    widths = set()
    for node in canonical.graph:
        if node.op_type == "Attention":
            query, _, value = (value.shape if value is not None else None for value in node.inputs[:3])
            heads, head_dim = query[1] if query is not None else None, value[3] if value is not None else None
            if isinstance(heads, int) and isinstance(head_dim, int):
                widths.add((heads, heads * head_dim))
    return widths or {(0, 0)}


def ort_fusions(file: Path) -> onnx.ModelProto:
    """Return a model optimized by onnxscript's `optimize_for_ort`."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    with quiet():
        model, _ = optimize_for_ort(ir.load(file))
    return ir.to_proto(model)


def fused_operators(model: onnx.ModelProto) -> int:
    return sum(node.op_type in ("Attention", "MultiHeadAttention", "GroupQueryAttention") for node in model.graph.node)


# --- all peers --------------------------------------------------------------------------------------------------------

FLOATING: dict[str, Peer[Runner]] = {
    "eager": Peer("the module as its author wrote it", make=_eager),
    "eager-sdpa": Peer("the module with torch's fused attention", make=_sdpa),
    "torch-compile": Peer("the module through torch.compile", make=_compiled, any_sizes=False),
    "flex-attention": Peer("the module's own form for torch's compiled flex_attention", make=_flex, any_sizes=False),
    "onnxruntime-plain": Peer("ONNX Runtime on the exporter's graph", "onnxruntime", plain_file),
    "onnxruntime-optimizer": Peer(
        "ONNX Runtime after onnxruntime.transformers.optimizer", "onnxruntime", _by_optimizer
    ),
    "ort-fusions": Peer("ONNX Runtime after onnxscript's ort_fusions", "onnxruntime", _by_fusions),
    "openvino-plain": Peer("OpenVINO on the exporter's graph", "openvino", fp32_file),
    "openvino-static": Peer("the same, compiled for these sizes alone", "openvino-static", fp32_file, any_sizes=False),
    "onnxruntime-cuda-plain": Peer("ONNX Runtime on CUDA, on the exporter's graph", "onnxruntime-cuda", plain_file),
    "torch-tensorrt": Peer("the module through Torch-TensorRT", make=_torch_tensorrt, any_sizes=False),
}
"""Floating-point peers, by name."""


def expected(module: Any, precision: Precision, feeds: dict[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Return every output of eager at a precision, and of the same weights in float64, both flattened as float64."""
    if isinstance(module, Imported):
        low, truth = module.eager(feeds), module.exact(feeds)
        return {name: tuple(a.astype(np.float64).reshape(-1) for a in (low[name], truth[name])) for name in low}  # type: ignore[misc]
    copied = at_precision(module, precision)
    eager, exact = run(copied, feeds, torch_dtype(precision)), Float64(copied)(feeds)
    return {name: tuple(to_numpy(name, of[name].double()).reshape(-1) for of in (eager, exact)) for name in eager}  # type: ignore[misc]
