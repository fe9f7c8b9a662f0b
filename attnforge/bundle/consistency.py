"""Consistency of a manifest's fields with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from attnforge.bundle.schema import Case, Decoding, DimSpec, Manifest, TensorSpec


def inconsistencies(manifest: Manifest) -> Iterator[str]:
    """Yield inconsistencies between fields of a manifest that are valid by themselves."""
    absent = (name for name in _named_files(manifest) if name not in manifest.files)
    yield from (f"it has no {name}, which the manifest names: its `files` do not list it" for name in absent)
    yield from _repeated("inputs", manifest.inputs)
    yield from _repeated("outputs", manifest.outputs)
    yield from _repeated("cases", manifest.cases)
    if not manifest.outputs:
        yield "outputs: there are none"
    symbols: set[str] = set()
    for spec in manifest.inputs:
        for dim in spec.dims:
            if isinstance(dim, DimSpec):
                symbols.add(dim.symbol)
                if dim.min is None or dim.opt is None or dim.max is None or not dim.min <= dim.opt <= dim.max:
                    yield f"inputs: {spec.name} has a dim {dim.text} without min <= opt <= max"
        if spec.low is not None and (spec.high is None or spec.low > spec.high):
            yield f"inputs: {spec.name} has numbers from {spec.low} to {spec.high}"
        if spec.excludes is not None and not spec.dtype.startswith(("float", "bfloat")):
            yield f"inputs: {spec.name} is of {spec.dtype}, which excludes no keys by a number"
        if spec.setting is not None and spec.setting[0] > spec.setting[1]:
            yield f"inputs: {spec.name} has a setting from {spec.setting[0]} to {spec.setting[1]}"
    for case in [*manifest.cases, *(manifest.decoding.cases if manifest.decoding is not None else [])]:
        if missing := symbols - case.sizes.keys():
            yield f"cases: {case.name} has no size of {min(missing)}"
    if (decoding := manifest.decoding) is not None:
        yield from _inconsistencies_of_steps(manifest, decoding)
        symbols |= {decoding.kept} if decoding.kept is not None else set()
    for target, record in manifest.targets.items():
        for engine in record.engines:
            for profile in engine.profiles:
                if profile.keys() != symbols or any(not low <= opt <= high for low, opt, high in profile.values()):
                    yield f"targets.{target}: a profile of {engine.file} is of other dims, or without min <= opt <= max"


def _repeated(kind: str, named: Sequence[TensorSpec | Case]) -> Iterator[str]:
    """Yield an inconsistency for every name that occurs more than once."""
    counts = Counter(each.name for each in named)
    yield from (f"{kind}: {name} occurs twice" for name, count in counts.items() if count > 1)


def _inconsistencies_of_steps(manifest: Manifest, decoding: Decoding) -> Iterator[str]:
    """Yield inconsistencies of the record of decoder steps."""
    if [spec.name for spec in manifest.inputs] != [decoding.tokens] or len(manifest.inputs[0].dims) < 2:
        yield f"decoding: the tokens {decoding.tokens} are not the only input, (batch, tokens, …)"
        return
    yield from _repeated("decoding", manifest.graph_inputs)
    for spec in decoding.tensors:
        sizes = [dim for dim in spec.dims[1:] if isinstance(dim, int)]
        if len(sizes) != 3 or len(spec.dims) != 4 or sizes[1] != decoding.places:
            yield f"decoding: the cache {spec.name} is {spec.text()}, not (batch, heads, {decoding.places}, size)"
    for spec in (*manifest.inputs, *manifest.outputs):
        if len(spec.dims) < 2 or any(isinstance(dim, DimSpec) for dim in spec.dims[2:]):
            yield f"decoding: {spec.name} is {spec.text()}, not (batch, tokens, …) followed by fixed sizes"


def _named_files(manifest: Manifest) -> Iterator[str]:
    for record in manifest.targets.values():
        optimized = None if record.session is None else record.session.optimized
        engines = (engine.file for engine in record.engines)
        yield from filter(None, (record.model, *engines, record.cuda_model, optimized))
    if manifest.decoding is not None and manifest.decoding.tokenizer is not None:
        yield manifest.decoding.tokenizer
