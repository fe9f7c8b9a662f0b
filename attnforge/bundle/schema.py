"""The manifest of a bundle: every record in `manifest.json`, and the names of the files beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Annotated, Literal

import numpy as np
from pydantic import AliasChoices, Field

from attnforge.bundle.fields import (
    LARGEST_SIZE,
    MOST_DIMS,
    Count,
    DType,
    Expression,
    FileName,
    ModelName,
    Name,
    Positive,
    PrecisionName,
    Seed,
    Sha256,
    Size,
    StoredRecord,
    Threads,
)
from attnforge.certificate import Certificate
from attnforge.machine import Machine

SCHEMA_VERSION = 1
FLAVOURS = ("tensorrt", "tensorrt_rtx")
OPENVINO = "openvino"
"""The entry of a manifest's targets with the graph that OpenVINO runs; where there is none, it runs the canonical
graph."""

PORTABLE = "portable"
"""The GPUs that a TensorRT-RTX plan is for by default: every NVIDIA GPU from Ampere on."""

MANIFEST = "manifest.json"
SIGNATURE = "model.sig"
"""The signature of a bundle that is signed. The manifest does not list it."""

CANONICAL = "canonical.onnx"
TOKENIZER = "tokenizer.json"
PLAIN = "plain.onnx"
"""The graph as it was exported. The weights that the canonical graph has too are external data: they stand in its file
or in :data:`WEIGHTS`. (In older bundles they are inputs.)"""

WEIGHTS = "weights.data"
"""The weights of a large model, which its graphs share."""

REFERENCE_OUTPUTS = "reference/outputs.safetensors"
REFERENCE_EXAMPLE = "reference/example.safetensors"


class DimSpec(StoredRecord):
    """A dynamic dim: `factor` times a symbol.

    Attributes:
        symbol: its name; of an output, also an expression of symbols.
        factor: what the symbol is multiplied with.
        min: the least size of the dim itself, factor included; None of an output's own expression.
        opt: the usual size, which the example has.
        max: the largest size.
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
        name: as callers name it.
        dtype: NumPy's name of it, or `bfloat16`.
        dims: a number where a dim is fixed.
        low: the least number of an integer input's example, and so of the reference inputs.
        high: the largest.
        excludes: the number that a floating-point mask adds where a key is excluded; None of other inputs.
        setting: the least and largest number of reference inputs, where a floating-point input is a setting of the
            model or of every sample, such as a temperature; None of other inputs.
        index: the least and largest number that an integer input may have, where it indexes tables of known sizes; None
            of other inputs, and in older bundles.
        role: "shape" where the numbers of an integer input decide shapes, "number" where there is arithmetic of them,
            so that they are no mask; "scores" where a floating-point one is added to the scores of attention, so that
            -infinity in it excludes a key; None of other inputs.
    """

    name: Name
    dtype: DType
    dims: Annotated[list[Size | DimSpec], Field(max_length=MOST_DIMS)]
    low: int | None = None
    high: int | None = None
    excludes: float | Literal["-inf"] | None = None
    setting: tuple[float, float] | None = None
    index: tuple[int, int] | None = None
    role: Literal["shape", "number", "scores"] | None = None

    def text(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) if isinstance(d, int) else d.text for d in self.dims)}]"


class Source(StoredRecord):
    """Where the model came from.

    Attributes:
        kind: of source. Registered names, callables, Hugging Face folders and files can make the model again; a module
            or exported program in memory cannot.
        name: of the model or callable, path of the file, or qualified name of the class.
        options: keyword arguments of the callable; of a file, the ranges of its dynamic dims.
        weights: file that the weights were loaded from; None where none was named.
        random_weights: which weights are random, and of which seed, such as `all, seed 0`; None where none are known to
            be, and in older bundles.
    """

    kind: Literal["registered", "callable", "huggingface", "module", "onnx", "program"]
    name: Name
    options: dict[Name, str | int | float | bool] = {}
    weights: Name | None = None
    random_weights: str | None = None


Range = tuple[Size, Size, Size]
"""Least, usual and largest size of a dim: TensorRT's min, opt and max."""


