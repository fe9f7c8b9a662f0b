"""Numbers in arguments, messages and pages."""

from __future__ import annotations

import math
import operator
from typing import Any

from attnforge.errors import InputError, shortened


def whole(name: str, number: Any) -> int:
    """Convert a whole number of any type, such as NumPy's, to an int.

    Args:
        name: name of the number, for the message.
        number: the number.

    Raises:
        InputError: it is not a whole number.
    """
    try:
        return operator.index(number)
    except TypeError:
        raise InputError(f"{name} is {shortened(repr(number), 40)}; give a whole number") from None


def scientific(number: float, digits: int = 2) -> str:
    """Format a number to this many significant digits as `2.1e-7`, not `2.1e-07`, and without trailing zeros."""
    if not math.isfinite(number):
        return "not finite"
    mantissa, _, exponent = f"{number:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}" if number else "0"
