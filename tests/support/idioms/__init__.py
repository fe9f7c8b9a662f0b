"""Catalogue of common ways to write attention, and of near misses."""

from tests.support.idioms import as_modules as as_modules
from tests.support.idioms import on_heads as on_heads
from tests.support.idioms import over_layers as over_layers
from tests.support.idioms.catalogue import IDIOMS as IDIOMS
from tests.support.idioms.catalogue import Idiom as Idiom
