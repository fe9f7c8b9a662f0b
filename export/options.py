"""The options of a deployment, checked before anything is exported."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, TypeGuard, TypeVar

import numpy as np

from attnforge.arrays import is_floating, to_numpy
from attnforge.bundle import FLAVOURS, OPENVINO, Range, Source, TensorSpec, Wrong
from attnforge.bundle.schema import LONGEST_NAME
from attnforge.errors import UnknownNameError, UsageError, WrongError, plain, shortened
from attnforge.export.reference import Data
from attnforge.export.targets.registry import TARGETS
from attnforge.input_files import LABELS, read_inputs, read_labels
from attnforge.pictures import pictures_of
from attnforge.precision import PRECISIONS, Precision
from attnforge.runtime.inputs import by_name, in_order
from attnforge.runtime.parity.metrics import check_least, metric_named
from attnforge.text import Tokenizer, read_texts

T = TypeVar("T")

KEEPS_SOME = "auto-"
"""Prefix of a quantised precision with which products may stay in fp32 to meet the requirement."""

AUTOMATIC = {"auto": ("fp16", "bf16"), "auto-fp16": ("fp16",), "auto-bf16": ("bf16",)}
"""Values of `precision` that let attnforge choose every operator's precision, and the 16-bit precisions that each
tries."""

QUANTISED = {f"{auto}{p.name}": p for p in PRECISIONS.values() if p.is_quantised for auto in ("", KEEPS_SOME)}
"""Values of `precision` that quantise products, and the precision they quantise to."""

MOST_PLACES = 2**24
"""Maximum capacity of a decoder's cache, in tokens per sample."""

FP8_FOR = ("SM89", "SM120")
"""GPUs that a TensorRT-RTX plan with fp8 is built for by default; older ones have no fp8."""

WITHOUT_FP8 = ("SM75", "SM80", "SM86")

MOST_TEXTS, MOST_PICTURES = 256, 64
"""Maximum number of texts of a file, and of pictures of a folder, that become real inputs; of more, as many at equal
distances."""

Real = Sequence[Any] | Mapping[str, Any] | str | os.PathLike[str]
"""Inputs of one call: by position, by name, or an `.npz` of named arrays; or of as many calls as it takes: a `.txt`
file with a text on each line, a picture, or a folder of pictures."""


class Keywords(TypedDict, total=False):
    """The keyword-only options of :func:`attnforge.deploy`, whose docstring describes them."""

    compute_capabilities: Sequence[str]
    profiles: Sequence[Mapping[str, Range]]
    attention_precision: str | None
    require_fused: Sequence[str]
    data: Sequence[Real]
    labels: Sequence[Any]
    metric: str | None
    least: float | None
    max_error: float | None
    tune: bool
    force: bool
    cache: bool
    source: Source | None
    model_options: Mapping[str, Any] | None
    weights: str | os.PathLike[str] | None
    own_data: bool
    trust_source: bool
    cache_tokens: int | None
    cache_precision: str | None
    tokenizer: str | os.PathLike[str] | None
    processor: str | os.PathLike[str] | None
    stop: Sequence[int]
    max_eager_error: float | None
    keep_wrong: bool