class Engine(StoredRecord):
    """A TensorRT plan.

    Attributes:
        file: name of the plan in the bundle.
        flavour: which TensorRT built it.
        version: of that TensorRT.
        compute_capabilities: GPUs that it is for, such as `SM89`; `portable` is SM80 and later.
        layers: how many it has.
        size: bytes of the file.
        build_seconds: seconds that the builder took.
        activation_memory: bytes on the device for everything between inputs and outputs, at the largest sizes; None
            where the builder does not say.
        profiles: the optimization profiles, each the range of every symbol; the first is all that the inputs may be.
        code: of the user who built it (`attnforge.cache`), in hexadecimal: for that user, `auto` loads the plan.
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
        processors: of the machine.
        sizes: of the dynamic dims.
        seconds: that measuring took.
    """

    processors: Count
    sizes: dict[Name, Size]
    seconds: float


class SessionSettings(StoredRecord):
    """How ONNX Runtime's CPU session ran the model fastest, on one machine and in one version.

    Attributes:
        machine: on which it was measured.
        version: of ONNX Runtime.
        threads: that one run is spread over; None for ONNX Runtime's own choice.
        spinning: whether its threads wait for work in a loop.
        arena: whether it keeps the memory of one run for the next.
        optimized: file of the model as that version's optimizer left it, which need not optimize it again.
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
    """The plan that has attention at the bundle's own precision; the difference is what a lower one gains.

    Attributes:
        layers: how many it has.
        size: bytes of the plan.
        activation_memory: bytes on the device; None where the builder does not say.
    """

    layers: Count
    size: Count
    activation_memory: Count | None = None


class TargetRecord(StoredRecord):
    """What the bundle holds for a target.

    Attributes:
        model: file of the lowered graph.
        cuda_model: file of the graph for ONNX Runtime on CUDA, where it differs from the CPU's.
        tuning: how forms were measured; None where rules chose them.
        session: settings of ONNX Runtime's session on the machine that deployed the bundle.
        attention_precision: name of the precision of attention alone, where it is not the bundle's.
        without: the plan that has attention at the bundle's precision.
        engines: TensorRT plans.
        low_bit: quantised products whose kernel takes the numbers as they are stored, counted in what was compiled;
            None where none is to be.
        low_bit_attention: attention sites whose fused kernel multiplies in fp8, counted in the same way.
    """

    model: ModelName
    cuda_model: ModelName | None = None
    tuning: Tuning | None = None
    session: SessionSettings | None = None
    attention_precision: PrecisionName | None = None
    without: PlainPlan | None = None
    engines: list[Engine] = []
    low_bit: Count | None = Field(default=None, validation_alias=AliasChoices("low_bit", "eight_bit"))
    low_bit_attention: Count | None = None


Kind = Literal[
    "example", "data", "normal", "uniform", "scaled", "outliers", "constant", "denormal", "extremes", "zeros", "large"
]
Masks = Literal["random", "all", "none", "one", "all but one", "ragged", "infinite"]


class Case(StoredRecord):
    """A reference case: the inputs are made again from its seed, the outputs to compare with are in the bundle.

    Attributes:
        name: unique in the bundle.
        sizes: of the symbols of the dynamic dims.
        kind: how floating-point inputs are drawn (:func:`attnforge.runtime.cases.make_inputs`); "example" are
            the inputs that the model was deployed with, "data" real ones that came with it.
        masks: how masks are drawn.
        spread: by output, the largest relative and absolute error of eager's further draws of its rounding: on
            neighbouring inputs, or on other ordinary ones.
        scale: factor on floating-point inputs.
        most: the largest whole number of inputs, where the case's sizes do not bear the example's, such as an index of
            a token that a shorter input has not; None where they do.
        seed: of the random numbers.
        caches: whether the bundle keeps what a decoder's caches are to hold behind all tokens.
    """

    name: Name
    sizes: dict[Name, Size]
    kind: Kind
    masks: Masks = "random"
    scale: Positive = 1.0
    most: Count | None = None
    seed: Seed
    spread: dict[Name, tuple[Positive, Positive]] = {}
    caches: bool = False

    @property
    def is_ordinary(self) -> bool:
        """Whether the inputs are such as the model is meant for, and not a trial by hard ones."""
        return self.kind in ("example", "data", "normal", "uniform", "zeros")


class Region(StoredRecord):
    """Operators of one module that stayed in fp32.

    Attributes:
        module: qualified name of the module.
        nodes: names of the operators in the canonical graph.
        why: the evidence that they have to be in fp32.
    """

    module: str
    nodes: list[str]
    why: str


class Mixed(StoredRecord):
    """How precisions were chosen (`precision="auto"`): a 16-bit one, and fp32 where the budget demands it.

    Attributes:
        low: the 16-bit precision.
        max_error: relative error that is allowed on ordinary inputs.
        exactly: whether `max_error` was asked for and is the budget; else twice eager's own error is, up to it.
        error: the largest relative error in the emulation of 16-bit storage.
        regions: what stayed in fp32.
        low_flops: share of the floating-point operations of matrix products and attention that are 16-bit.
        trials: how many assignments were evaluated.
        steps: what was tried in order, and what came of it.
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
        name: of the operator in the graph as it was before.
        module: qualified name of the module.
        by: what has a scale of its own: the whole input (`tensor`), or each token of it; None where the weights alone
            are quantised.
        block: channels of the weights that share a scale; None where all of an output do.
        balanced: whether channels of the input are divided by numbers that the weights are multiplied with.
        error: of the product on calibration data, relative to fp32.
    """

    name: Name
    module: str
    by: Literal["tensor", "token"] | None
    block: Count | None = None
    balanced: bool
    error: float


class Quantised(StoredRecord):
    """What is quantised, and what that costs.

    Attributes:
        type: of weights and inputs of products; of the weights alone where it is int4.
        max_error: relative, that quantising was allowed; None where a metric decided.
        error: the largest relative error against float64 on real data, or on ordinary cases where there is none.
        calibrated: how many cases of real data the ranges are of; 0 where each token has its own.
        products: that are quantised.
        kept: by name, why a product, a table, an attention site beside products in fp8, or a site's
            queries and keys in OpenVINO, is not quantised.
        share: of the floating-point operations of matrix products and attention, those of quantised ones.
        steps: what was tried in order, and what came of it.
        tables: stored in 8 bits, by the name of their first lookup: the error relative to the table in fp32.
        attention: in fp8, by the site's name: the error of its output on calibration data, relative to fp32.
        caches: of keys and values in int8, by the site's name: the same error.
        scores: of queries and keys that OpenVINO multiplies in int8, by the site's name: the same error.
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
        versions: of the backends' libraries.
        sizes: of the dynamic dims, at which it was measured.
        picked: what `auto` loads on that machine; None where no backend was within the budget.
        milliseconds: of every backend that was, in turns: the mean of the medians of two openings. Of a run, or where
            the bundle has a cache, of a prompt and as many steps as it has tokens.
        dropped: backends that were not, or could not run, and why.
        seconds: that choosing took.
    """

    machine: Machine
    versions: dict[str, str]
    sizes: dict[Name, Size]
    picked: str | None
    milliseconds: dict[str, float]
    dropped: dict[str, str]
    seconds: float


class Wrong(StoredRecord):
    """Why a bundle is not what its model computes, or why that is not proved. Such a bundle is written only where it
    was asked for by name.

    Attributes:
        cause: of :class:`attnforge.export.diagnosis.findings.Finding`.
        stage: the graph or the backend that it is in.
        evidence: the numbers that show it, in one line.
        tensor, operator, module, line: where; None where it is not the doing of a single tensor.
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
        return f"{self.cause}{where}: {self.evidence}"


