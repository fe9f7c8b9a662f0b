"""The page of a verification: one HTML file, without network or script, for someone who did not write the project."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import Bundle, Case, DimSpec, Kind, Manifest, Masks, SiteRecord
from attnforge.errors import UnavailableError, UsageError
from attnforge.precision import precision_named
from attnforge.report import charts
from attnforge.report.attention_maps import AttentionMaps, PatchGrid, SiteMaps, attention_maps, patch_grid
from attnforge.report.charts import Mark, Picture
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.budget import budget_precision
from attnforge.runtime.parity.comparison import BINS_A_DECADE, LEAST_DECADE, Comparison, Element
from attnforge.runtime.parity.verify import BackendReport, OutputReport, Report

TEMPLATE = "verify.html"

MOST_ROWS, MOST_OUTPUTS, MOST_SYMBOLS, MOST_DRAWN = 40, 4, 3, 4
"""How many cases and outputs have a picture of a backend, dims one of their own, and attention sites maps."""

KINDS: dict[Kind, str] = {
    "example": "the inputs that the model was deployed with",
    "data": "real inputs that came with the model",
    "normal": "random numbers around 0, most of them between −1 and 1",
    "uniform": "random numbers spread evenly from −1 to 1",
    "scaled": "the same as normal, made smaller or larger by the factor",
    "outliers": "normal, with a few channels sixty times as large, as trained transformers have them",
    "constant": "every number is one",
    "denormal": "numbers smaller than the precision can hold in full",
    "extremes": "normal, with a few numbers about as large as the precision allows",
}
MASKS: dict[Masks, str] = {
    "random": "a random three quarters may be attended to",
    "all": "everything may be attended to",
    "none": "nothing may be attended to",
    "one": "one key for each query",
    "all but one": "all keys but one",
    "ragged": "a beginning of each row, of random length",
}


def check_page(path: str | os.PathLike[str], force: bool = False) -> None:
    """See that a page can be written to `path`, before there is anything to write.

    Raises:
        UnavailableError: the packages that it needs are not installed.
        UsageError: `path` exists and `force` is not given, or is a folder.
    """
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(f"a page needs {' and '.join(missing)}; pip install attnforge[report]")
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; name a file, such as {Path(path) / 'verify.html'}")
    if Path(path).exists() and not force:
        raise UsageError(f"{path} exists; choose another file with --html, or overwrite it with --force (force=True)")


def write_page(
    report: Report,
    bundle: str | os.PathLike[str] | Bundle,
    path: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Path:
    """Write what :func:`attnforge.verify` found to one HTML file, with charts, and maps of attention weights.

    Args:
        report: of this bundle.
        bundle: its folder; its graphs run once more, on one case, for the attention weights.
        path: of the file.
        force: overwrite it.

    Returns:
        the file.

    Raises:
        UnavailableError: the packages that it needs are not installed: `pip install attnforge[report]`.
        UsageError: `path` exists and `force` is not given.
    """
    check_page(path, force)
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    manifest = opened.manifest
    return render(
        TEMPLATE,
        path,
        {"error": _error, "number": _number, "percent": _percent},
        report=report,
        manifest=manifest,
        floors={name: budget_precision(manifest, name).floor for name in report.backends}
        or {"": precision_named(manifest.precision).floor},
        verdict=_verdict(report),
        backends=[_backend(name, one, report, manifest) for name, one in report.backends.items()],
        attention=_attention(attention_maps(opened), manifest),
        kinds={kind: text for kind, text in KINDS.items() if any(case.kind == kind for case in report.cases)},
        masks={masks: text for masks, text in MASKS.items() if any(case.masks == masks for case in report.cases)},
    )


def render(
    template: str, path: str | os.PathLike[str], filters: Mapping[str, Callable[..., Any]], **values: Any
) -> Path:
    """Write what a template makes of values to a file; all of them are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnforge", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    text = environment.get_template(template).render(**values)
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def _error(number: float | None) -> str:
    return "–" if number is None else "0" if number == 0 else f"{number:.1e}"


