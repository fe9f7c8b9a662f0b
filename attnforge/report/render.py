"""Shared parts of all reports: formats of numbers in terminals, pages and Markdown, and the rendering of templates.
Importing this module imports no other library; jinja2 is imported with the first page."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnforge.atomic import check_writable, write_whole
from attnforge.errors import UnavailableError, UsageError
from attnforge.numbers import scientific

if TYPE_CHECKING:
    import jinja2

    from attnforge.records import Interval

NOTHING = "–"
"""Placeholder for a number that was not measured."""


# --- numbers ----------------------------------------------------------------------------------------------------------


def places(numbers: Iterable[float | None], digits: int = 3) -> int:
    """Return the number of decimal places that shows the smallest number to this many digits, and the largest to at
    most two more."""
    sizes = [abs(number) for number in numbers if number]
    if not sizes:
        return 0
    low, high = (math.floor(math.log10(size)) for size in (min(sizes), max(sizes)))
    return max(0, min(digits - 1 - low, digits + 1 - high, 6))


def rounded(number: float | None, digits: int = 3) -> str:
    """Format a number to this many digits, without powers of ten: `0.0123`, `33.0`, `1,234`."""
    return fixed(number, places([number], digits))


def fixed(number: float | None, decimals: int) -> str:
    """Format a number with this many decimals, so that decimal points align in a column."""
    return NOTHING if number is None else f"{number:,.{decimals}f}"


def error(number: float | None) -> str:
    """Format a relative error to two digits (:func:`attnforge.numbers.scientific`)."""
    return NOTHING if number is None else scientific(number)


def percent(share: float | None) -> str:
    """Format a share as percent to two digits: `38%`, `0.21%`; `<0.1%` below a thousandth, `12 times` from ten on."""
    if share is None:
        return NOTHING
    if not math.isfinite(share):
        return "not finite"
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.0f} times" if share >= 10 else f"{rounded(100 * share, 2)}%"


def interval(estimate: Interval, decimals: int | None = None) -> str:
    """Format an interval as `low–high`, by default with the decimals of the value; empty for a single reading."""
    if estimate.low == estimate.high:
        return ""
    decimals = places([estimate.value]) if decimals is None else decimals
    return f"{estimate.low:,.{decimals}f}–{estimate.high:,.{decimals}f}"


def with_interval(estimate: Interval, decimals: int) -> str:
    """Format an estimate as `value (low–high)`, with this many decimals; only the value for a single reading."""
    ends = interval(estimate, decimals)
    return fixed(estimate.value, decimals) + (f" ({ends})" if ends else "")


def milliseconds(estimate: Interval) -> str:
    """Format an estimate as `33.0 ms (95%: 32.8–33.3)`."""
    ends = interval(estimate)
    return f"{rounded(estimate.value)} ms" + (f" (95%: {ends})" if ends else "")


def sizes_text(sizes: Mapping[str, int], none: str = "") -> str:
    """Format sizes as `batch 1, tokens 3,136`."""
    return ", ".join(f"{symbol} {size:,}" for symbol, size in sizes.items()) or none


def grouped(reasons: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names for each reason, from pairs of a name and a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons:
        names.setdefault(reason, []).append(name)
    return names


def by_reason(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Join names with the same reason, such as `("tensorrt, tensorrt_rtx", "no CUDA device")`."""
    return [(", ".join(names), reason) for reason, names in grouped(reasons.items()).items()]


_FORMATS = (by_reason, error, fixed, interval, milliseconds, percent, rounded)
FILTERS: dict[str, Callable[..., Any]] = {"sizes": sizes_text, **{format.__name__: format for format in _FORMATS}}
"""The formats, by their names in templates."""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], words: int | None = None) -> str:
    """Format a table in Markdown.

    Args:
        header: heading of every column.
        rows: cells of every row; a bar in a cell is escaped, and its lines are joined.
        words: number of leading text columns; the others are numbers, aligned right. None if all are text.
    """
    numbers = 0 if words is None else len(header) - words
    rule = "|" + "---|" * (len(header) - numbers) + "---:|" * numbers
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, rule, *body])


# --- pages ------------------------------------------------------------------------------------------------------------


def check_page(path: str | os.PathLike[str], force: bool = False) -> None:
    """Check that a page can be written to `path`, before the work that it reports.

    Raises:
        UnavailableError: the packages that a page needs are not installed.
        UsageError: `path` is a folder, or exists and `force` is False.
    """
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnavailableError(f"a page needs {' and '.join(missing)}; pip install 'attnforge[report]'")
    if os.path.isdir(path):  # False for an invalid name, which check_writable reports
        raise UsageError(f"{path} is a folder; name a file, such as {Path(path) / 'verify.html'}")
    check_writable(Path(path), force, "--html")


def environment() -> jinja2.Environment:
    """Return the environment of the templates, which escapes all values."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("attnforge", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= FILTERS
    return templates


def write_template(template: str | jinja2.Template, path: str | os.PathLike[str], **values: Any) -> Path:
    """Render a template, with all values escaped, to a file.

    Raises:
        OSError: the file cannot be written.
    """
    text = environment().get_template(template).render(**values)
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text.encode(errors="replace"))  # a path that is not UTF-8
    return file