class Cost(StoredRecord):
    """What a piece of work took.

    Attributes:
        seconds: of wall time.
        memory: bytes that its process had in memory at its peak; 0 where that is not known.
    """

    seconds: float
    memory: int

    def text(self) -> str:
        """`12.3 s and 840 MiB`, or the seconds alone where memory is not known."""
        return f"{self.seconds:.1f} s" + (f" and {self.memory / 2**20:,.0f} MiB" if self.memory else "")


class CacheSpec(StoredRecord):
    """The cache of one attention site.

    Attributes:
        site: its name.
        key: of keys, `(batch, key heads, places, head size)`.
        value: of values, `(batch, key heads, places, value size)`.
        window: how many tokens a query sees, its own included; None for all up to its own.
    """

    site: Name
    key: TensorSpec
    value: TensorSpec
    window: Count | None = None


NEXT = ".next"
"""Behind the name of a cache: the output that is the cache with the new tokens."""


class Decoding(StoredRecord):
    """How the graphs of a bundle are steps of a decoder. The manifest's `inputs` and `outputs` are those of the model
    itself, which takes all tokens at once; a graph takes the next ones, how many came before, and the caches, and has
    the caches as outputs, too.

    Attributes:
        tokens: name of the input with tokens, `(batch, tokens, …)`.
        past: name of the input, int64 of `(batch,)`, with how many tokens each sample has in the caches.
        places: tokens that the caches hold for each sample.
        caches: of every attention site, in graph order.
        cases: further reference cases, of more tokens than a call may have.
        vocabulary: how many ids the table of embeddings has; None where tokens are no ids.
        stop: ids behind which a text ends.
        tokenizer: file of the `tokenizers` library that turns texts into ids; None where there is none.
    """

    tokens: Name
    past: Name
    places: Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
    caches: Annotated[list[CacheSpec], Field(min_length=1)]
    cases: list[Case] = []
    vocabulary: Count | None = None
    stop: list[Count] = []
    tokenizer: FileName | None = None

    @property
    def tensors(self) -> list[TensorSpec]:
        """All caches: of keys and of values by site."""
        return [spec for cache in self.caches for spec in (cache.key, cache.value)]

    @property
    def bytes_a_sample(self) -> int:
        """Bytes that all caches take for one sample, in the bundle's own types."""
        return sum(
            prod(dim for dim in spec.dims[1:] if isinstance(dim, int)) * np.dtype(spec.dtype).itemsize
            for spec in self.tensors
        )


