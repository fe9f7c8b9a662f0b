"""What is proved of the masks that people write: :mod:`tests.support.mask_idioms`."""

from __future__ import annotations

import functools

import pytest

from attnforge.export.attention.visibility import Unsized, Visibility
from tests.support.mask_idioms import IDIOMS, proved
from tests.support.tiers import is_in, share

pytestmark = pytest.mark.xdist_group("mask-idioms")


DYNAMIC = {name: turn for turn, name in enumerate(name for name, idiom in IDIOMS.items() if idiom.proved)}

MEASURED = ("is_causal", "window behind", "blocks", "bottom-right causal", "local and global", "a window of the data")
"""The masks whose share of products is counted."""


@functools.cache
def known(is_dynamic: bool) -> dict[str, Visibility]:
    """What is proved of all, or of those that a draw of the tests takes: every sixth, in its dynamic form."""
    if is_dynamic:
        return proved(True, [name for name, turn in DYNAMIC.items() if is_in(turn, 6) or name in MEASURED])
    return proved(False, IDIOMS)


@pytest.mark.parametrize("name", [pytest.param(name, marks=share(turn, 6)) for name, turn in DYNAMIC.items()])
def test_dynamic(name: str) -> None:
    idiom, visible = IDIOMS[name], known(True)[name]
    assert visible.text() == idiom.proved
    assert visible.silent == idiom.silent


@pytest.mark.full  # a draw has idioms in their dynamic form
@pytest.mark.parametrize("name", IDIOMS)
def test_static(name: str) -> None:
    idiom, visible = IDIOMS[name], known(False)[name]
    assert visible.text() == (idiom.static or idiom.proved)
    assert visible.silent == idiom.silent


def test_share_of_products() -> None:
    dynamic = known(True)
    n = {"n": 4096, "m": 4096}
    assert dynamic["is_causal"].share(n) == (4096 + 1) / 2 / 4096
    assert dynamic["window behind"].share(n) == (4096 * 5 - 10) / 4096**2
    assert dynamic["blocks"].share({"n": 10}) == (16 + 16 + 4) / 100
    assert dynamic["bottom-right causal"].share({"n": 1, "m": 7}) == 1.0
    assert dynamic["local and global"].share({"n": 2}) == 1.0
    with pytest.raises(Unsized, match="n is not known"):
        dynamic["is_causal"].share({"m": 3})
    with pytest.raises(Unsized, match="sum_1"):
        dynamic["a window of the data"].share(n)
