"""Visibility of common masks (:mod:`tests.support.mask_idioms`)."""

from __future__ import annotations

import functools

import pytest

from attnforge.export.graphs.sizes import Unmeasurable
from attnforge.export.masks.visibility import Visibility
from tests.support.mask_idioms import IDIOMS, proved

pytestmark = pytest.mark.xdist_group("mask-idioms")


DYNAMIC = [name for name, idiom in IDIOMS.items() if idiom.proved]


@functools.cache
def known(is_dynamic: bool) -> dict[str, Visibility]:
    """The visibility of all idioms in one form."""
    return proved(is_dynamic, DYNAMIC if is_dynamic else IDIOMS)


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic(name: str) -> None:
    idiom, visible = IDIOMS[name], known(True)[name]
    assert visible.text() == idiom.proved
    assert visible.silent == idiom.silent


@pytest.mark.parametrize("name", IDIOMS)
def test_static(name: str) -> None:
    idiom, visible = IDIOMS[name], known(False)[name]
    assert visible.text() == (idiom.static or idiom.proved)
    assert visible.silent == idiom.silent


def test_share_of_products() -> None:
    dynamic = known(True)
    n = {"n": 4096, "m": 4096}
    assert dynamic["is_causal"].share(n) == (4096 + 1) / 2 / 4096
    assert dynamic["window of earlier keys"].share(n) == (4096 * 5 - 10) / 4096**2
    assert dynamic["blocks"].share({"n": 10}) == (16 + 16 + 4) / 100
    assert dynamic["bottom-right causal"].share({"n": 1, "m": 7}) == 1.0
    assert dynamic["local and global"].share({"n": 2}) == 1.0
    with pytest.raises(Unmeasurable, match="n is not known"):
        dynamic["is_causal"].share({"m": 3})
    with pytest.raises(Unmeasurable, match="sum_1"):
        dynamic["a window of the data"].share(n)