def _number(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.9g}"


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return "over it"
    if share >= 10:
        return f"{share:.0f} times"
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "under 1 %"


def _verdict(report: Report) -> str:
    """One or two sentences for who reads nothing else."""
    if not report.backends:
        return "No backend could run on this machine, so nothing was proven."
    failed = {name: one for name, one in report.backends.items() if not one.passed}
    if not failed:
        which = " and ".join(report.backends)
        return (
            f"What was deployed computes the same function as the model: in every case, {which} "
            f"{'stays' if len(report.backends) == 1 else 'stay'} within the error that {report.precision} arithmetic "
            "itself explains."
        )
    said = ["What was deployed does not compute the same function as the model, as far as was tried."]
    for name, one in failed.items():
        cases = list(dict.fromkeys(c.case for c in one.failures))
        if cases:
            more = f" and {len(cases) - 4} more" if len(cases) > 4 else ""
            said.append(f"{name} fails {len(cases)} of {one.cases} cases: {', '.join(cases[:4])}{more}.")
        if one.reason or not cases:
            said.append(f"{name}: {one.reason or one.case}.")
    return " ".join(said)


# --- backends ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One output of one case, in the table."""

    case: Case
    found: Comparison

    @property
    def sizes(self) -> str:
        return ", ".join(f"{symbol} {size}" for symbol, size in self.case.sizes.items()) or "fixed"

    @property
    def kind(self) -> str:
        return _kind(self.case)


@dataclass(frozen=True)
class _Output:
    """One output over all cases."""

    name: str
    found: OutputReport
    histogram: Picture | None


@dataclass(frozen=True)
class _BySize:
    """Error by something, `title`."""

    title: str
    picture: Picture


@dataclass(frozen=True)
class _Backend:
    """One backend's part of the page."""

    name: str
    report: BackendReport
    outputs: list[_Output]
    by_case: Picture | None
    cases_left_out: int
    by_size: list[_BySize]
    worst: tuple[str, Element] | None
    rows: list[_Row] = field(default_factory=list)

    @property
    def failures(self) -> list[Comparison]:
        """Those that failed, furthest over the budget first."""
        return sorted(self.report.failures, key=lambda c: c.error / (c.budget or 1), reverse=True)


def _backend(name: str, report: BackendReport, whole: Report, manifest: Manifest) -> _Backend:
    cases = {case.name: case for case in whole.cases}
    shown = name if name != "eager" else "eager on this machine"
    rows = [_Row(cases[c.case], c) for c in report.comparisons if c.case in cases]
    if not rows:
        return _Backend(name, report, [], None, 0, [], None)
    outputs = [
        _Output(output, found, _histogram(shown, output, found, report) if i < MOST_OUTPUTS else None)
        for i, (output, found) in enumerate(report.outputs.items())
    ]
    worst_rows = _worst_by_case(rows)
    drawn = _most_telling(worst_rows)
    failed = [row.case.name for row in worst_rows if not row.found.passed]
    marks = [_mark(row) for row in drawn]
    alt = (
        f"Error of {name} in {len(drawn)} cases, one row each. "
        + (f"Over budget: {', '.join(failed)}. " if failed else "Every case is within its budget. ")
        + f"Closest to the budget, or furthest over it: {report.case}, with an error of {_error(report.error)} "
        f"where {_error(report.budget)} is allowed and eager has {_error(report.eager_error)}."
    )
    furthest = max(report.outputs.items(), key=lambda item: _excess(report, item[1]), default=None)
    worst = (furthest[0], furthest[1].worst) if furthest is not None and furthest[1].worst is not None else None
    return _Backend(
        name,
        report,
        outputs,
        charts.by_case(shown, marks, alt),
        len(worst_rows) - len(drawn),
        _by_sizes(shown, worst_rows, manifest),
        worst,
        rows,
    )


def _kind(case: Case) -> str:
    return case.kind if case.scale == 1 else f"{case.kind} × {case.scale:.3g}"


