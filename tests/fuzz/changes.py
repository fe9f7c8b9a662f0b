"""Changes to bytes, numbers and strings, as an attacker, a bad disk or a faulty program could make them."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    0, 1, -1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**48, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63),
    0.5, -0.0, 1e-320, 1e30, 1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = (
    "", " ", ".", "..", "/", "../canary", "/etc/passwd", "C:\\x", "a\\b", "nul\0", "new\nline", "\x1b]0;title\x07",
    "\x9b31m", "\u202eevil", "[red]", "[/red]", "{0}", "%s", "<script>", "os:system", "json:loads", "eager", "n", "2*n",
    "n+", "((", "1e999", "float128", "object", "bfloat16", "x" * 5_000, "(" * 3_000,
)  # fmt: skip

numbers = st.sampled_from(NUMBERS) | st.integers(-10, 10) | st.integers() | st.floats()
texts = st.sampled_from(TEXTS) | st.text(max_size=20)


def neighbours(value: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values close to this one, mostly of the same type."""
    if isinstance(value, bool):
        return st.just(not value)
    if isinstance(value, int):
        return st.sampled_from([value - 1, value + 1, -value, 2 * value, 10**6 * value, value / 2, str(value)])
    if isinstance(value, float):
        return st.sampled_from([-value, 1e-3 * value, 1e3 * value, math.nan, math.inf, str(value)])
    if isinstance(value, str):
        position = st.integers(0, len(value))
        return st.builds(lambda i, text: value[:i] + text + value[i + len(text) :], position, texts) | st.builds(
            lambda i: value[:i], position
        )
    return st.nothing()


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the bytes with one to three changes: flipped bits, a part cut, doubled, zeroed or moved, or a lost end."""
    for _ in range(draw(st.integers(1, 3))):
        if not data:
            break
        start = draw(st.integers(0, len(data) - 1))
        length = min(draw(st.sampled_from([1, 2, 4, 8, 64, 4096])), len(data) - start)
        part = data[start : start + length]
        how = draw(st.sampled_from(["bit", "byte", "number", "cut", "double", "zero", "ones", "end", "move", "add"]))
        if how == "bit":
            part = bytes([part[0] ^ (1 << draw(st.integers(0, 7))), *part[1:]])
        elif how == "byte":
            part = bytes([draw(st.integers(0, 255)), *part[1:]])
        elif how == "number":
            part = draw(st.sampled_from([2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, 0])).to_bytes(8, "little")
        elif how == "cut":
            part = b""
        elif how == "double":
            part *= 2
        elif how in ("zero", "ones"):
            part = (b"\0" if how == "zero" else b"\xff") * length
        elif how == "move":
            source = draw(st.integers(0, len(data) - 1))
            part = data[source : source + length]
        elif how == "add":
            part += draw(st.binary(min_size=1, max_size=32))
        data = data[:start] if how == "end" else data[:start] + part + data[start + length :]
    return data
