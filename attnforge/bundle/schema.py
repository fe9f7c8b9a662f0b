"""The manifest of a bundle: every record in `manifest.json`, the types of its fields, and the names of other files.

A manifest is untrusted, so all of it is validated before anything uses it: names lead to no path outside the bundle,
numbers are finite and in range, texts have a bounded length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, StringConstraints

from attnforge.certificate import Certificate
from attnforge.errors import CONTROL
from attnforge.machine import Machine
from attnforge.precision import PRECISIONS
from attnforge.records import Record

T = TypeVar("T")

SCHEMA_VERSION = 1
FLAVOURS = ("tensorrt", "tensorrt_rtx")
OPENVINO = "openvino"
"""Key in a manifest's targets of the graph that OpenVINO runs; without it, OpenVINO runs the canonical graph."""

PORTABLE = "portable"
"""GPUs of a TensorRT-RTX plan by default: every NVIDIA GPU from Ampere on."""

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"
"""File name of a bundle's signature. The manifest does not list it."""

CANONICAL = "canonical.onnx"
TOKENIZER, PROCESSOR = "tokenizer.json", "preprocessor_config.json"
"""Files of a Hugging Face model that a bundle keeps: how texts become token ids, and pictures become pixels."""

PLAIN = "plain.onnx"
"""The graph as it was exported. Weights that the canonical graph has too are external data, in that graph's file or in
:data:`WEIGHTS`. (In older bundles they are inputs.)"""

WEIGHTS = "weights.data"
"""Weights of a large model, shared by its graphs."""

REFERENCE_OUTPUTS = "reference/outputs.safetensors"
REFERENCE_EXAMPLE = "reference/example.safetensors"


# --- types of fields -------------------------------------------------------------------------------------------------

LONGEST_NAME, LONGEST_FILE, LONGEST_SIZE = 1024, 512, 4096
"""Maximum length of a name, of a file name, and of an expression of sizes, in characters."""

LARGEST_SIZE = 2**48
"""The largest size of a dim."""

MOST_DIMS = 64
"""Maximum number of dims of a tensor, as in NumPy."""

MOST_THREADS = 1024
"""Maximum number of threads of one run."""

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64",
)  # fmt: skip
"""Dtypes of inputs and outputs."""


class StoredRecord(Record):
    """A record of the manifest. Its numbers are finite, because JSON has no others."""

    model_config = ConfigDict(allow_inf_nan=False)


def _plain(text: str) -> str:
    if CONTROL.search(text):
        raise ValueError("a name with a control character")
    return text


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or PureWindowsPath(name).drive or ".." in path.parts:
        raise ValueError(f"{name!r} is outside the bundle; do not use it")
    if path.as_posix() != name or "\\" in name or name == ".":
        raise ValueError(f"{name!r} is not a normalised relative path with /")
    return name


def _one_of(kind: str, known: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"an unknown {kind}; known: {', '.join(known)}")
        return name

    return AfterValidator(check)


Name = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME), AfterValidator(_plain)]
"""The name of a model, tensor, case or target."""

FileName = Annotated[
    str, StringConstraints(min_length=1, max_length=LONGEST_FILE), AfterValidator(_plain), AfterValidator(_inside)
]
"""The name of a file of the bundle, relative to the bundle, with `/` between folders."""

ModelName = Annotated[FileName, StringConstraints(pattern=r"\.onnx$")]
"""The name of an ONNX file of the bundle."""

OF_PACKAGES = "targets"
"""The folder of a bundle in which each target of another package has one."""

TargetFile = Annotated[FileName, StringConstraints(pattern=rf"\.onnx$|^{OF_PACKAGES}/[^/]+/[^/]+$")]
"""The name of a file that a target runs: an ONNX file, or any one in the folder of a target of another package."""