def _share(found: Comparison) -> float:
    """How much of the budget was used, by the norm or by the element, whichever is more."""
    if not found.passed:
        return math.inf
    of_norm = found.error / found.budget if found.budget else 0.0
    return max(of_norm, found.max_error / found.max_budget if found.max_budget else 0.0)


def _excess(report: BackendReport, output: OutputReport) -> float:
    """How far an output's worst element is off, for the budget of its case."""
    if output.worst is None:
        return -1.0
    case = output.worst.case
    return max((_share(c) for c in report.comparisons if c.case == case and c.worst == output.worst), default=0.0)


def _worst_by_case(rows: Sequence[_Row]) -> list[_Row]:
    """Of every case the output that is closest to its budget."""
    worst: dict[str, _Row] = {}
    for row in rows:
        other = worst.get(row.case.name)
        if other is None or _share(row.found) > _share(other.found):
            worst[row.case.name] = row
    return list(worst.values())


def _most_telling(rows: Sequence[_Row]) -> list[_Row]:
    """At most :data:`MOST_ROWS` of them, those that failed or are closest to the budget, in the order of the cases."""
    chosen = sorted(rows, key=lambda row: _share(row.found), reverse=True)[:MOST_ROWS]
    return [row for row in rows if any(row is one for one in chosen)]


def _mark(row: _Row) -> Mark:
    found = row.found
    return Mark(row.case.name, found.error, found.eager_error, found.budget, found.passed, row.case.is_ordinary)


def _histogram(backend: str, output: str, found: OutputReport, report: BackendReport) -> Picture | None:
    if not sum(found.errors):
        return None
    allowed = [a for c in report.comparisons if c.output == output and (a := _allowed(c)) is not None]
    alt = (
        f"Histogram of the errors of output {output}. {backend}: {_described(found.errors)}. "
        f"Eager: {_described(found.eager_errors)}."
    )
    ends = (min(allowed), max(allowed)) if allowed else None
    return charts.histogram(backend, found.errors, found.eager_errors, ends, alt)


def _allowed(found: Comparison) -> float | None:
    """What one number may be off, as a share of the largest; None where nothing was off, so that it is not known."""
    most = found.quantiles.get("max", 0.0)
    return found.max_budget * most / found.max_error if most and found.max_error and found.max_budget else None


def _described(errors: Sequence[int]) -> str:
    total = sum(errors)
    if not total:
        return "nothing to compare"
    running = np.cumsum(errors)
    typical, largest = int(np.searchsorted(running, total / 2)), int(np.flatnonzero(errors)[-1])
    most = f"all by less than {_edge(largest)}"
    return f"half of {total} numbers are off by less than {_edge(typical)} of the largest, {most}"


def _edge(bin: int) -> str:
    return f"{10 ** (LEAST_DECADE + (bin + 1) / BINS_A_DECADE):.0e}"


def _by_sizes(backend: str, rows: Sequence[_Row], manifest: Manifest) -> list[_BySize]:
    """Error against how many numbers the inputs have, and against every dynamic dim, where there are some."""
    symbols = list(dict.fromkeys(symbol for row in rows for symbol in row.case.sizes))
    if not symbols:
        return []
    counts = [
        sum(math.prod(reference.shape_of(spec, row.case.sizes)) for spec in manifest.inputs if _counts(spec.dims))
        for row in rows
    ]
    axes = [("size of the inputs", "numbers in the inputs", counts)]
    axes += [(symbol, symbol, [row.case.sizes[symbol] for row in rows]) for symbol in symbols[:MOST_SYMBOLS]]
    marks = [_mark(row) for row in rows]
    drawn = []
    for title, what, sizes in axes[: 1 if len(symbols) == 1 else None]:
        most, failed = _error(max(m.error for m in marks)), sum(not m.passed for m in marks)
        alt = (
            f"Error of {backend} by {what}, from {min(sizes)} to {max(sizes)}: {most} at most, "
            f"{failed} of {len(marks)} cases over budget."
        )
        drawn.append(_BySize(title, charts.by_size(backend, marks, sizes, what, alt)))
    return drawn


