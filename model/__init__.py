"""Reference attention in eager PyTorch, and the registry of named models.

Modules read like their formulas. :func:`build_model` returns a named model with weights, example arguments and dynamic
shapes for ``torch.export``.
"""

from attnforge.model.registry import MODELS as MODELS
from attnforge.model.registry import Example as Example
from attnforge.model.registry import build_model as build_model
