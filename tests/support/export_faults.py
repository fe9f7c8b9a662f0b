"""Exporter faults, put into the output of torch's exporter: does `deploy` refuse them, and does `diagnose`
name them?

`python -m benchmarks run export-faults` deploys 200 random modules with a fault each, and exits with 1 if one is
deployed, loaded by `auto` or not named.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import torch
import typer
from torch import Tensor, nn

import attnforge
from attnforge.errors import AttnforgeError, CaptureError, UnavailableError, WrongError
from attnforge.export.sources import source
from attnforge.export.sources.torch_module import capture
from attnforge.model.registry import Example
from tests.support.random_models import draw, make

FLOAT = ir.DataType.FLOAT


class Dressed(nn.Module):
    """A module followed by operators that exporters get wrong: a norm's epsilon, a buffer, a cast to integers."""

    table: Tensor

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("table", torch.randn(width))

    def forward(self, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
        result = self.inner(*(x for x in (a, b, c) if x is not None))
        x: Tensor = result[0] if isinstance(result, tuple | list) else result
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.013) * self.gain + self.table
        return x + 0.3 * (4 * x).to(torch.int32).to(x.dtype).softmax(-1)


def subject(seed: int) -> Example:
    """Build a random :class:`Dressed` module with example inputs and dynamic shapes; its output's last dim is fixed."""
    drawn = (draw(seed + further) for further in itertools.count(step=1000))
    example = make(replace(next(recipe for recipe in drawn if recipe.kind != "columns"), precision="fp32"))
    names = ("a", "b", "c")
    shapes = example.dynamic_shapes
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = example.module(*example.args)
        width = (result[0] if isinstance(result, tuple | list) else result).shape[-1]
        renamed = None if shapes is None else dict(zip(names, shapes.values(), strict=False))
        return Example(Dressed(example.module, width).eval(), example.args, renamed)


class Fault(NamedTuple):
    """A change to a graph.

    Attributes:
        kind: one of :data:`FAULTS`.
        names: names of the values that were changed or removed.
    """

    kind: str
    names: list[str]


def _constant(value: ir.Value | None) -> Any:
    """Return the values of a floating-point constant, or None for any other value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return tensor.numpy() if tensor is not None and tensor.dtype == FLOAT else None


def _used(value: ir.Value) -> list[str]:
    return [str(value.name), *(str(output.name) for node, _ in value.uses() for output in node.outputs)]


def _replaced(value: ir.Value, by: ir.Value) -> list[str]:
    names = _used(value)
    ir.convenience.replace_all_uses_with(value, by)
    return names


def drop_a_constant(model: ir.Model, rng: random.Random) -> list[str]:
    """Replace `x + c`, or another operator with two operands, by `x`."""
    candidates = []
    for node in model.graph:
        if node.op_type in ("Add", "Sub", "Mul", "Div"):
            for i, value in enumerate(node.inputs):
                numbers, neutral = _constant(value), 0 if node.op_type in ("Add", "Sub") else 1
                if numbers is not None and numbers.size == 1 and abs(float(numbers) - neutral) > 1e-3:
                    candidates.append((node, node.inputs[1 - i]))
    node, kept = rng.choice(candidates)
    assert kept is not None
    return _replaced(node.outputs[0], kept)


def round_a_constant(model: ir.Model, rng: random.Random) -> list[str]:
    """Round a constant or a weight to bfloat16's precision."""
    values = [*model.graph.initializers.values(), *(n.outputs[0] for n in model.graph if n.op_type == "Constant")]
    candidates = []
    for value in values:
        numbers = _constant(value)
        if re.search(r"key\w*\.bias$", str(value.name)):  # shifts all scores of a query alike, without effect
            continue
        if numbers is not None and numbers.size == 1 and abs(float(numbers)) > 1e3:  # hides keys, rounded or not
            continue
        if numbers is not None and numbers.size and value.uses():
            rounded = torch.from_numpy(np.array(numbers)).bfloat16().float().numpy()
            if np.linalg.norm(rounded - numbers) > 1e-3 * np.linalg.norm(numbers):
                candidates.append((value, rounded))
    value, rounded = rng.choice(candidates)
    _set(value, rounded)
    return _used(value)


def freeze_a_buffer(model: ir.Model, rng: random.Random) -> list[str]:
    """Give a buffer its initial values instead of the current ones."""
    candidates = [value for name, value in model.graph.initializers.items() if name.endswith("table")]
    value = rng.choice(candidates)
    _set(value, np.zeros_like(_constant(value)))
    return _used(value)


def _set(value: ir.Value, numbers: Any) -> None:
    tensor = ir.tensor(numbers, name=value.name)
    if (node := value.producer()) is not None:
        node.attributes["value"] = ir.AttrTensor("value", tensor)
    value.const_value = tensor


def swap_an_axis(model: ir.Model, rng: random.Random) -> list[str]:
    """Compute a softmax or a mean over the second last axis."""
    node = rng.choice([node for node in model.graph if node.op_type == "Softmax"])
    node.attributes["axis"] = ir.AttrInt64("axis", -2)
    return [str(node.outputs[0].name)]


