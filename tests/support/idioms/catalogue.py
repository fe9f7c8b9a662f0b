"""The definition of an idiom, the inputs that idioms share, and the list of all idioms.

A new idiom needs a function in `over_layers.py` or `on_heads.py`, or a module in `as_modules.py`, and nothing else:
`tests/export/attention/test_idioms.py` and `tests/export/lowering/test_idioms_in_16_bits.py` run every one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Literal, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.export import Dim

WIDTH, HEADS, HEAD_DIM, MAX_TOKENS = 64, 4, 16, 40
SCALE = HEAD_DIM**-0.5
SUMS_IN_16_BITS = "in 16 bits the sum is of another type than its operands, so it is left as it is"

Form = Literal["dynamic", "static"]
Sizes = tuple[int, int, int]
"""Batch, tokens, and number of keys of a memory or a cache."""

EXAMPLE: dict[Form, Sizes] = {"dynamic": (2, 16, 12), "static": (2, 12, 7)}

BATCH, TOKENS, KEYS = (
    Dim("batch", min=1, max=6),
    Dim("tokens", min=1, max=MAX_TOKENS),
    Dim("keys", min=1, max=MAX_TOKENS),
)
DIMS: dict[str, dict[int, Any]] = {
    "x": {0: BATCH, 1: TOKENS},
    "memory": {0: BATCH, 1: KEYS},
    "mask": {0: BATCH, 1: TOKENS, 2: TOKENS},
    "allowed": {0: TOKENS, 1: TOKENS},
    "padding": {0: BATCH, 1: TOKENS},
    "bias": {1: TOKENS, 2: TOKENS},
    "cache": {0: BATCH, 2: KEYS},
    "tokens_first": {0: TOKENS, 1: BATCH},
    "columns": {0: BATCH, 2: TOKENS},
    "sequence": {0: TOKENS},
    "seventeen": {},
    "sample": {},
    "pixels": {0: BATCH},
    "grid": {0: BATCH},
    "sixteen": {0: BATCH},
}
"""The dynamic dims of every input, in the format of :func:`torch.export.export`."""


def inputs(sizes: Sizes, seed: int = 0) -> dict[str, Tensor]:
    """Return every input, by name.

    Masks with several rows have fully masked and fully visible ones.

    Returns:
        x (B, n, 64), memory (B, m, 64); the masks mask (B, n, n), allowed (n, n) and padding (B, n), where True in the
        first two allows and in the last excludes; bias (4, n, n); cache (B, 4, m, 16); and inputs that only one or two
        idioms take: tokens_first (n, B, 64), columns (B, 64, n), sequence (n, 64), seventeen (17, 64), sample (1, 16,
        64), pixels (B, 8, 8, 64), grid (B, 6, 8, 64), sixteen (B, 16, 64).
    """
    batch, tokens, keys = sizes
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    allowed = torch.rand(tokens, tokens, generator=random) < 0.7
    padding = torch.rand(batch, tokens, generator=random) < 0.3
    mask = torch.rand(batch, tokens, tokens, generator=random) < 0.7
    allowed[0], allowed[-1] = False, True
    padding[0], padding[-1] = True, False
    mask[0, tokens // 2], mask[-1, tokens // 3] = False, True
    return {
        "x": 2 * normal(batch, tokens, WIDTH),
        "memory": normal(batch, keys, WIDTH),
        "mask": mask,
        "allowed": allowed,
        "padding": padding,
        "bias": normal(HEADS, tokens, tokens),
        "cache": normal(batch, HEADS, keys, HEAD_DIM),
        "tokens_first": normal(tokens, batch, WIDTH),
        "columns": normal(batch, WIDTH, tokens),
        "sequence": normal(tokens, WIDTH),
        "seventeen": normal(17, WIDTH),
        "sample": normal(1, 16, WIDTH),
        "pixels": normal(batch, 8, 8, WIDTH),
        "grid": normal(batch, 6, 8, WIDTH),
        "sixteen": normal(batch, 16, WIDTH),
    }


@dataclass(frozen=True)
class Idiom:
    """A way to write attention.

    Attributes:
        make: returns a new module, whose forward takes the inputs named in `takes`.
        forms: with which dims it is exported: `static` is four times cheaper, `dynamic` is what most users do.
        sites: number of its attention sites.
        unfused: why TensorRT has no fused kernel for it; None if it must fuse.
        not_yet: by form, why TensorRT does not fuse it although it could; to be removed once it does.
    """

    name: str
    make: Callable[[], nn.Module]
    takes: tuple[str, ...]
    forms: tuple[Form, ...]
    sites: int = 1
    unfused: str | None = None
    not_yet: Mapping[Form, str] = field(default_factory=dict)

    def module(self) -> nn.Module:
        """Build the module, with weights of seed 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().eval()

    @property
    def args(self) -> tuple[Tensor, ...]:
        example = inputs(EXAMPLE["dynamic"])
        return tuple(example[name] for name in self.takes)

    @property
    def dynamic_shapes(self) -> tuple[dict[int, Any], ...] | None:
        dims = tuple(DIMS[name] for name in self.takes)
        return dims if any(dims) else None


IDIOMS: dict[str, Idiom] = {}

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=type[nn.Module])


