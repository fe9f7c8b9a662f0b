"""The manifest of a bundle: every record in `manifest.json`, and the names of the files beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from attnforge.certificate import Certificate
from attnforge.machine import Machine
from attnforge.records import Record

SCHEMA_VERSION = 1
FLAVOURS = ("tensorrt", "tensorrt_rtx")
PORTABLE = "portable"
"""The GPUs that a TensorRT-RTX plan is for by default: every NVIDIA GPU from Ampere on."""

MANIFEST = "manifest.json"
CANONICAL = "canonical.onnx"
PLAIN = "plain.onnx"
"""The graph as it was exported. The weights that the canonical graph has too are external data: they stand in its file
or in :data:`WEIGHTS`. (In older bundles they are inputs.)"""

WEIGHTS = "weights.data"
"""The weights of a large model, which its graphs share."""

REFERENCE_OUTPUTS = "reference/outputs.safetensors"
REFERENCE_EXAMPLE = "reference/example.safetensors"


class DimSpec(Record):
    """A dynamic dim: `factor` times a symbol.

    Attributes:
        symbol: its name; of an output, also an expression of symbols.
        factor: what the symbol is multiplied with.
        min: the least size of the dim itself, factor included; None of an output's own expression.
        opt: the usual size, which the example has.
        max: the largest size.
    """

    symbol: str
    factor: int = 1
    min: int | None = None
    opt: int | None = None
    max: int | None = None

    @property
    def text(self) -> str:
        return self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"


class TensorSpec(Record):
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
    """

    name: str
    dtype: str
    dims: list[int | DimSpec]
    low: int | None = None
    high: int | None = None
    excludes: float | Literal["-inf"] | None = None
    setting: tuple[float, float] | None = None

    def text(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) if isinstance(d, int) else d.text for d in self.dims)}]"


class Source(Record):
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
    name: str
    options: dict[str, str | int | float | bool] = {}
    weights: str | None = None
    random_weights: str | None = None


Range = tuple[int, int, int]
"""Least, usual and largest size of a dim: TensorRT's min, opt and max."""


class Engine(Record):
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
    """

    file: str
    flavour: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    compute_capabilities: list[str]
    layers: int
    size: int
    build_seconds: float
    activation_memory: int | None = None
    profiles: list[dict[str, Range]] = []


class Tuning(Record):
    """How the forms of attention sites were measured.

    Attributes:
        processors: of the machine.
        sizes: of the dynamic dims.
        seconds: that measuring took.
    """

    processors: int
    sizes: dict[str, int]
    seconds: float


class SessionSettings(Record):
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
    version: str
    threads: int | None = None
    spinning: bool = True
    arena: bool = True
    optimized: str | None = None
    measured: dict[str, float] = {}


class PlainPlan(Record):
    """The plan that has attention at the bundle's own precision; the difference is what a lower one gains.

    Attributes:
        layers: how many it has.
        size: bytes of the plan.
        activation_memory: bytes on the device; None where the builder does not say.
    """

    layers: int
    size: int
    activation_memory: int | None = None


class TargetRecord(Record):
    """What the bundle holds for a target.

    Attributes:
        model: file of the lowered graph.
        cuda_model: file of the graph for ONNX Runtime on CUDA, where it differs from the CPU's.
        tuning: how forms were measured; None where rules chose them.
        session: settings of ONNX Runtime's session on the machine that deployed the bundle.
        attention_precision: name of the precision of attention alone, where it is not the bundle's.
        without: the plan that has attention at the bundle's precision.
        engines: TensorRT plans.
    """

    model: str
    cuda_model: str | None = None
    tuning: Tuning | None = None
    session: SessionSettings | None = None
    attention_precision: str | None = None
    without: PlainPlan | None = None
    engines: list[Engine] = []


Kind = Literal["example", "data", "normal", "uniform", "scaled", "outliers", "constant", "denormal", "extremes"]
Masks = Literal["random", "all", "none", "one", "all but one", "ragged"]


class Case(Record):
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
    """

    name: str
    sizes: dict[str, int]
    kind: Kind
    masks: Masks = "random"
    scale: float = 1.0
    most: int | None = None
    seed: int
    spread: dict[str, tuple[float, float]] = {}

    @property
    def is_ordinary(self) -> bool:
        """Whether the inputs are such as the model is meant for, and not a trial by hard ones."""
        return self.kind in ("example", "data", "normal", "uniform")


class Region(Record):
    """Operators of one module that stayed in fp32.

    Attributes:
        module: qualified name of the module.
        nodes: names of the operators in the canonical graph.
        why: the evidence that they have to be in fp32.
    """

    module: str
    nodes: list[str]
    why: str


class Mixed(Record):
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

    low: str
    max_error: float
    exactly: bool
    error: float
    regions: list[Region]
    low_flops: float
    trials: int
    steps: list[str]


class Choice(Record):
    """Which backend was fastest within the parity budget, on the machine that deployed the bundle.

    Attributes:
        machine: the machine.
        versions: of the backends' libraries.
        sizes: of the dynamic dims, at which it was measured.
        picked: what `auto` loads on that machine; None where no backend was within the budget.
        milliseconds: of every backend that was, in turns: the mean of the medians of two openings.
        dropped: backends that were not, or could not run, and why.
        seconds: that choosing took.
    """

    machine: Machine
    versions: dict[str, str]
    sizes: dict[str, int]
    picked: str | None
    milliseconds: dict[str, float]
    dropped: dict[str, str]
    seconds: float


class Cost(Record):
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


class Manifest(Record):
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
        targets: what the bundle holds for every target.
        skipped: targets that it is not built for, and why.
        cases: what it is verified on.
        mixed: how precisions were chosen; None where they were given.
        metric: name of the task's metric over the cases of real data.
        least: value that the metric must reach.
        choice: which backend was measured to be fastest, and where; None where there was nothing to choose.
        seconds: that every stage of deploying it took.
        memory: bytes that the deploying process had in memory at the peak of every stage; an upper bound where the
            kernel does not tell stages apart (:meth:`attnforge.progress.Stages.memory`). Empty in older bundles.
        children: by name, the processes that deploying started; TensorRT's builders work while the stages go on.
        reused: what was taken from the cache of deploys, and so neither made nor measured anew.
        files: sha256 of every other file, by name.
    """

    schema_version: Annotated[int, Field(strict=True)] = SCHEMA_VERSION
    name: str
    precision: str
    created: str
    tools: dict[str, str]
    source: Source
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    reference: str = "the torch module in eager mode"
    attention: Certificate
    targets: dict[str, TargetRecord]
    skipped: dict[str, str] = {}
    cases: list[Case]
    mixed: Mixed | None = None
    metric: str | None = None
    least: float | None = None
    choice: Choice | None = None
    seconds: dict[str, float] = {}
    memory: dict[str, int] = {}
    children: dict[str, Cost] = {}
    reused: list[str] = []
    files: dict[str, str] = {}

    @property
    def stages(self) -> dict[str, Cost]:
        """What every stage of deploying took."""
        return {name: Cost(seconds=s, memory=self.memory.get(name, 0)) for name, s in self.seconds.items()}

    @property
    def total(self) -> Cost:
        """What deploying took in all, without the children's memory."""
        return Cost(seconds=round(sum(self.seconds.values()), 3), memory=max(self.memory.values(), default=0))