Expression = Annotated[str, StringConstraints(max_length=LONGEST_SIZE), AfterValidator(_plain)]
"""A symbol, or an expression of symbols."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DType = Annotated[str, _one_of("dtype", DTYPES)]
PrecisionName = Annotated[str, _one_of("precision", tuple(PRECISIONS))]
Size = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=LARGEST_SIZE)]
Positive = Annotated[float, Field(ge=0)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]


# --- records ----------------------------------------------------------------------------------------------------------


class DimSpec(StoredRecord):
    """A dynamic dim: `factor` times a symbol.

    Attributes:
        symbol: name of the symbol; in an output, also an expression of symbols.
        factor: factor of the symbol.
        min: minimum size of the dim itself, factor included; None for an output's own expression.
        opt: optimum size, which the example has.
        max: maximum size.
    """

    symbol: Expression
    factor: Annotated[int, Field(ge=1, le=2**31)] = 1
    min: Size | None = None
    opt: Size | None = None
    max: Size | None = None

    @property
    def text(self) -> str:
        return self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"


class TensorSpec(StoredRecord):
    """An input or output.

    Attributes:
        name: name for callers.
        dtype: NumPy's name of the dtype, or `bfloat16`.
        dims: a number for each fixed dim, a :class:`DimSpec` for each dynamic one.
        low: minimum of an integer input's example, and so of the reference inputs; of one that indexes a table, at
            most 0.
        high: maximum of the same; of one that indexes a table, its last row.
        excludes: value that a floating-point mask adds to exclude a key; None for other inputs.
        setting: minimum and maximum of reference inputs, for a floating-point input that is a setting of the model or
            of every sample, such as a temperature; None for other inputs.
        index: minimum and maximum allowed value of an integer input that indexes tables of known sizes; None for other
            inputs, and in older bundles.
        role: "shape" if the values of an integer input decide shapes, "number" if they are used in arithmetic, so that
            they are not a mask; "scores" if a floating-point input is added to attention scores, so that -infinity in
            it excludes a key; None for other inputs.
    """

    name: Name
    dtype: DType
    dims: Annotated[list[Size | DimSpec], Field(max_length=MOST_DIMS)]
    low: Whole | None = None
    high: Whole | None = None
    excludes: float | Literal["-inf"] | None = None
    setting: tuple[float, float] | None = None
    index: tuple[Whole, Whole] | None = None
    role: Literal["shape", "number", "scores"] | None = None

    def text(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) if isinstance(d, int) else d.text for d in self.dims)}]"

    def range_of(self, axis: int) -> tuple[int, int]:
        """Return the minimum and the maximum size of a dim, at least 1."""
        dim = self.dims[axis]
        return (dim, dim) if isinstance(dim, int) else (max(dim.min or 1, 1), dim.max or 1)

    def in_batches(self, samples: Sequence[T], *, smallest: bool = False) -> list[list[T]]:
        """Split samples into batches, as few and as equal as the first dim takes, or for `smallest` each as small as it
        takes. Too few samples are repeated."""
        least, most = self.range_of(0)
        count = -(-len(samples) // (least if smallest else most))
        total = max(len(samples), count * least)
        every = [samples[i % len(samples)] for i in range(total)]
        return [every[i * total // count : (i + 1) * total // count] for i in range(count)]


class Source(StoredRecord):
    """Origin of the model.

    Attributes:
        kind: kind of source. Registered names, callables, Hugging Face folders and files can make the model again; a
            module or exported program in memory cannot.
        name: name of the model or callable, path of the file, or qualified name of the class.
        options: keyword arguments of the callable; for a file, the ranges of its dynamic dims.
        weights: file that the weights were loaded from; None if none was given.
        random_weights: which weights are random, and their seed, such as `all, seed 0`; None if none are known to be
            random, and in older bundles.
    """

    kind: Literal["registered", "callable", "huggingface", "module", "onnx", "program"]
    name: Name
    options: dict[Name, str | int | float | bool] = {}
    weights: Name | None = None
    random_weights: str | None = None


Range = tuple[Size, Size, Size]
"""Minimum, optimum and maximum size of a dim, as in TensorRT."""


class Engine(StoredRecord):
    """A TensorRT plan.

    Attributes:
        file: name of the plan in the bundle.
        flavour: which TensorRT built it.
        version: version of that TensorRT.
        compute_capabilities: GPUs that it can run on, such as `SM89`; `portable` is SM80 and later.
        layers: number of layers.
        size: bytes of the file.
        build_seconds: seconds that the builder took.
        activation_memory: bytes on the device for everything between inputs and outputs, at the largest sizes; None
            if the builder does not report it.
        profiles: the optimization profiles, each the range of every symbol; the first covers all allowed inputs.
        code: HMAC by the key of the user who built it (`attnforge.cache`), in hexadecimal: for that user, `auto` loads
            the plan.
    """

    file: FileName
    flavour: Literal["tensorrt", "tensorrt_rtx"]
    version: Name
    compute_capabilities: list[Name]
    layers: Count
    size: Count
    build_seconds: Positive
    activation_memory: Count | None = None
    profiles: list[dict[Name, Range]] = []
    code: Sha256 | None = None


class Tuning(StoredRecord):
    """How the forms of attention sites were measured.

    Attributes:
        processors: number of processors of the machine.
        sizes: sizes of the dynamic dims.
        seconds: time that measuring took.
    """

    processors: Count
    sizes: dict[Name, Size]
    seconds: Seconds


class SessionSettings(StoredRecord):
    """Fastest settings of ONNX Runtime's CPU session for the model, on one machine and in one version.

    Attributes:
        machine: machine of the measurement.
        version: version of ONNX Runtime.
        threads: number of threads of one run; None for ONNX Runtime's own choice.
        spinning: whether its threads spin while they wait for work.
        arena: whether it keeps the memory of one run for the next.
        optimized: file of the model as optimized by that version, which need not optimize it again.
        measured: milliseconds of every setting that was tried.
    """

    machine: Machine
    version: Name
    threads: Threads | None = None
    spinning: bool = True
    arena: bool = True
    optimized: ModelName | None = None
    measured: dict[str, float] = {}


class PlainPlan(StoredRecord):
    """The plan with attention at the bundle's own precision; the difference is what a lower one gains.

    Attributes:
        layers: number of layers.
        size: bytes of the plan.
        activation_memory: bytes on the device; None if the builder does not report it.
    """

    layers: Count
    size: Count
    activation_memory: Count | None = None


class TargetRecord(StoredRecord):
    """A bundle's contents for a target.

    Attributes:
        model: file of the lowered graph, or what a target of another package runs.
        cuda_model: file of the graph for ONNX Runtime on CUDA, if it differs from the CPU's.
        tuning: how forms were measured; None if rules chose them.
        session: settings of ONNX Runtime's session on the machine that deployed the bundle.
        attention_precision: name of the precision of attention, if it is not the bundle's.
        without: the plan with attention at the bundle's precision.
        engines: TensorRT plans.
        low_bit: number of quantised products whose compiled kernel takes the numbers as stored; None if none is
            expected to.
        low_bit_attention: number of attention sites whose compiled fused kernel multiplies in fp8.
    """

    model: TargetFile
    cuda_model: ModelName | None = None
    tuning: Tuning | None = None
    session: SessionSettings | None = None
    attention_precision: PrecisionName | None = None
    without: PlainPlan | None = None
    engines: list[Engine] = []
    low_bit: Count | None = Field(default=None, validation_alias=AliasChoices("low_bit", "eight_bit"))
    low_bit_attention: Count | None = None


Kind = Literal[
    "example", "data", "normal", "uniform", "scaled", "outliers", "constant", "denormal", "extremes", "sparse",
    "zeros", "large",
]  # fmt: skip
Masks = Literal["random", "all", "none", "one", "all but one", "ragged", "infinite"]


class Case(StoredRecord):
    """A reference case: its inputs are generated from its seed, and the expected outputs are in the bundle.

    Attributes:
        name: unique in the bundle.
        sizes: sizes of the symbols of the dynamic dims.
        kind: how floating-point inputs are drawn (:func:`attnforge.runtime.cases.make_inputs`); "example" stands for
            the inputs that the model was deployed with, "data" for real ones that came with it.
        masks: how masks are drawn.
        spread: by output, the largest relative and absolute error of eager's further draws of its rounding: on
            neighbouring inputs, or on other ordinary ones; with `/blocks` appended, those of sums of its elements.
        scale: factor on floating-point inputs.
        most: maximum of integer inputs, if the example's values would be invalid at the case's sizes, such as the index
            of a token that a shorter input lacks; else None.
        reach: maximum of integer inputs that may be lengths, if it is more than the example's: the case's largest size;
            else None.
        seed: seed of the random numbers.
        caches: whether the bundle keeps the expected contents of a decoder's caches after all tokens.
    """

    name: Name
    sizes: dict[Name, Size]
    kind: Kind
    masks: Masks = "random"
    scale: Positive = 1.0
    most: Count | None = None
    reach: Count | None = None
    seed: Seed
    spread: dict[Name, tuple[Positive, Positive]] = {}
    caches: bool = False

    @property
    def is_ordinary(self) -> bool:
        """Whether the inputs are of the kind that the model is meant for, and not deliberately hard ones."""
        return self.kind in ("example", "data", "normal", "uniform", "zeros")


class Region(StoredRecord):
    """Operators of one module that stayed in fp32.

    Attributes:
        module: qualified name of the module.
        nodes: names of the operators in the canonical graph.
        why: evidence that they must stay in fp32.
    """

    module: str
    nodes: list[str]
    why: str


class Mixed(StoredRecord):
    """How precisions were chosen (`precision="auto"`): a 16-bit one, and fp32 where the budget requires it.

    Attributes:
        low: the 16-bit precision.
        max_error: relative error allowed on ordinary inputs.
        exactly: whether `max_error` was given and is the budget; else the budget is twice eager's own error, up to
            `max_error`.
        error: the largest relative error in the emulation of 16-bit storage.
        regions: operators that stayed in fp32.
        low_flops: share of the floating-point operations of matrix products and attention that are 16-bit.
        trials: number of assignments evaluated.
        steps: what was tried, in order, with results.
    """

    low: PrecisionName
    max_error: Annotated[float, Field(gt=0, lt=1)]
    exactly: bool
    error: float
    regions: list[Region]
    low_flops: float
    trials: int
    steps: list[str]


class QuantisedProduct(StoredRecord):
    """A quantised product.

    Attributes:
        name: name of the operator in the graph before quantisation.
        module: qualified name of the module.
        by: granularity of the input's scales: one for the whole input (`tensor`) or one per token (`token`); None if
            only the weights are quantised.
        block: number of channels of the weights that share a scale; None if all channels of an output do.
        balanced: whether channels of the input are divided by factors that the weights are multiplied by.
        error: error of the product on calibration data, relative to fp32.
    """

    name: Name
    module: str
    by: Literal["tensor", "token"] | None
    block: Count | None = None
    balanced: bool
    error: float


class Quantised(StoredRecord):
    """What is quantised, and the resulting error.

    Attributes:
        type: type of weights and inputs of products; for int4, of the weights only.
        max_error: relative error allowed for quantisation; None if a metric decided.
        error: the largest relative error against float64 on real data, or on ordinary cases if there is none.
        calibrated: number of cases of real data that the ranges come from; 0 if each token has its own.
        products: the quantised products.
        kept: by name, why a product, a table, an attention site of a model with fp8 products, or a site's queries and
            keys in OpenVINO, is not quantised.
        share: share of quantised products in the floating-point operations of matrix products and attention.
        steps: what was tried, in order, with results.
        tables: tables stored in 8 bits, by the name of their first lookup: the error relative to the table in fp32.
        attention: attention sites in fp8, by name: the error of the output on calibration data, relative to fp32.
        caches: sites with keys and values cached in int8, by name: the same error.
        scores: sites whose queries and keys OpenVINO multiplies in int8, by name: the same error.
    """

    type: Literal["int8", "fp8", "int4"]
    max_error: float | None
    error: float
    calibrated: Count
    products: list[QuantisedProduct]
    kept: dict[Name, str]
    share: float
    steps: list[str]
    tables: dict[Name, float] = {}
    attention: dict[Name, float] = {}
    caches: dict[Name, float] = {}
    scores: dict[Name, float] = {}


class Choice(StoredRecord):
    """Which backend was fastest within the parity budget, on the machine that deployed the bundle.

    Attributes:
        machine: the machine.
        versions: versions of the backends' libraries.
        sizes: sizes of the dynamic dims in the measurement.
        picked: backend that `auto` loads on that machine; None if none was within the budget.
        milliseconds: time of every backend within the budget, measured in turns: the mean of the medians of two loads.
            It is the time of a run, or for a bundle with a cache, of a prompt and as many steps as it has tokens.
        dropped: backends that were not within the budget or could not run, with reasons.
        seconds: time that choosing took.
    """

    machine: Machine
    versions: dict[str, str]
    sizes: dict[Name, Size]
    picked: str | None
    milliseconds: dict[str, float]
    dropped: dict[str, str]
    seconds: Seconds


class Wrong(StoredRecord):
    """Why a bundle does not compute what its model does, or why that is not proved. Such a bundle is written only on
    explicit request.

    Attributes:
        cause: a cause of :class:`attnforge.export.diagnosis.trace.Finding`.
        stage: the graph or backend that is wrong.
        evidence: the numbers that show it, in one line.
        tensor, operator, module, line: location of the error; None if no single tensor causes it.
    """

    cause: str
    stage: str
    evidence: str
    tensor: str | None = None
    operator: str | None = None
    module: str | None = None
    line: str | None = None

    def text(self) -> str:
        where = f" at {self.module}, {self.operator} {self.tensor}" if self.tensor else ""
        if self.operator == "DequantizeLinear" and self.cause in ("clipping", "outlier channel", "quantisation"):
            where = f" at the input of {self.module}"
        return f"{self.cause}{where}: {self.evidence}"


class Cost(StoredRecord):
    """Cost of a piece of work.

    Attributes:
        seconds: wall time.
        memory: peak memory of its process, in bytes; 0 if unknown.
    """

    seconds: Seconds
    memory: int

    def text(self) -> str:
        """Return the cost as `12.3 s and 840 MiB`, or only the seconds if memory is unknown."""
        return f"{self.seconds:.1f} s" + (f" and {self.memory / 2**20:,.0f} MiB" if self.memory else "")


class CacheSpec(StoredRecord):
    """The cache of one attention site.

    Attributes:
        site: name of the site.
        key: cache of keys, `(batch, key heads, places, head size)`.
        value: cache of values, `(batch, key heads, places, value size)`.
        window: number of tokens that a query sees, its own included; None for all up to its own.
    """

    site: Name
    key: TensorSpec
    value: TensorSpec
    window: Count | None = None


NEXT = ".next"
"""Suffix that makes the name of a cache that of the output with the updated cache."""


class Decoding(StoredRecord):
    """How a bundle's graphs are used as decoder steps. The manifest's `inputs` and `outputs` are those of the model
    itself, which takes all tokens at once; a graph takes the next tokens, the number of tokens before them, those whose
    outputs are computed, and the caches, and also returns the caches.

    Attributes:
        tokens: name of the input with tokens, `(batch, tokens, …)`.
        past: name of the input, int64 `(batch,)`, with the number of tokens that each sample has in the caches.
        kept: name of the input, int64 `(kept,)`, with the indices of the call's tokens whose outputs are computed; None
            in older bundles, whose steps compute those of all tokens.
        places: capacity of the caches, in tokens per sample.
        caches: cache of every attention site, in graph order.
        cases: additional reference cases, with more tokens than a call may have.
        vocabulary: number of ids in the embedding table; None if tokens are not ids.
        stop: stop token ids.
        tokenizer: file of the `tokenizers` library that turns text into ids; None if there is none.
        cuda: whether the graph for ONNX Runtime on CUDA is a step that runs there; false in older bundles, whose graphs
            were not made for it, and for caches in 8 bits.
    """

    tokens: Name
    past: Name
    kept: Name | None = None
    places: Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
    caches: Annotated[list[CacheSpec], Field(min_length=1)]
    cases: list[Case] = []
    vocabulary: Count | None = None
    stop: list[Count] = []
    tokenizer: FileName | None = None
    cuda: bool = False

    @property
    def tensors(self) -> list[TensorSpec]:
        """All caches: of keys and of values, site by site."""
        return [spec for cache in self.caches for spec in (cache.key, cache.value)]

    @property
    def bytes_a_sample(self) -> int:
        """Bytes of all caches of one sample, in the bundle's own types."""
        return sum(
            prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * np.dtype(spec.dtype).itemsize
            for spec in self.tensors
        )