def _add(idiom: Idiom) -> None:
    assert idiom.name not in IDIOMS, f"two idioms are called {idiom.name}"
    assert set(idiom.takes) <= set(DIMS), f"{idiom.name} takes {idiom.takes}"
    IDIOMS[idiom.name] = idiom


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


class Layers(nn.Module):
    """The layers for the idioms of `over_layers.py`: projections, tables, learned scales and queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(WIDTH, HEADS * 8)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.few = nn.Linear(WIDTH, 2 * HEAD_DIM)
        self.table = nn.Parameter(0.5 * torch.randn(HEADS, MAX_TOKENS, MAX_TOKENS))
        self.buckets = nn.Embedding(2 * MAX_TOKENS, HEADS)
        self.per_head = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.latents = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.grid_rows, self.grid_columns = (nn.Parameter(0.3 * torch.randn(4, 4, HEAD_DIM)) for _ in range(2))
        self.theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.block = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True, norm_first=True)

    def split(self, x: Tensor, heads: int = HEADS) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)  # (B, h, n, d)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def folded(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, n, HEADS, HEAD_DIM).transpose(1, 2).reshape(b * HEADS, n, HEAD_DIM)

    def unfolded(self, x: Tensor, batch: int) -> Tensor:
        return x.view(batch, HEADS, -1, HEAD_DIM).transpose(1, 2).reshape(batch, -1, WIDTH)


def over_layers(forward: Callable[..., Any]) -> nn.Module:
    """Build a module with this forward and only the :class:`Layers` that it names, because every parameter, used or
    not, makes the export slower."""
    module: nn.Module = type(forward.__name__, (Layers,), {"forward": forward})()
    named = _named(forward.__code__)
    named |= {name for helper in named & vars(Layers).keys() for name in _named(getattr(Layers, helper).__code__)}
    for name in [*module._modules, *module._parameters]:
        if name not in named:
            delattr(module, name)
    return module


def _named(code: CodeType) -> set[str]:
    """Return the names that code and its nested functions look up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_named, inner))


class OnHeads(nn.Module):
    """One way to attend, after a projection."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        query, key, value = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=HEADS).unbind(0)
        return self.attend(query, key, value, *more)


def takes_on_heads(attend: Callable[..., Any]) -> tuple[str, ...]:
    """Return the inputs of :class:`OnHeads`: x, and the parameters of `attend` after query, key and value."""
    return "x", *_parameters(attend)[3:]


def idiom(*, unfused: str | None = None, static: bool = False, **renamed: str) -> Callable[[F], F]:
    """Add a forward over :class:`Layers`; `renamed` maps parameters to inputs of another name."""

    def add(forward: F) -> F:
        takes = tuple(renamed.get(name, name) for name in _parameters(forward)[1:])
        forms: tuple[Form, ...] = ("dynamic", "static") if static else ("dynamic",)
        _add(Idiom(forward.__name__, lambda: over_layers(forward), takes, forms, unfused=unfused))
        return forward

    return add


def on_heads(
    *, dynamic: bool = False, sites: int = 1, unfused: str | None = None, not_yet: Mapping[Form, str] | None = None
) -> Callable[[F], F]:
    """Add an attention of query, key and value of (B, 4, n, 16); further parameters are inputs."""

    def add(attend: F) -> F:
        forms: tuple[Form, ...] = ("dynamic", "static") if dynamic else ("static",)
        takes = takes_on_heads(attend)
        _add(Idiom(attend.__name__, lambda: OnHeads(attend), takes, forms, sites, unfused, not_yet or {}))
        return attend

    return add


def as_module(*, dynamic: bool = False, sites: int = 1, not_yet: Mapping[Form, str] | None = None) -> Callable[[M], M]:
    """Add a module; the parameters of its forward are inputs."""

    def add(module: M) -> M:
        forms: tuple[Form, ...] = ("dynamic", "static") if dynamic else ("static",)
        takes = tuple(_parameters(module.forward)[1:])
        _add(Idiom(module.__name__, module, takes, forms, sites, None, not_yet or {}))
        return module

    return add


@dataclass(frozen=True)
class Part:
    """Idioms that are exported together, in one form; `group` names them for pytest-xdist."""

    form: Form
    names: tuple[str, ...]
    group: str


TOGETHER: dict[Form, int] = {"dynamic": 18, "static": 33}
"""Number of idioms per export: in larger parts each takes longer, in smaller ones the fixed cost of an export
dominates."""


DECOMPOSED = {
    "nan_to_num", "nan_to_num_under_one_mask", "two_masks_and_a_bias", "TorchMultiheadPadded", "ShiftedWindows",
}  # fmt: skip
"""Idioms with an operator that torch decomposes first: it then traces everything in the export twice, so they have
parts of their own."""


def parts() -> list[Part]:
    """Return all idioms in all their forms, in parts."""
    every = []
    for form, size in TOGETHER.items():
        names = [name for name, idiom in IDIOMS.items() if form in idiom.forms]
        for which in ("", "-decomposed"):
            some = [name for name in names if (name in DECOMPOSED) == bool(which)]
            for i in range(0, len(some), size):
                every.append(Part(form, tuple(some[i : i + size]), f"idioms-{form}{which}-{i // size}"))
    return every
