"""How numbers are written in messages and on pages."""

from __future__ import annotations

import math
import operator
from typing import Any

from attnforge.errors import InputError, shortened


def whole(what: str, number: Any) -> int:
    """A whole number of any type, such as NumPy's.

    Args:
        what: the number is of, for the message.
        number: as it was given.

    Raises:
        InputError: it is none.
    """
    try:
        return operator.index(number)
    except TypeError:
        raise InputError(f"{what} is {shortened(repr(number), 40)}; give a whole number") from None


def scientific(number: float, digits: int = 2) -> str:
    """A number to so many digits as `2.1e-7`, and not `2.1e-07`; `1e-6` where the further digits are zeros."""
    if not math.isfinite(number):
        return "not finite"
    mantissa, _, exponent = f"{number:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}" if number else "0"