class Manifest(StoredRecord):
    """A bundle's contents.

    Attributes:
        name: name of the model.
        precision: name of the precision, or the 16-bit one if precisions are `mixed`.
        created: time of creation, in ISO 8601.
        tools: versions of the packages that made it.
        source: origin of the model.
        inputs: inputs of the model.
        outputs: outputs of the model.
        reference: what computed the outputs that backends are compared with.
        attention: how every attention site was lowered.
        targets: contents for every target, and for :data:`OPENVINO` if that has its own graph.
        skipped: targets that it is not built for, with reasons.
        cases: reference cases for verification.
        mixed: how precisions were chosen; None if they were given.
        quantised: what is quantised; None if nothing is.
        decoding: how the graphs are used as decoder steps; None if they are the whole model.
        metric: name of the task metric on the cases of real data.
        least: minimum value of the metric.
        max_eager_error: relative error of eager on ordinary inputs above which parity cannot be judged; None for
            :data:`attnforge.runtime.parity.verify.UNPROVED`.
        choice: which backend was measured as fastest, and where; None if there was nothing to choose.
        wrong: why no backend computes what the model does, in a bundle that was kept all the same; else None.
        seconds: time of every stage of deploying.
        memory: peak memory of the deploying process in every stage, in bytes; an upper bound if the kernel does not
            separate stages (:meth:`attnforge.progress.Stages.memory`). Empty in older bundles.
        children: cost of the processes that deploying started, by name; TensorRT builders run in parallel with the
            stages.
        reused: what was taken from the cache of deploys instead of being made or measured again.
        files: sha256 of every other file, by name.
    """

    schema_version: Annotated[int, Field(strict=True)] = SCHEMA_VERSION
    name: Name
    precision: PrecisionName
    created: str
    tools: dict[Name, str]
    source: Source
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    reference: str = "the torch module in eager mode"
    attention: Certificate
    targets: dict[Name, TargetRecord]
    skipped: dict[Name, str] = {}
    cases: list[Case]
    mixed: Mixed | None = None
    quantised: Quantised | None = None
    decoding: Decoding | None = None
    metric: str | None = None
    least: float | None = None
    max_eager_error: Positive | None = None
    choice: Choice | None = None
    wrong: Wrong | None = None
    seconds: dict[str, Seconds] = {}
    memory: dict[str, int] = {}
    children: dict[str, Cost] = {}
    reused: list[str] = []
    files: dict[FileName, Sha256] = {}

    @property
    def graph_inputs(self) -> list[TensorSpec]:
        """The inputs of the bundle's graphs: the model's, or those of a decoder's step."""
        return graph_tensors(self.inputs, self.outputs, self.decoding)[0]

    @property
    def graph_outputs(self) -> list[TensorSpec]:
        """The outputs of the bundle's graphs."""
        return graph_tensors(self.inputs, self.outputs, self.decoding)[1]

    @property
    def eager_precision(self) -> str:
        """Name of the precision at which a torch module is the same function: fp32 if operators have precisions of
        their own."""
        return self.precision if self.mixed is None and self.quantised is None else "fp32"

    @property
    def stages(self) -> dict[str, Cost]:
        """Cost of every stage of deploying."""
        return {name: Cost(seconds=s, memory=self.memory.get(name, 0)) for name, s in self.seconds.items()}

    @property
    def total(self) -> Cost:
        """Total cost of deploying, without the children's memory."""
        seconds = round(sum(self.seconds.values()), 3)
        return Cost.model_construct(seconds=seconds, memory=max(self.memory.values(), default=0))

    @property
    def doubt(self) -> str | None:
        """Warning about a bundle that was kept although it is wrong or not proved; None for other bundles."""
        if self.wrong is None:
            return None
        return f"{self.name} was kept although it is wrong, or not proved to be right: {self.wrong.text()}"

    @property
    def ranges(self) -> str:
        """The range of every dynamic dim of the inputs."""
        return ranges_of(self.inputs)

    @property
    def interface(self) -> list[str]:
        """What the model takes and returns, and the ranges of the dynamic dims of its inputs, a line each."""
        lines = [f"in  {spec.name}: {spec.text()}" for spec in self.inputs]
        lines += [f"out {spec.name}: {spec.text()}" for spec in self.outputs]
        return [*lines, f"sizes: {self.ranges}"] if self.ranges else lines

    def summary(self) -> str:
        """Return what the model takes and returns, how its attention was lowered, and why it is not fused where it is
        not, a line each."""
        fused = [f"{count} fused by {target}" for target, count in self.attention.fused.items()]
        sites = f"attention: {self.attention.sites} sites, {self.attention.canonical} canonical"
        unfused = [f"not fused by {one.target}: {one.site}: {one.reason}" for one in self.attention.unfused]
        return "\n".join([f"{self.name} {self.precision}", *self.interface, ", ".join([sites, *fused]), *unfused])