def _counts(dims: Sequence[int | DimSpec]) -> bool:
    return any(isinstance(dim, DimSpec) for dim in dims)


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Maps:
    """Eager's, the deployed model's and the difference, side by side."""

    label: str
    eager: Picture
    deployed: Picture
    difference: Picture


@dataclass(frozen=True)
class _OnImage(_Maps):
    """What one query attends to, over the image; whether the query is a patch itself, and keys begin with another."""

    image: Picture
    is_marked: bool
    after_token: bool


@dataclass(frozen=True)
class _Site:
    """One site of the page.

    Attributes:
        samples: how many it attends in, of which the first is looked at.
        deployed_off, eager_off: the most that a weight is off float64's, or off eager's where there is no float64.
        not_finite: how many of the deployed weights are.
    """

    name: str
    form: str
    is_held: bool
    samples: int
    heads: int
    queries: int
    keys: int
    deployed_off: float
    eager_off: float | None
    not_finite: int

    @property
    def is_pooled(self) -> bool:
        return max(self.queries, self.keys) > charts.MOST_CELLS


@dataclass(frozen=True)
class _Drawn:
    """A site with maps of its heads, and over the image where its keys are patches of one."""

    site: _Site
    heads: list[_Maps]
    photograph: _OnImage | None


@dataclass(frozen=True)
class _Attention:
    """What the page says of attention, on one case, whose inputs are `given`."""

    case: Case
    given: str
    no_exact: str | None
    sites: list[_Site]
    drawn: list[_Drawn]
    left_out: Mapping[str, str]
    records: Mapping[str, SiteRecord]


def _attention(weights: AttentionMaps, manifest: Manifest) -> _Attention:
    """Every site is measured; of those furthest off, the first and the last there are maps."""
    sites = [_measured(one) for one in weights]
    order = sorted(sites, key=lambda site: (site.not_finite, site.deployed_off), reverse=True)
    wanted = [site.name for site in [*order[: MOST_DRAWN - 2], *sites[:1], *sites[-1:], *order]]
    wanted = list(dict.fromkeys(wanted))[:MOST_DRAWN]
    image = _image(manifest, weights.inputs)
    drawn = [_drawn(site, one, image) for site, one in zip(sites, weights, strict=True) if site.name in wanted]
    records = {record.site: record for record in manifest.attention.details}
    return _Attention(weights.case, KINDS[weights.case.kind], weights.no_exact, sites, drawn, weights.left_out, records)


def _measured(one: SiteMaps) -> _Site:
    truth = one.eager if one.exact is None else one.exact
    heads, queries, keys = one.eager.shape
    return _Site(
        one.site,
        one.form,
        one.is_held,
        one.samples,
        heads,
        queries,
        keys,
        deployed_off=float(_furthest(one.deployed - truth).max(initial=0)),
        eager_off=float(_furthest(one.eager - truth).max(initial=0)) if one.exact is not None else None,
        not_finite=int((~np.isfinite(one.deployed)).sum()),
    )


def _drawn(site: _Site, one: SiteMaps, image: tuple[int, Array] | None) -> _Drawn:
    eager, deployed = one.eager.astype(np.float64), one.deployed.astype(np.float64)
    worst, maps = int(np.argmax(_furthest(deployed - eager))), []
    label = "The one head"
    if site.heads > 1:
        maps.append(_maps("Mean of all heads", one.site, eager.mean(0), deployed.mean(0)))
        label = f"Head {worst + 1} of {site.heads}, where deployed and eager differ most"
    maps.append(_maps(label, one.site, eager[worst], deployed[worst]))
    return _Drawn(site, maps, _photograph(one, image, eager, deployed))


def _furthest(off: Array) -> Array:
    """Of every head the largest finite difference."""
    return np.asarray(np.nan_to_num(np.abs(off), nan=0, posinf=0).reshape(len(off), -1).max(axis=-1, initial=0))