@dataclass(frozen=True)
class DeployOptions:
    """The options of a deploy; :func:`attnforge.deploy` describes each option.

    Raises:
        UnknownNameError: an unknown precision, target or metric.
        UsageError: options that exclude each other, or a number out of range.
    """

    precision: str | None = None
    targets: Sequence[str] | None = None
    name: str | None = None
    compute_capabilities: Sequence[str] = ()
    profiles: Sequence[Mapping[str, Range]] = ()
    attention_precision: str | None = None
    require_fused: Sequence[str] = ()
    data: Sequence[Real] = ()
    labels: Sequence[Any] = ()
    metric: str | None = None
    least: float | None = None
    max_error: float | None = None
    tune: bool = True
    force: bool = False
    cache: bool = True
    source: Source | None = None
    model_options: Mapping[str, Any] | None = None
    weights: str | os.PathLike[str] | None = None
    own_data: bool = True
    trust_source: bool = False
    cache_tokens: int | None = None
    cache_precision: str | None = None
    tokenizer: str | os.PathLike[str] | None = None
    processor: str | os.PathLike[str] | None = None
    stop: Sequence[int] = ()
    max_eager_error: float | None = None
    keep_wrong: bool = False

    def __post_init__(self) -> None:
        if self.cache_tokens is not None and not 1 <= self.cache_tokens <= MOST_PLACES:
            raise UsageError(f"cache_tokens is {self.cache_tokens}; give a number of tokens, 1 to {MOST_PLACES:,}")
        if self.cache_tokens is None and self.stop:
            raise UsageError("stop token ids are for generation, which needs a cache; give cache_tokens as well")
        if self.max_eager_error is not None and not 0 < self.max_eager_error < math.inf:
            raise UsageError(f"max_eager_error is {self.max_eager_error:g}; give a relative error above 0, such as 0.5")
        if self.name and (len(self.name) > LONGEST_NAME or plain(self.name) != self.name):
            raise UsageError(
                f"name is {shortened(repr(self.name))}; give one line of at most {LONGEST_NAME:,} characters"
            )
        self._check_precision()
        self._check_cache_precision()
        changed = self.precision if self.quantised else "an int8 cache" if self.cache_precision else None
        if changed is not None and self.max_error is None and (self.metric is None or self.least is None):
            raise UsageError(
                f"{changed} changes what the model answers, and no limit was given; give max_error (a relative error, "
                "such as 0.05), or a metric and its least value"
            )
        self._check_targets()
        if self.least is not None:
            if self.metric is None:
                raise UsageError(f"least is {self.least:g} and no metric was named; name accuracy or cosine")
            check_least(self.least)

    @property
    def automatic(self) -> tuple[str, ...]:
        """The 16-bit precisions to choose from; empty if the precision is given."""
        return AUTOMATIC.get(self.precision or "", ())

    @property
    def quantised(self) -> Precision | None:
        """The quantisation of products; None without one."""
        return QUANTISED.get(self.precision or "")

    @property
    def is_quantised(self) -> bool:
        """Whether products or caches are quantised."""
        return self.quantised is not None or self.cache_precision is not None

    @property
    def keeps_some(self) -> bool:
        """Whether some of these products may stay in fp32."""
        return (self.precision or "").startswith(KEEPS_SOME)

    @property
    def built_for(self) -> Sequence[str]:
        """The compute capabilities that TensorRT-RTX's plan is built for; empty for a portable one."""
        return self.compute_capabilities or (FP8_FOR if self._is_fp8 else ())

    @property
    def _is_fp8(self) -> bool:
        return self.quantised is not None and self.quantised.name == "fp8"

    @property
    def source_precision(self) -> str | None:
        """Name of the precision to export the model at; None for a graph's or program's own."""
        return "fp32" if self.automatic or self.is_quantised else self.precision

    def _check_precision(self) -> None:
        precision, error = self.precision, self.max_error
        known = dict.fromkeys((*PRECISIONS, *AUTOMATIC, *QUANTISED))
        if precision is not None and precision not in known:
            raise UnknownNameError("precision", precision, known)
        if error is not None:
            if not (self.automatic or self.is_quantised):
                raise UsageError(
                    f"max_error is {error:g} and the precision {precision or 'fp32'}; it is for precision auto or "
                    f"{', '.join(QUANTISED)}, or a cache_precision"
                )
            if not 0 < error < 1:
                raise UsageError(f"max_error is {error:g}; give a relative error between 0 and 1")
        if self.attention_precision is None:
            return
        if self.automatic:
            raise UsageError("attention_precision was given with precision auto, which chooses it; leave one out")
        low = [p.name for p in PRECISIONS.values() if p.is_low]
        if self.attention_precision == "fp8":
            raise UsageError(
                "attention is in fp8 only with products in fp8, where it is fused; deploy with precision fp8"
            )
        if self.attention_precision in QUANTISED:
            raise UsageError(
                f"attention_precision is {self.attention_precision}, which no TensorRT fuses and whose error is about "
                f"a tenth; give {' or '.join(low)}"
            )
        if self.attention_precision not in low:
            raise UnknownNameError("attention precision", self.attention_precision, low)

    def _check_cache_precision(self) -> None:
        if self.cache_precision is None:
            return
        if self.cache_precision != "int8":
            raise UnknownNameError("cache precision", self.cache_precision, ["int8"])
        if self.cache_tokens is None:
            raise UsageError("cache_precision is int8 and there is no cache; give cache_tokens as well")
        if self.automatic or self.precision not in (None, "fp32", *QUANTISED):
            raise UsageError(
                f"int8 caches need fp32 or quantised products, not {self.precision}, because decoder steps compute in "
                "fp32; leave out the precision or the cache precision"
            )

    def _check_targets(self) -> None:
        for target in (*(self.targets or ()), *self.require_fused):
            if target == OPENVINO:
                raise UsageError(
                    "openvino needs no target of its own, because it runs every bundle; deploy for onnxruntime, and "
                    "load with backend='openvino' (--backend openvino)"
                )
            if target not in TARGETS:
                raise UnknownNameError("target", target, TARGETS)
        if self.targets is not None and not self.targets:
            raise UsageError(
                f"targets is empty; name some of {', '.join(TARGETS)}, or leave it out to build all that builds here"
            )

    def check_data(self) -> None:
        """Check the real inputs, once those of a registered model are known.

        Raises:
            UsageError: an option needs real inputs, and there are none; or the labels or the metric do not fit them.
        """
        if self.cache_precision is not None and not self.data:
            raise UsageError(
                "int8 caches take their ranges from real keys and values, and no real inputs were given; give some as "
                "data (--calibrate)"
            )
        if self.labels and any(_is_texts(values) or _are_pictures(values) for values in self.data):
            raise UsageError(
                "labels were given, and texts and pictures have none; give an .npz with every input and the labels"
            )
        if self.labels and len(self.labels) != len(self.data):
            raise UsageError(f"{len(self.labels)} labels were given for {len(self.data)} inputs; give one for each")
        if self.metric is not None:
            if not self.data:
                raise UsageError(f"{self.metric} is measured on real inputs; give some as data")
            metric_named(self.metric, bool(self.known_labels))

    @cached_property
    def known_labels(self) -> Sequence[Any]:
        """The labels that were given, or else those in the files of real inputs.

        Raises:
            InputError: a file is missing or damaged.
            UsageError: some of the real inputs have labels and others have none.
        """
        if self.labels:
            return self.labels
        stored = (read_labels(Path(values)) for values in self.data if _is_file_of_arrays(values))
        labels = [array for array in stored if array is not None]
        if labels and len(labels) < len(self.data):
            raise UsageError(
                f"{len(labels)} of {len(self.data)} real inputs have labels; give all of them labels, as {LABELS!r} in "
                "each file, or none"
            )
        return labels

    def attention_at(self, precision: Precision, targets: Sequence[str]) -> Precision | None:
        """The precision at which TensorRT computes attention alone, or None if it is the bundle's own. With quantised
        products it is fp16 by default, because TensorRT has no fused kernel for fp32.

        Args:
            precision: the bundle's precision.
            targets: the targets that are built.

        Raises:
            UsageError: the bundle is in 16 bits already, or TensorRT is not a target.
        """
        if self.attention_precision is None:
            return PRECISIONS["fp16"] if self.quantised and set(targets) & set(FLAVOURS) else None
        if precision.is_low:
            raise UsageError(
                f"attention_precision is {self.attention_precision} and the whole bundle is in {precision.name}; leave "
                "the attention precision out, or deploy in fp32 or tf32"
            )
        if not set(targets) & set(FLAVOURS):
            raise UsageError(
                f"attention_precision ({self.attention_precision}) is for TensorRT, and only {', '.join(targets)} is "
                f"built; add a target ({', '.join(FLAVOURS)}), or leave the attention precision out"
            )
        return PRECISIONS[self.attention_precision]

    def check_effect(self, targets: Sequence[str]) -> None:
        """Check that every option has a target that it applies to.

        Args:
            targets: the targets that are built.

        Raises:
            UsageError: an option is for TensorRT alone, which is not built.
        """
        built = ", ".join(targets) or "nothing"
        if self.compute_capabilities and "tensorrt_rtx" not in targets:
            raise UsageError(
                f"compute capabilities ({', '.join(self.compute_capabilities)}) are for tensorrt_rtx, and {built} is "
                "built; add that target, or leave them out"
            )
        if self._is_fp8 and (old := [name for name in self.compute_capabilities if name in WITHOUT_FP8]):
            raise UsageError(
                f"fp8 is for GPUs of compute capability 8.9 and later, not {', '.join(old)}; name others "
                f"({', '.join(FP8_FOR)}), or deploy in int8"
            )
        if self.profiles and not set(targets) & set(FLAVOURS):
            raise UsageError(
                f"further profiles are for TensorRT's plans, and {built} is built; add a target "
                f"({', '.join(FLAVOURS)}), or leave them out"
            )

    def allow(self, wrong: Wrong | None, name: str) -> Wrong | None:
        """Return the problems of a bundle if it is to be written anyway.

        Args:
            wrong: the problems; None if there are none.
            name: name of the model.

        Raises:
            WrongError: it is not to be written.
        """
        if wrong is not None and not self.keep_wrong:
            raise WrongError(
                f"{name} was not deployed: {wrong.text()}; to write the bundle anyway, for attnforge diagnose, pass "
                "--keep-wrong (keep_wrong=True)"
            )
        return wrong

    def real_data(self, inputs: list[TensorSpec]) -> Data:
        """The real inputs by name, floating-point ones in the model's dtypes, and their labels.

        Raises:
            InputError: inputs that the model does not take.
        """
        cases = []
        for named in (case for values in self.data for case in self._read(inputs, values)):
            arrays = {name: to_numpy(name, value) for name, value in named.items()}
            cases.append(
                {spec.name: a.astype(spec.dtype) if is_floating(a := arrays[spec.name]) else a for spec in inputs}
            )
        takes_labels = any(spec.name == LABELS for spec in inputs)  # then labels are an input like any other
        labels = self.labels if takes_labels else self.known_labels
        return Data(cases, [np.asarray(to_numpy(LABELS, array)) for array in labels])

    def _read(self, inputs: list[TensorSpec], values: Real) -> Sequence[dict[str, Any]]:
        """Inputs by name: of one call, or of as many as texts or pictures take."""
        if _is_texts(values):
            if self.tokenizer is None:
                raise UsageError(
                    f"{values} contains texts, and the model has no tokenizer; give one (tokenizer=, --tokenizer), or "
                    "an .npz with every input by name"
                )
            return Tokenizer(self.tokenizer).batches(_at_equal_distances(read_texts(Path(values)), MOST_TEXTS), inputs)
        if _are_pictures(values):
            return self._of_pictures(inputs, Path(values))
        if isinstance(values, str | os.PathLike):
            values = read_inputs(inputs, [os.fspath(values)], ignored=[LABELS])
        return [by_name(inputs, in_order(inputs, values) if isinstance(values, Mapping) else values)]

    def _of_pictures(self, inputs: list[TensorSpec], path: Path) -> list[dict[str, Any]]:
        """A picture, or those of a folder, in batches if all become one size."""
        if len(inputs) != 1:
            names = ", ".join(spec.name for spec in inputs)
            raise UsageError(f"{path} contains pictures, and the model takes {names}; give an .npz with every input")
        settings = Path(self.processor).read_bytes() if self.processor is not None else None
        files, spec = _at_equal_distances(pictures_of(path), MOST_PICTURES), inputs[0]
        pictures = [read_inputs(inputs, [os.fspath(file)], settings=settings)[spec.name] for file in files]
        sizes = sorted({picture.shape[2:] for picture in pictures})
        differ = len(sizes) > 1
        if differ and spec.range_of(0)[0] > 1:
            found = " and ".join(f"{height} × {width}" for height, width in sizes[:2])
            raise UsageError(
                f"the pictures in {path} become {found} pixels, and one call takes {spec.range_of(0)[0]} or more of "
                "one size; give pictures of one size, or an .npz"
            )
        return [{spec.name: np.concatenate(batch)} for batch in spec.in_batches(pictures, smallest=differ)]


def _is_texts(values: Real) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(values, str | os.PathLike) and Path(values).suffix == ".txt"


def _are_pictures(values: Real) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(values, str | os.PathLike) and Path(values).exists() and bool(pictures_of(Path(values)))


def _is_file_of_arrays(values: Real) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(values, str | os.PathLike) and not (_is_texts(values) or _are_pictures(values))


def _at_equal_distances(items: Sequence[T], most: int) -> list[T]:
    """All items, or of more than `most` as many at equal distances."""
    count = min(len(items), most)
    return [items[i * len(items) // count] for i in range(count)]