def dim_name(symbol: str | None, tensor: str, axis: int) -> str:
    """Return the name of a dynamic dim of an ONNX model: its symbol as an identifier, or one made of its place."""
    return re.sub(r"\W+", "_", symbol or "").strip("_") or f"{tensor}_dim{axis}"


def ranges_of(inputs: list[TensorSpec]) -> str:
    """Return the least and the largest size of every dynamic dim: `batch 1 to 8, tokens 2 to 256`."""
    dims = {dim.text: dim for spec in inputs for dim in spec.dims if isinstance(dim, DimSpec)}
    return ", ".join(f"{name} {dim.min} to {dim.max}" for name, dim in dims.items())


def graph_tensors(
    inputs: list[TensorSpec], outputs: list[TensorSpec], decoding: Decoding | None
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs of a bundle's graphs: the model's, and for a decoder step also the number of past
    tokens, the tokens whose outputs are computed, and the caches."""
    if decoding is None:
        return inputs, outputs
    (tokens,) = (spec for spec in inputs if spec.name == decoding.tokens)
    batch, count, *rest = tokens.dims
    if isinstance(count, DimSpec):  # a step may have one token
        count = count.model_copy(update={"min": 1})
    tokens = tokens.model_copy(update={"dims": [batch, count, *rest]})
    taken = [tokens, TensorSpec(name=decoding.past, dtype="int64", dims=[batch], low=0, high=0)]
    if decoding.kept is not None:
        most = count.max if isinstance(count, DimSpec) else count
        dim = DimSpec(symbol=decoding.kept, min=1, opt=1, max=most)
        taken.append(TensorSpec(name=decoding.kept, dtype="int64", dims=[dim], low=0, high=0))
        outputs = [spec.model_copy(update={"dims": [batch, dim, *spec.dims[2:]]}) for spec in outputs]
    following = [spec.model_copy(update={"name": spec.name + NEXT}) for spec in decoding.tensors]
    return [*taken, *decoding.tensors], [*outputs, *following]