class Manifest(StoredRecord):
    """What a bundle holds.

    Attributes:
        name: of the model.
        precision: name of the precision of everything, or the 16-bit one of a bundle that has `mixed` ones.
        created: when, in ISO 8601.
        tools: versions of the packages that made it.
        source: where the model came from.
        inputs: of the model.
        outputs: of the model.
        reference: what computed the outputs that backends are compared with.
        attention: what became of every attention site.
        targets: what the bundle holds for every target, and for :data:`OPENVINO` where that has
            a graph of its own.
        skipped: targets that it is not built for, and why.
        cases: what it is verified on.
        mixed: how precisions were chosen; None where they were given.
        quantised: what is quantised; None where nothing is.
        decoding: how the graphs are steps of a decoder; None where they are the whole model.
        metric: name of the task's metric over the cases of real data.
        least: value that the metric must reach.
        max_eager_error: relative error of eager on ordinary inputs beyond which nothing is proved; None for
            :data:`attnforge.runtime.parity.budget.UNPROVED`.
        choice: which backend was measured to be fastest, and where; None where there was nothing to choose.
        wrong: why no backend computes what the model does, in a bundle that was kept all the same; else None.
        seconds: that every stage of deploying it took.
        memory: bytes that the deploying process had in memory at the peak of every stage; an upper bound where the
            kernel does not tell stages apart (:meth:`attnforge.progress.Stages.memory`). Empty in older bundles.
        children: by name, the processes that deploying started; TensorRT's builders work while the stages go on.
        reused: what was taken from the cache of deploys, and so neither made nor measured anew.
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
    seconds: dict[str, float] = {}
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
        """Name of the precision that a torch module has to run at to be the same function: fp32 where operators have
        precisions of their own."""
        return self.precision if self.mixed is None and self.quantised is None else "fp32"

    @property
    def stages(self) -> dict[str, Cost]:
        """What every stage of deploying took."""
        return {name: Cost(seconds=s, memory=self.memory.get(name, 0)) for name, s in self.seconds.items()}

    @property
    def total(self) -> Cost:
        """What deploying took in all, without the children's memory."""
        return Cost(seconds=round(sum(self.seconds.values()), 3), memory=max(self.memory.values(), default=0))

    @property
    def doubt(self) -> str | None:
        """Why nobody loads the bundle unasked, in a sentence about it; None where nothing speaks against it."""
        if self.wrong is None:
            return None
        return f"{self.name} was kept although it is wrong, or not proved to be right: {self.wrong.text()}"

    def inconsistency(self) -> str | None:
        """What a whole manifest says that cannot be so, though every field is valid for itself; None where all fits."""
        return next(_inconsistencies(self), None)