def _maps(label: str, site: str, eager: Array, deployed: Array) -> _Maps:
    off = deployed - eager
    top, most = _top(eager, deployed), _top(off) or 1e-12
    same = f"{label} of {site}, {eager.shape[0]} queries by {eager.shape[1]} keys"
    return _Maps(
        label,
        charts.heatmap(eager, top, f"Attention weights of eager: {same}; the largest is {_top(eager):.3g}."),
        charts.heatmap(deployed, top, f"Attention weights as deployed: {same}; the largest is {_top(deployed):.3g}."),
        charts.heatmap(off, most, f"Deployed minus eager: {same}; at most {most:.1e} apart.", difference=True),
    )


def _top(*arrays: Array) -> float:
    return float(max(np.max(np.abs(a), initial=0, where=np.isfinite(a)) for a in arrays))


def _image(manifest: Manifest, inputs: Mapping[str, Array]) -> tuple[int, Array] | None:
    """How many images the model was given, and the first, (height, width, channels) from 0 to 1; None where it takes
    none."""
    for spec in manifest.inputs:
        array = inputs[spec.name]
        floating = array.dtype == BFLOAT16 or np.issubdtype(array.dtype, np.floating)
        if len(spec.dims) == 4 and spec.dims[1] in (1, 3) and floating and array.size:
            image = array[0].astype(np.float64).transpose(1, 2, 0)
            image = np.nan_to_num(image, nan=0, posinf=0, neginf=0)
            low, high = image.min(), image.max()
            if low < 0 or high > 1 or high - low < 0.1:
                image = (image - low) / ((high - low) or 1.0)
            return len(array), image
    return None


def _photograph(one: SiteMaps, image: tuple[int, Array] | None, eager: Array, deployed: Array) -> _OnImage | None:
    """What one query attends to, drawn over the image; None where keys are no patches of it."""
    if image is None or one.samples != image[0]:
        return None
    pixels = image[1]
    grid = patch_grid(pixels.shape[0], pixels.shape[1], eager.shape[2])
    if grid is None or eager.shape[1] not in (eager.shape[2], 1):
        return None
    query, square, label = _query(grid, eager.shape[1])
    ours, theirs = (_on_grid(weights.mean(0)[query], grid) for weights in (deployed, eager))
    off = ours - theirs
    both = np.stack([ours, theirs])
    known = both[np.isfinite(both)] if np.isfinite(both).any() else np.zeros(1)
    ends, most = (float(known.min()), float(known.max()) + 1e-12), _top(off) or 1e-12
    same = f"{label} over the image, {grid.rows} × {grid.columns} patches of {grid.side} pixels, in {one.site}"
    peak = np.unravel_index(int(np.argmax(np.nan_to_num(theirs))), theirs.shape)
    at = f"most to the patch in row {peak[0] + 1}, column {peak[1] + 1}"
    return _OnImage(
        f"What {label} attends to",
        charts.overlay(pixels, theirs, ends, f"Eager: attention of {same}; {at}.", square),
        charts.overlay(pixels, ours, ends, f"Deployed: attention of {same}.", square),
        charts.overlay(
            pixels,
            off,
            (-most, most),
            f"Deployed minus eager: attention of {same}; at most {most:.1e} apart.",
            square,
            True,
        ),
        charts.photograph(
            pixels, f"The image that the model was given, {pixels.shape[1]} × {pixels.shape[0]}.", square
        ),
        square is not None,
        bool(grid.extra),
    )


def _query(grid: PatchGrid, queries: int) -> tuple[int, tuple[int, int, int] | None, str]:
    """Which query to draw, where it lies on the image, and what to call it."""
    if queries == 1:
        return 0, None, "the one query"
    if grid.extra:
        return 0, None, "the class token"
    row, column = grid.rows // 2, grid.columns // 2
    square = (row * grid.side, column * grid.side, grid.side)
    return row * grid.columns + column, square, f"the patch in row {row + 1}, column {column + 1}"


def _on_grid(weights: Array, grid: PatchGrid) -> Array:
    return np.asarray(weights[grid.extra :].reshape(grid.rows, grid.columns))
