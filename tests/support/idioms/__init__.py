"""Attention as people write it, and what only looks like it: the one catalogue of the tests."""

from tests.support.idioms import as_modules as as_modules
from tests.support.idioms import on_heads as on_heads
from tests.support.idioms import over_layers as over_layers
from tests.support.idioms.catalogue import IDIOMS as IDIOMS
from tests.support.idioms.catalogue import Idiom as Idiom