def graph_tensors(
    inputs: list[TensorSpec], outputs: list[TensorSpec], decoding: Decoding | None
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The inputs and outputs of a bundle's graphs: the model's, and of a decoder's step what it takes besides."""
    if decoding is None:
        return inputs, outputs
    (tokens,) = (spec for spec in inputs if spec.name == decoding.tokens)
    batch, count, *rest = tokens.dims
    if isinstance(count, DimSpec):  # a step may have one token
        count = count.model_copy(update={"min": 1})
    tokens = tokens.model_copy(update={"dims": [batch, count, *rest]})
    past = TensorSpec(name=decoding.past, dtype="int64", dims=[batch], low=0, high=0)
    following = [spec.model_copy(update={"name": spec.name + NEXT}) for spec in decoding.tensors]
    return [tokens, past, *decoding.tensors], [*outputs, *following]


def _inconsistencies(manifest: Manifest) -> Iterator[str]:
    for name in _named_files(manifest):
        if name not in manifest.files:
            yield f"it has no {name}, which the manifest names: its `files` do not list it"
    for kind, names in (
        ("inputs", [spec.name for spec in manifest.inputs]),
        ("outputs", [spec.name for spec in manifest.outputs]),
        ("cases", [case.name for case in manifest.cases]),
    ):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            yield f"{kind}: {twice[0]} is there twice"
    symbols: set[str] = set()
    for spec in manifest.inputs:
        for dim in spec.dims:
            if isinstance(dim, DimSpec):
                symbols.add(dim.symbol)
                if dim.min is None or dim.opt is None or dim.max is None or not dim.min <= dim.opt <= dim.max:
                    yield f"inputs: {spec.name} has a dim {dim.text} without min <= opt <= max"
        if spec.low is not None and (spec.high is None or spec.low > spec.high):
            yield f"inputs: {spec.name} has numbers from {spec.low} to {spec.high}"
        if spec.setting is not None and spec.setting[0] > spec.setting[1]:
            yield f"inputs: {spec.name} has a setting from {spec.setting[0]} to {spec.setting[1]}"
    for case in [*manifest.cases, *(manifest.decoding.cases if manifest.decoding is not None else [])]:
        if missing := symbols - case.sizes.keys():
            yield f"cases: {case.name} has no size of {min(missing)}"
    if manifest.decoding is not None:
        yield from _inconsistencies_of_steps(manifest, manifest.decoding)
    for target, record in manifest.targets.items():
        for engine in record.engines:
            for profile in engine.profiles:
                if profile.keys() != symbols or any(not low <= opt <= high for low, opt, high in profile.values()):
                    yield f"targets.{target}: a profile of {engine.file} is of other dims, or without min <= opt <= max"


def _inconsistencies_of_steps(manifest: Manifest, decoding: Decoding) -> Iterator[str]:
    """What the record of a decoder's step says that cannot be so."""
    if [spec.name for spec in manifest.inputs] != [decoding.tokens] or len(manifest.inputs[0].dims) < 2:
        yield f"decoding: the tokens {decoding.tokens} are not the only input, (batch, tokens, …)"
        return
    names = [decoding.tokens, decoding.past, *(spec.name for spec in decoding.tensors)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        yield f"decoding: {twice[0]} is there twice"
    for spec in decoding.tensors:
        sizes = [dim for dim in spec.dims[1:] if isinstance(dim, int)]
        if len(sizes) != 3 or len(spec.dims) != 4 or sizes[1] != decoding.places:
            yield f"decoding: the cache {spec.name} is {spec.text()}, and not (batch, heads, {decoding.places}, size)"
    for spec in (*manifest.inputs, *manifest.outputs):
        if len(spec.dims) < 2 or any(isinstance(dim, DimSpec) for dim in spec.dims[2:]):
            yield f"decoding: {spec.name} is {spec.text()}, and not (batch, tokens, …) with fixed sizes behind them"


def _named_files(manifest: Manifest) -> Iterator[str]:
    for record in manifest.targets.values():
        yield record.model
        yield from (engine.file for engine in record.engines)
        optimized = record.session.optimized if record.session is not None else None
        yield from (name for name in (record.cuda_model, optimized) if name is not None)
    if manifest.decoding is not None and manifest.decoding.tokenizer is not None:
        yield manifest.decoding.tokenizer