def remove_a_cast(model: ir.Model, rng: random.Random) -> list[str]:
    """Do not truncate numbers to integers."""
    casts = [node for node in model.graph if node.op_type == "Cast" and node.outputs[0].dtype == ir.DataType.INT32]
    node = rng.choice(casts)
    names = _used(node.outputs[0])
    for user, _ in list(node.outputs[0].uses()):
        assert node.inputs[0] is not None
        names += _replaced(user.outputs[0], node.inputs[0])
    return names


def leave_dropout_on(model: ir.Model, rng: random.Random) -> list[str]:
    """Drop a tenth of a tensor at random."""
    node = rng.choice([n for n in model.graph if n.op_type in ("Add", "MatMul", "Mul") and n.outputs[0].dtype == FLOAT])
    old = node.outputs[0]
    constants = [ir.node("Constant", [], {"value": ir.tensor(v)}) for v in (np.float32(0.1), np.array(True))]
    dropout = ir.node("Dropout", [old, *(c.outputs[0] for c in constants)], name="left_on")
    dropout.outputs[0].type, dropout.outputs[0].shape = old.type, old.shape
    for user, index in list(old.uses()):
        user.replace_input_with(index, dropout.outputs[0])
    model.graph.insert_after(node, [*constants, dropout])
    return ["left_on"]


FAULTS: tuple[Callable[[ir.Model, random.Random], list[str]], ...] = (
    drop_a_constant, round_a_constant, freeze_a_buffer, swap_an_axis, remove_a_cast, leave_dropout_on,
)  # fmt: skip


@contextmanager
def exported_wrong(seed: int) -> Iterator[list[Fault]]:
    """Make torch's exporter make a mistake, which is appended to the yielded list. Exports that other
    tests made are not reused (:mod:`tests.support.exports`)."""
    export, made = torch.onnx.export, list[Fault]()
    change = FAULTS[seed % len(FAULTS)]

    def wrong(*args: Any, **keywords: Any) -> Any:
        program = export(*args, **keywords)
        assert program is not None
        made.append(Fault(change.__name__, change(program.model, random.Random(seed))))
        return program

    with patch.object(torch.onnx, "export", wrong), patch.object(source, "capture", capture):
        yield made


class Verdict(NamedTuple):
    """The result for a module that was exported wrong.

    Attributes:
        fault: the fault.
        refused: whether `deploy` refused it.
        unloaded: whether `auto` refuses to load it if it was written with `keep_wrong`.
        named: whether `diagnose` names the change.
        said: the error message of `deploy`.
    """

    fault: Fault
    refused: bool
    unloaded: bool
    named: bool
    said: str

    @property
    def is_good(self) -> bool:
        return self.refused and self.unloaded and self.named


def tried(seed: int, folder: Path) -> Verdict:
    """Deploy a module with an exporter fault, with and without `keep_wrong`, and diagnose the bundle.

    Args:
        seed: seed of the module and the fault.
        folder: an empty folder.
    """
    module, args, shapes = subject(seed)

    def deploy(name: str, keep_wrong: bool = False) -> attnforge.Bundle:
        return attnforge.deploy(
            module, args, folder / name, shapes, targets=["onnxruntime"], tune=False, cache=False, keep_wrong=keep_wrong
        )

    with exported_wrong(seed) as made:
        try:
            deploy("refused")
        except CaptureError as error:
            return Verdict(made[0], True, True, any(name in str(error) for name in made[0].names), str(error))
        except WrongError as error:
            said, refused = str(error), not (folder / "refused").exists()
        else:
            said, refused = "", False
        bundle = deploy("kept", keep_wrong=True)
    try:
        attnforge.load(bundle).close()
        unloaded = False
    except UnavailableError:
        unloaded = True
    finding = attnforge.diagnose(bundle, out=folder / "diagnosis").finding
    words = re.findall(r"\w+", finding.text())
    names = {made_name.replace(".", "_") for made_name in made[0].names}
    named = finding.cause == "export" and not names.isdisjoint(
        word.removeprefix("p_").removeprefix("b_") for word in words
    )
    return Verdict(made[0], refused, unloaded, named, said)


def main(count: int = 200) -> None:
    """Test `count` modules, each with a fault; exit with 1 if one is not refused or not named."""
    logging.disable(logging.WARNING)  # warnings about bundles that are written although they are wrong
    counts: Counter[str] = Counter()
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict = tried(seed, Path(folder))
            except AttnforgeError as error:
                print(f"{seed}: {type(error).__name__}: {error}")
                counts["failed"] += 1
                continue
        counts[verdict.fault.kind] += 1
        if not verdict.is_good:
            counts["bad"] += 1
            print(f"{seed}: {verdict}", flush=True)
        if seed % 20 == 19:
            print(f"{seed + 1} tried: {dict(counts)}", flush=True)
    print(dict(counts))
    raise typer.Exit(counts["bad"] + counts["failed"] > 0)


if __name__ == "__main__":
    typer.run(main)
