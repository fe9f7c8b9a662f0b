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
"""What a TensorRT-RTX plan is for unless told otherwise: every NVIDIA GPU from Ampere on."""

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
    """A dynamic dim: `factor` times a symbol. Outputs may have an expression as symbol, and no range of their own."""

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
        low, high: bounds of an integer input's example, and so of the reference inputs.
        excludes: of a floating-point input that is a mask, the number that it adds where a key is excluded.
    """

    name: str
    dtype: str
    dims: list[int | DimSpec]
    low: int | None = None
    high: int | None = None
    excludes: float | Literal["-inf"] | None = None

    def text(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) if isinstance(d, int) else d.text for d in self.dims)}]"


class Source(Record):
    """Where the model came from: a registered name, a callable or a file of either kind, which can make it again, or a
    module or exported program in memory."""

    kind: Literal["registered", "callable", "huggingface", "module", "onnx", "program"]
    name: str
    options: dict[str, str | int | float | bool] = {}
    weights: str | None = None


Range = tuple[int, int, int]
"""Least, usual and largest size of a dim: TensorRT's min, opt and max."""


class Engine(Record):
    """A TensorRT plan.

    Attributes:
        compute_capabilities: that it is for, as `SM89`; `portable` is SM80 and later.
        profiles: the optimization profiles, each the range of every symbol; the first is the whole of what is taken.
        activation_memory: bytes on the device for all between inputs and outputs, at the largest sizes, where the
            builder says.
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
    """How forms were measured: on how many processors, at which sizes, and how long that took."""

    processors: int
    sizes: dict[str, int]
    seconds: float


class SessionSettings(Record):
    """How ONNX Runtime's CPU session ran this model fastest, on one machine and in one version of it.

    Attributes:
        threads: that one run is spread over; None for ONNX Runtime's own choice.
        spinning: whether its threads wait for work in a loop.
        arena: whether it keeps the memory of one run for the next.
        optimized: the model as that version's optimizer left it, which loads without it.
        measured: milliseconds of what was tried.
    """

    machine: Machine
    version: str
    threads: int | None = None
    spinning: bool = True
    arena: bool = True
    optimized: str | None = None
    measured: dict[str, float] = {}


class PlainPlan(Record):
    """What the plan would be with attention at the bundle's own precision: what attention at another one gains."""

    layers: int
    size: int
    activation_memory: int | None = None


class TargetRecord(Record):
    """What was made for a target.

    Attributes:
        cuda_model: ONNX Runtime's on CUDA, where that is another than on the CPU.
        tuning: how forms were measured; None where rules chose them.
        session: how ONNX Runtime's session is to be made on the machine that deployed it.
        attention_precision: of attention alone, where that is not the bundle's.
        without: the plan without it.
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
    """One reference case: inputs that can be made again, and where the outputs to compare with are.

    Attributes:
        sizes: what each symbol stands for.
        kind: how floating-point inputs are drawn (:func:`attnforge.runtime.cases.make_inputs`); "example" are
            the inputs that the model was deployed with, "data" real ones that came with it.
        masks: how masks are drawn.
        spread: by output, the largest relative and absolute error of eager's further draws of its rounding: on
            neighbouring inputs, or on other ordinary ones.
        scale: factor on floating-point inputs.
    """

    name: str
    sizes: dict[str, int]
    kind: Kind
    masks: Masks = "random"
    scale: float = 1.0
    seed: int
    spread: dict[str, tuple[float, float]] = {}

    @property
    def is_ordinary(self) -> bool:
        """Whether a model is meant to take such inputs, rather than to be tried by them."""
        return self.kind in ("example", "data", "normal", "uniform")


class Region(Record):
    """What stayed in fp32: operators of one module, and the evidence that they have to."""

    module: str
    nodes: list[str]
    why: str


class Mixed(Record):
    """How precisions were chosen (`precision="auto"`): a 16-bit one, and fp32 where the budget demands it.

    Attributes:
        low: the 16-bit precision.
        max_error: relative error on ordinary inputs that was to be met; `exactly` where it was asked for, else the most
            that twice eager's own is taken for.
        error: the largest that was found, in the emulation of 16-bit storage.
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


class Manifest(Record):
    """What a bundle holds.

    Attributes:
        precision: of everything, or the 16-bit one of a bundle that has `mixed` ones.
        metric: what the task is measured by, over the cases of real data; `least` is what it must reach.
        choice: which backend was measured to be fastest, and where; None where there was nothing to choose.
        seconds: that every stage of deploying it took.
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
    files: dict[str, str] = {}
