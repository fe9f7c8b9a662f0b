"""Sessions: inputs are checked before anything runs, outputs have the inputs' array type, and torch is optional."""

from __future__ import annotations

import asyncio
import copy as copying
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import Bundle, Choice, DimSpec, Manifest, TensorSpec, writing
from attnforge.errors import AttnforgeError, InputError, UnavailableError, UnknownNameError, UsageError
from attnforge.machine import this_machine, versions
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.onnxruntime import COPIED, session_options
from attnforge.runtime.backends.registry import libraries_of, why_not_here
from attnforge.runtime.inputs import shapes_of
from attnforge.runtime.session import Session
from tests.support.bundles import DeploySmall, rewrite, small_example
from tests.support.bundles import small_inputs as arrays

needs_openvino = pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino")))


@pytest.fixture(scope="module")
def session(small: DeploySmall) -> Session:
    return attnforge.load(small("fp32"), "onnxruntime-cpu")


def eager(inputs: dict[str, Array]) -> Array:
    module, _, _ = small_example()
    with torch.no_grad():
        output: Array = module(*(torch.from_numpy(array) for array in inputs.values())).numpy()
    return output


def agree(given: Any, expected: Array, tolerance: float = 2e-6) -> None:
    assert given.shape == expected.shape
    assert np.linalg.norm(np.asarray(given, np.float64) - expected) <= tolerance * np.linalg.norm(expected)


# Inputs and outputs


def test_by_position_and_by_name(session: Session) -> None:
    inputs = arrays()
    output = session(*inputs.values())
    assert isinstance(output, np.ndarray) and output.dtype == np.float32
    agree(output, eager(inputs))
    named = session.run(dict(reversed(inputs.items())))
    assert list(named) == ["output"] and np.array_equal(named["output"], output)


@pytest.mark.parametrize(("batch", "tokens", "length"), [(1, 2, 2), (4, 9, 12), (2, 7, 10)])
def test_every_size_of_the_profile(session: Session, batch: int, tokens: int, length: int) -> None:
    inputs = arrays(batch, tokens, length)
    agree(session(*inputs.values()), eager(inputs))


def test_torch_in_torch_out(session: Session) -> None:
    inputs = arrays()
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    tensors[0].requires_grad_()
    output = session(*tensors)
    assert isinstance(output, Tensor) and output.dtype == torch.float32 and not output.requires_grad
    agree(output.numpy(), eager(inputs))
    assert isinstance(session.run(dict(zip(inputs, tensors, strict=True)))["output"], Tensor)
    assert isinstance(session(nn.Parameter(tensors[0].detach()), *tensors[1:]), Tensor)


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precisions_in_and_out(small: DeploySmall, precision: str, dtype: torch.dtype) -> None:
    inputs = arrays()
    tensors = [torch.from_numpy(a).to(dtype) if a.dtype == np.float32 else torch.from_numpy(a) for a in inputs.values()]
    with attnforge.load(small(precision), "onnxruntime-cpu") as session:
        output = session(*tensors)
        assert output.dtype == dtype
        agree(output.float().numpy(), eager(inputs), tolerance=0.03)
        as_numpy = [
            a.astype(BFLOAT16 if precision == "bf16" else np.float16) if a.dtype == np.float32 else a
            for a in inputs.values()
        ]
        result = session(*as_numpy)
        assert isinstance(result, np.ndarray) and result.dtype == as_numpy[0].dtype
        assert np.array_equal(result.astype(np.float32), output.float().numpy())


STRIDED: dict[str, Callable[[Array], Any]] = {
    "Fortran order": np.asfortranarray,
    "a transposed view": lambda x: np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0),
    "negative strides": lambda x: np.ascontiguousarray(x[::-1, :, ::-1])[::-1, :, ::-1],
    "every other row": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "a torch view": lambda x: torch.from_numpy(np.ascontiguousarray(x.transpose(1, 0, 2))).transpose(0, 1),
    "a torch view with the negative bit": lambda x: (
        torch.complex(torch.zeros(x.shape), torch.from_numpy(-x)).conj().imag
    ),
}


@pytest.mark.parametrize("how", STRIDED)
def test_memory_of_any_layout(session: Session, how: str) -> None:
    inputs = arrays()
    given: dict[str, Any] = {**inputs, "x": STRIDED[how](inputs["x"])}
    agree(np.asarray(session.run(given)["output"]), eager(inputs))


def test_outputs_are_the_callers_own(session: Session) -> None:
    inputs = arrays()
    first = session(*inputs.values())
    kept = first.copy()
    session(*arrays(seed=1).values())
    assert np.array_equal(first, kept)
    first[:] = 0  # writable
    assert np.array_equal(session(*inputs.values()), kept)


# Outputs to the caller's own arrays


def test_outputs_are_written_to_the_callers_arrays(session: Session) -> None:
    inputs = arrays()
    expected = session(*inputs.values())
    into = np.full_like(expected, np.nan)
    assert session.run(inputs, out={"output": into})["output"] is into
    assert np.array_equal(into, expected)
    for out in (np.empty_like(expected), [np.empty_like(expected)], {"output": np.empty_like(expected)}):
        given = out if isinstance(out, np.ndarray) else next(iter(out.values() if isinstance(out, dict) else out))
        assert session(*inputs.values(), out=out) is given
        assert np.array_equal(given, expected)
    tensor = torch.empty(expected.shape)
    assert session.run(inputs, out={"output": tensor})["output"] is tensor
    assert np.array_equal(tensor.numpy(), expected)
    assert isinstance(session.run({k: torch.from_numpy(a) for k, a in inputs.items()}, out={})["output"], Tensor)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_outputs_in_half_precision_are_written_too(small: DeploySmall, precision: str) -> None:
    with attnforge.load(small(precision), "onnxruntime-cpu") as session:
        dtype = np.dtype(session.outputs[0].dtype)
        inputs = [a.astype(dtype) if a.dtype == np.float32 else a for a in arrays().values()]
        into = np.zeros((3, 4, 16), dtype)
        session(*inputs, out=into)
        assert np.array_equal(into.view(np.uint16), session(*inputs).view(np.uint16)) and into.any()


OUT: dict[str, tuple[Callable[[Array, dict[str, Array]], Any], str]] = {
    "dtype": (lambda y, i: y.astype(float), r"is float64\[3, 4, 16\]; it must be float32\[3, 4, 16\]"),
    "byte order": (lambda y, i: y.astype(">f4"), "it must be float32"),
    "shape": (lambda y, i: y[:2].copy(), r"is float32\[2, 4, 16\]; it must be float32\[3, 4, 16\]"),
    "rank": (lambda y, i: y[None], "it must be"),
    "strided": (lambda y, i: y.transpose(0, 2, 1).copy().transpose(0, 2, 1), "is strided or read-only"),
    "read-only": (lambda y, i: np.frombuffer(y.tobytes(), y.dtype).reshape(y.shape), "is strided or read-only"),
    "an input": (lambda y, i: i["x"], "shares memory with an input"),
    "a gradient": (lambda y, i: torch.zeros(y.shape, requires_grad=True), "requires a gradient"),
    "strided torch": (lambda y, i: torch.zeros(3, 16, 4).transpose(1, 2), "is strided, or requires"),
    "a list": (lambda y, i: y.tolist(), "is list"),
}


@pytest.mark.parametrize("case", OUT)
def test_arrays_that_cannot_hold_an_output_are_refused(session: Session, case: str) -> None:
    inputs = arrays()
    change, message = OUT[case]
    into = change(session(*inputs.values()), inputs)
    with pytest.raises(InputError, match=message):
        session.run(inputs, out={"output": into})


class Twice(nn.Module):
    """Two outputs of one shape."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


@pytest.mark.parametrize("backend", ["onnxruntime-cpu", pytest.param("openvino", marks=needs_openvino)])
def test_outputs_that_overlap_are_refused(tmp_path: Path, backend: str) -> None:
    shapes = ({0: Dim("rows", min=1, max=9)},)
    bundle = attnforge.deploy(
        Twice(), (torch.randn(2, 4),), tmp_path / "b", shapes, targets=["onnxruntime"], tune=False
    )
    x, wide = np.ones((3, 4), np.float32), np.zeros((5, 4), np.float32)
    overlaps = {
        "the same": [wide[:3], wide[:3]],
        "a part": [wide[:3], wide[2:]],
        "of torch": [torch.from_numpy(wide[:3]), wide[2:]],
        "the input": [wide[:3].copy(), x],
    }
    with attnforge.load(bundle, backend) as session:
        for out in overlaps.values():
            with pytest.raises(InputError, match="shares memory with an input or another output; give one of its own"):
                session(x, out=out)
        assert not wide.any()
        apart = np.zeros((6, 4), np.float32)
        session(x, out=[apart[:3], apart[3:]])
    assert (apart == 2).all()


def test_invalid_output_arguments(session: Session) -> None:
    inputs = arrays()
    y = session(*inputs.values())
    with pytest.raises(UnknownNameError, match="unknown output 'y'; known: output"):
        session.run(inputs, out={"y": y})
    with pytest.raises(UsageError, match="2 arrays were given to write to; the model has 1 outputs: output"):
        session(*inputs.values(), out=[y, y])
    with pytest.raises(UsageError, match="a CUDA stream was given, and onnxruntime-cpu runs on the CPU; leave it out"):
        session.run(inputs, stream=0)


@pytest.mark.parametrize("take", [pickle.dumps, copying.copy, copying.deepcopy])
def test_a_session_cannot_be_pickled_or_copied(session: Session, take: Callable[[Session], object]) -> None:
    with pytest.raises(UsageError, match="cannot be pickled or copied; load the bundle in each"):
        take(session)


@pytest.mark.parametrize("option", ["threads", "contexts"])
@pytest.mark.parametrize("number", [2.0, "2"])
def test_options_that_are_no_integers(small: DeploySmall, option: str, number: Any) -> None:
    with pytest.raises(UsageError, match=f"{option} is {number!r}; give a whole number"):
        attnforge.load(small("fp32"), "onnxruntime-cpu", **{option: number})


@pytest.mark.parametrize("how", ["read whole", "by its path", "mapped"])
@pytest.mark.parametrize("backend", ["onnxruntime-cpu", pytest.param("openvino", marks=needs_openvino)])
def test_a_session_runs_on_when_its_bundle_is_replaced(
    copy: Path, small: DeploySmall, monkeypatch: pytest.MonkeyPatch, backend: str, how: str
) -> None:
    """Its weights may be mapped from the file, which a rename leaves unchanged."""
    if how == "by its path":
        monkeypatch.setattr("attnforge.bundle.reading.READ_WHOLE", 0)
    if how == "mapped":
        monkeypatch.setattr("attnforge.export.graphs.saving.SHELVED", 1)
        module, args, shapes = small_example()
        attnforge.deploy(module, args, copy, shapes, targets=["onnxruntime"], tune=False, force=True)
        assert (copy / "weights.data").is_file()
    feeds = arrays()
    with attnforge.load(copy, backend) as session, ThreadPoolExecutor(1) as thread:
        for _ in range(3):  # until nothing is left to prepare
            before = session.run(feeds)["output"].copy()
        running = thread.submit(lambda: [session.run(feeds)["output"].copy() for _ in range(200)])
        for _ in range(5):
            with writing(copy, force=True) as folder:
                shutil.copytree(small("fp16").path, folder, dirs_exist_ok=True)
        assert all(np.array_equal(answer, before) for answer in running.result())
        assert np.array_equal(session.run(feeds)["output"], before)
    assert Bundle(copy).manifest.precision == "fp16"


class Flattened(nn.Module):
    """An output whose size is an expression of the inputs' sizes, and one with the input's shape."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(), x * 2


def test_an_output_with_a_shape_that_the_inputs_do_not_name(tmp_path: Path) -> None:
    shapes = ({0: Dim("rows", min=1, max=9), 1: Dim("columns", min=1, max=9)},)
    bundle = attnforge.deploy(
        Flattened(), (torch.randn(2, 3),), tmp_path / "b", shapes, targets=["onnxruntime"], tune=False
    )
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with attnforge.load(bundle) as session:
        flat, doubled = session(x)
        assert np.array_equal(flat, x.reshape(-1)) and np.array_equal(doubled, 2 * x)
        names = [spec.name for spec in session.outputs]
        into = {names[0]: np.zeros(12, np.float32), names[1]: np.zeros((3, 4), np.float32)}
        session.run({session.inputs[0].name: x}, out=into)
        assert np.array_equal(into[names[0]], flat) and np.array_equal(into[names[1]], doubled)
        with pytest.raises(InputError, match=r"is float32\[11\]; it must be float32\[12\]"):
            session.run({session.inputs[0].name: x}, out={names[0]: np.zeros(11, np.float32)})


def test_large_outputs_are_written_to_the_callers_memory(tmp_path: Path) -> None:
    """Outputs too large to be copied are bound to the caller's memory, next to one that is allocated for the run."""
    shapes = ({0: Dim("rows", min=1, max=9000), 1: Dim("columns", min=1, max=9)},)
    bundle = attnforge.deploy(
        Flattened(), (torch.randn(2, 3),), tmp_path / "b", shapes, targets=["onnxruntime"], tune=False
    )
    x = np.random.default_rng(0).standard_normal((9000, 7), np.float32)
    with attnforge.load(bundle) as session:
        flat, doubled = (spec.name for spec in session.outputs)
        feeds, into = {session.inputs[0].name: x}, np.zeros_like(x)
        assert into.nbytes > COPIED
        results = session.run(feeds, out={doubled: into})
        assert results[doubled] is into and np.array_equal(into, 2 * x) and np.array_equal(results[flat], x.ravel())
        kept = session(x)
    assert np.array_equal(kept[1], into)  # also when the session is closed


SIZES_OF = {"a": 7, "b": 3, "rows*columns": 5}
EXPRESSIONS = {
    "a": 7, "a*b": 21, "a + b - 1": 9, "a//2": 3, "(a + 1)//2*b": 12, "-a + 10": 3, "a % b": 1, "rows*columns": 5,
    "c": None, "a*c": None, "Max(a, b)": None, "a/b": None, "a//0": None, "a b": None, "print(a)": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_sizes_of_outputs_are_computed_from_those_of_the_inputs(expression: str) -> None:
    inputs = [TensorSpec(name=s, dtype="float32", dims=[DimSpec(symbol=s, min=1, max=9)]) for s in SIZES_OF]
    outputs = [TensorSpec(name="y", dtype="float32", dims=[2, DimSpec(symbol=expression, factor=2)])]
    shapes = shapes_of(inputs, outputs, *(((size,), np.dtype(np.float32)) for size in SIZES_OF.values()))
    size = EXPRESSIONS[expression]
    assert shapes.outputs == ((2, 2 * size) if size is not None else None,) and shapes.sizes == SIZES_OF


def test_an_output_of_unknown_size_is_returned_and_written_as_well(small: DeploySmall) -> None:
    """For example, where its size is an expression that is not evaluated."""
    inputs = arrays()
    with attnforge.load(Bundle(small("fp32").path), "onnxruntime-cpu") as session:
        expected = session(*inputs.values())
        session.outputs[0].dims = [DimSpec(symbol="Max(batch, 1)"), DimSpec(symbol="tokens"), 16]
        session = Session(session.bundle, session._backend)
        into = np.zeros_like(expected)
        assert session.run(inputs, out={"output": into})["output"] is into and np.array_equal(into, expected)
        assert np.array_equal(session(*inputs.values()), expected)
        with pytest.raises(InputError, match=r"is float32\[2, 4, 16\]; it must be float32\[3, 4, 16\]"):
            session.run(inputs, out={"output": into[:2]})


# Asynchronous runs, warming up, memory


def test_a_pending_run_can_be_waited_for_and_awaited(session: Session) -> None:
    feeds = [arrays(seed=seed) for seed in range(20)]
    pending = [session.run_async(inputs) for inputs in feeds]
    for inputs, run in zip(feeds, pending, strict=True):
        result = run.result()["output"]
        assert run.done() and np.array_equal(result, session.run(inputs)["output"])

    async def run_all() -> list[Any]:
        return await asyncio.gather(*(_awaited(session, inputs) for inputs in feeds))

    for inputs, results in zip(feeds, asyncio.run(run_all()), strict=True):
        assert np.array_equal(results["output"], session.run(inputs)["output"])


async def _awaited(session: Session, inputs: dict[str, Array]) -> Any:
    return await session.run_async(inputs)


def test_a_pending_run_raises_its_error_when_it_is_waited_for(session: Session) -> None:
    pending = session.run_async(arrays() | {"x": np.zeros((3, 4, 15), np.float32)})
    with pytest.raises(InputError, match="dim 2 of input 'x' is 15"):
        pending.result()


def test_closing_waits_for_pending_runs(small: DeploySmall) -> None:
    session = attnforge.load(small("fp32"), "onnxruntime-cpu")
    pending = [session.run_async(arrays(seed=seed)) for seed in range(20)]
    session.close()
    assert all(run.done() and run.result()["output"].shape == (3, 4, 16) for run in pending)
    with pytest.raises(UsageError, match="is closed; load the bundle again"):
        session.run_async(arrays())


def test_warming_up(session: Session) -> None:
    session.warm_up()
    session.warm_up({"batch": 4, "tokens": 9}, {"pairs": 1})
    with pytest.raises(UnknownNameError, match="unknown dim 'rows'; known: batch, pairs, tokens"):
        session.warm_up({"rows": 3})
    with pytest.raises(InputError, match=r"\(batch\) is 5; the profile takes 1 to 4"):
        session.warm_up({"batch": 5})


def test_memory_reports_the_known_sizes(small: DeploySmall) -> None:
    bundle = small("fp32")
    with attnforge.load(bundle, "onnxruntime-cpu") as session:
        memory = session.memory
    assert memory.weights == bundle.file(bundle.manifest.targets["onnxruntime"].model).stat().st_size
    assert memory.activations is None and memory.buffers == memory.pinned == memory.graphs == 0
    with attnforge.load(bundle, "eager", module=small_example().module) as session:
        assert session.memory.weights == 4 * (16 * 17 + 32 * 17)
    with pytest.raises(UsageError, match="closed"):
        _ = session.memory


# Many threads, many calls

SIZES = [(batch, tokens, 2 * pairs) for batch in (1, 2, 3, 4) for tokens in range(2, 10) for pairs in range(1, 7)]


def test_sixteen_threads_on_one_session_get_the_right_answers(small: DeploySmall) -> None:
    """10,000 calls of 192 shapes, in a different order on every thread, some with output arrays of the thread."""
    feeds = [arrays(*sizes, seed=i) for i, sizes in enumerate(SIZES)]
    with attnforge.load(small("fp32"), "onnxruntime-cpu") as session:
        expected = [session.run(inputs)["output"] for inputs in feeds]
        for inputs, output in zip(feeds, expected, strict=True):
            agree(output, eager(inputs))

        def work(thread: int) -> int:
            order = random.Random(thread)
            wrong = 0
            for _ in range(625):
                i = order.randrange(len(feeds))
                out = {"output": np.empty_like(expected[i])} if order.random() < 0.3 else None
                wrong += not np.array_equal(session.run(feeds[i], out=out)["output"], expected[i])
            return wrong

        with ThreadPoolExecutor(16) as threads:
            assert sum(threads.map(work, range(16))) == 0


MEMORY = """
import gc, sys
import numpy as np
import attnforge

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def feeds(batch, tokens, length):
    rng = np.random.default_rng(0)
    x, memory = (rng.standard_normal((batch, n, 16), np.float32) for n in (tokens, length))
    return x, memory, np.zeros((batch, length), bool), np.arange(16)

inputs = [feeds(b, t, 2 * p) for b in (1, 2, 3, 4) for t in range(2, 10) for p in range(1, 7)]
session = attnforge.load(sys.argv[1], "onnxruntime-cpu")

def calls(n):
    for i in range(n):
        session(*inputs[i % len(inputs)])

def loads(n):
    for _ in range(n):
        with attnforge.load(sys.argv[1], "onnxruntime-cpu") as loaded:
            loaded(*inputs[0])

for repeat, settle, n in ((calls, 2000, 10000), (loads, 100, 1000)):
    repeat(settle)
    before = resident()
    repeat(n)
    print(repeat.__name__, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_neither_calls_nor_loads_leak_memory(small: DeploySmall) -> None:
    """10,000 calls of 192 shapes, 1,000 loads and closes: less than 200 bytes per call, 4 kB per load."""
    command = [sys.executable, "-c", MEMORY, str(small("fp32").path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    growth = {name: int(size) for name, size in map(str.split, done.stdout.splitlines())}
    assert growth["calls"] < 2_000_000 and growth["loads"] < 4_000_000, growth


# Errors

Inputs = dict[str, Any]
REFUSED: dict[str, tuple[Callable[[Inputs], Inputs], str]] = {
    "missing": (
        lambda i: {k: v for k, v in i.items() if k != "memory"},
        "input 'memory' is missing; the model takes x",
    ),
    "unknown": (lambda i: i | {"mask": i["x"]}, "the model has no input 'mask'; it takes x, memory, padding, kinds"),
    "dtype": (lambda i: i | {"x": i["x"].astype(float)}, r"input 'x' is float64; the model takes float32\[batch, "),
    "mask of int": (lambda i: i | {"padding": i["padding"].astype(int)}, "input 'padding' is int64"),
    "rank": (lambda i: i | {"x": i["x"][0]}, r"input 'x' has 2 dims \(4, 16\)"),
    "fixed dim": (lambda i: i | {"x": i["x"][..., :15]}, "dim 2 of input 'x' is 15; the model takes 16"),
    "too long": (
        lambda i: i | {"x": np.repeat(i["x"], 3, 1)},
        r"dim 1 of input 'x' \(tokens\) is 12; the profile takes 2 to 9",
    ),
    "too short": (lambda i: i | {"x": i["x"][:, :1]}, "is 1; the profile takes 2 to 9"),
    "empty": (lambda i: i | {"x": i["x"][:0]}, r"dim 0 of input 'x' \(batch\) is 0; the profile takes 1 to 4"),
    "no multiple": (
        lambda i: i | {"memory": i["memory"][:, :7], "padding": i["padding"][:, :7]},
        r"is 7; it must be a multiple of 2 \(2\*pairs\)",
    ),
    "two batches": (lambda i: i | {"memory": i["memory"][:2]}, "batch is 3 in input 'x' and 2 in input 'memory'"),
    "two lengths": (
        lambda i: i | {"padding": i["padding"][:, :6]},
        "pairs is 4 in input 'memory' and 3 in input 'padding'",
    ),
    "a list": (lambda i: i | {"x": i["x"].tolist()}, "input 'x' is list; give a NumPy array or one that supports"),
    "None": (lambda i: i | {"x": None}, "input 'x' is NoneType"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_inputs_are_refused_in_one_line(session: Session, case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        session.run(change(arrays()))
    assert "\n" not in str(caught.value)


class Tables(nn.Module):
    """Rows of tables, one of which accepts negative indices from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 4), nn.Parameter(torch.randn(7, 4))

    def forward(self, words: Tensor, places: Tensor, any_: Tensor) -> Tensor:
        rows: Tensor = self.words(words) + self.places[places] + self.words(any_.clamp(0, 9))
        return rows


@pytest.mark.parametrize("backend", ["onnxruntime-cpu", "openvino"])
def test_ids_outside_the_table_are_refused_and_ids_that_eager_accepts_are_not(backend: str, tmp_path: Path) -> None:
    module, example = Tables(), tuple(torch.tensor([[1, 2]]) for _ in range(3))
    bundle = attnforge.deploy(module, example, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    assert [spec.index for spec in bundle.manifest.inputs] == [(0, 9), (-7, 6), None]
    if (reason := why_not_here(backend)) is not None:
        pytest.skip(reason)
    good = np.array([[0, 6]])
    with attnforge.load(bundle, backend) as session:
        for words, places, any_ in ((9, 6, 2**20), (0, -7, -5), (3, -1, 10)):
            args = [np.array([[number, 1]]) for number in (words, places, any_)]
            wanted = module(*map(torch.from_numpy, args)).detach().numpy()
            assert np.allclose(session(*args), wanted, atol=1e-5)
        for number in (-1, 10, 2**40):
            with pytest.raises(InputError, match=f"words has the id {number}; the table's ids are 0 to 9"):
                session(np.array([[0, number]]), good, good)
        for number in (-8, 7):
            with pytest.raises(InputError, match=f"places has the id {number}; the table's ids are -7 to 6"):
                session.run({"words": good, "places": np.array([[number, 1]]), "any_": good})


def test_too_few_and_too_many(session: Session) -> None:
    values = list(arrays().values())
    for given in (values[:2], [*values, values[0]]):
        with pytest.raises(
            InputError, match=f"{len(given)} inputs were given; the model takes 4: x, memory, padding, kinds"
        ):
            session(*given)


# Backends


def test_auto_loads_the_best_available_backend(small: DeploySmall) -> None:
    session = attnforge.load(small("fp32").path)
    assert session.backend in ("tensorrt_rtx", "onnxruntime-cuda", "onnxruntime-cpu")
    inputs = arrays()
    agree(session(*inputs.values()), eager(inputs), tolerance=1e-5)


def test_auto_skips_unavailable_backends(small: DeploySmall, tmp_path: Path) -> None:
    bundle = Bundle(small("fp32").path)
    bundle.manifest.targets["tensorrt_rtx"].engines[0].version = "0.0.1"
    assert attnforge.load(bundle).backend.startswith("onnxruntime")


def test_unavailable_backends_name_a_remedy(small: DeploySmall) -> None:
    with pytest.raises(
        UnknownNameError, match="unknown backend 'gpu'; known: auto, eager, onnxruntime, onnxruntime-cpu"
    ):
        attnforge.load(small("fp32"), "gpu")
    with pytest.raises(UnavailableError, match=r"the bundle has no plan for tensorrt: deploy it again with --target"):
        attnforge.load(small("fp32"), "tensorrt")
    with pytest.raises(UnavailableError, match=r"pass it: load\(bundle, 'eager', module=…\)"):
        attnforge.load(small("fp32"), "eager")
    bundle = Bundle(small("fp32").path)
    del bundle.manifest.targets["onnxruntime"]
    missing = "not deployed for onnxruntime; deploy it again with --target onnxruntime"
    of_providers = rf"onnxruntime-tensorrt: .*; onnxruntime-cuda: .*{missing}; onnxruntime-cpu: .*{missing}$"
    with pytest.raises(UnavailableError, match=of_providers):
        attnforge.load(bundle, "onnxruntime")


def test_a_plan_of_another_version_is_not_loaded(small: DeploySmall) -> None:
    bundle = Bundle(small("fp32").path)
    engine = bundle.manifest.targets["tensorrt_rtx"].engines[0]
    here, engine.version = engine.version, "0.0.1"
    message = f"built by tensorrt_rtx 0.0.1 and this machine has {here}, which may not load it.*tensorrt_rtx==0.0.1"
    with pytest.raises(UnavailableError, match=message):
        attnforge.load(bundle, "tensorrt_rtx")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_loading_a_plan_without_a_gpu_raises(small: DeploySmall) -> None:
    with pytest.raises(
        UnavailableError, match="no CUDA device: tensorrt_rtx plans can be built and inspected without one"
    ):
        attnforge.load(small("fp32"), "tensorrt_rtx")
    with pytest.raises(UnavailableError, match="no CUDA"):
        attnforge.load(small("fp32"), "onnxruntime-cuda")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_eager_backend_runs_the_module_at_the_bundles_precision(small: DeploySmall, precision: str) -> None:
    module, args, _ = small_example()
    module.train()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    inputs = [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]
    with attnforge.load(small(precision), "eager", module=module) as session:
        assert session.backend == "eager"
        output = session(*inputs)
    with torch.no_grad():
        assert torch.equal(output, small_example().module.to(dtype)(*inputs))
    assert module.training and next(module.parameters()).dtype == torch.float32  # the caller's module is not changed
    with pytest.raises(UsageError, match=r"runs a torch\.nn\.Module, not dict"):
        attnforge.load(small(precision), "eager", module={})


def test_threads_change_no_answer(small: DeploySmall) -> None:
    inputs = arrays()
    for threads in (1, 2):
        with attnforge.load(small("fp32"), "onnxruntime-cpu", threads=threads) as session:
            agree(session(*inputs.values()), eager(inputs))


@pytest.mark.parametrize(("allowed", "threads"), [({0}, 1), ({1, 3}, 2), ({0, 1, 2, 3}, 0)])
def test_a_process_limited_to_few_processors_starts_few_threads(
    monkeypatch: pytest.MonkeyPatch, allowed: set[int], threads: int
) -> None:
    """0 is ONNX Runtime's default, which counts all processors of the machine."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed, raising=False)
    assert session_options().intra_op_num_threads == threads
    assert session_options(3).intra_op_num_threads == 3


@pytest.mark.parametrize("contexts", [0, -1])
def test_a_session_without_contexts_is_refused(small: DeploySmall, contexts: int) -> None:
    with pytest.raises(UsageError, match=f"{contexts} execution contexts were asked for; give 1 or more"):
        attnforge.load(small("fp32"), contexts=contexts)


def test_a_closed_session_raises(small: DeploySmall) -> None:
    with attnforge.load(small("fp32"), "onnxruntime-cpu") as session:
        session(*arrays().values())
    session.close()  # twice is fine
    with pytest.raises(AttnforgeError, match="closed"):
        session(*arrays().values())


def test_repr_of_a_session(session: Session) -> None:
    text = "Session(small on onnxruntime-cpu; x: float32[batch, tokens, 16], memory: float32[batch, 2*pairs, 16], "
    assert repr(session).startswith(text)
    assert [spec.name for spec in session.inputs] == ["x", "memory", "padding", "kinds"]
    assert [spec.name for spec in session.outputs] == ["output"]


# Without torch

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises
import numpy as np
import attnforge
session = attnforge.load(sys.argv[1])
batch = np.zeros((1, 2, 16), np.float32)
memory, padding, kinds = np.ones((1, 4, 16), np.float32), np.zeros((1, 4), bool), np.arange(16)
assert session(batch, memory, padding, kinds).shape == (1, 2, 16)
report = attnforge.verify(sys.argv[1], ["onnxruntime-cpu"])
assert report.passed and report.backends["onnxruntime-cpu"].cases > 0
del sys.modules["torch"]
heavy = {"torch", "onnx", "onnx_ir", "onnxscript"} & set(sys.modules)
assert not heavy, heavy
print("fine")
"""


def test_loading_running_and_verifying_import_no_torch(small: DeploySmall, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(small("fp32").path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


# Telemetry


@pytest.mark.parametrize("enabled", [False, True])
def test_telemetry_of_onnx_runtime_is_off_unless_enabled(tmp_path: Path, enabled: bool) -> None:
    """The telemetry stores a device identifier and its unsent events in the user's caches."""
    kept = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    kept.pop("ORT_DISABLE_TELEMETRY", None)
    if enabled:
        kept["ORT_DISABLE_TELEMETRY"] = "0"
    code = "import os, attnforge, onnxruntime; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=kept, timeout=60)
    assert done.stdout.strip() == ("0" if enabled else "1"), done.stderr
    if not enabled:
        assert list(tmp_path.iterdir()) == []


# CUDA and forks

WITHOUT_CUDA = """
import sys
import attnforge
from attnforge.bundle import Bundle
from attnforge.machine import cuda_devices
folder, backend = sys.argv[1:]
module = None
if backend == "eager":
    from tests.support.bundles import rewrite, small_example
    module = small_example().module
opened = Bundle(folder)
assert opened.manifest.choice is not None
with attnforge.load(folder, backend, module=module) as session:
    assert session.backend == backend
    session.warm_up()
assert cuda_devices.cache_info().misses == 0, "CUDA was asked for its devices, which initialises it"
assert backend == "eager" or "cuda.bindings.driver" not in sys.modules  # torch imports it without initialising CUDA
print("fine")
"""


@pytest.mark.parametrize("backend", ["onnxruntime-cpu", "eager", pytest.param("openvino", marks=needs_openvino)])
def test_a_backend_of_the_cpu_loaded_by_name_leaves_cuda_alone(copy: Path, backend: str) -> None:
    """After cuInit, forked children of the process cannot use a GPU."""

    def with_choice(manifest: Manifest) -> None:
        manifest.choice = Choice(
            machine=this_machine(),
            versions=versions(libraries_of(["onnxruntime-cpu"])),
            sizes={},
            picked="onnxruntime-cpu",
            milliseconds={"onnxruntime-cpu": 1.0},
            dropped={},
            seconds=1.0,
        )

    bundle = rewrite(copy, with_choice)
    command = [sys.executable, "-c", WITHOUT_CUDA, str(bundle.path), backend]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


@pytest.mark.gpu("tensorrt_rtx")
def test_tensorrt_rtx_agrees_with_eager(small: DeploySmall) -> None:
    with attnforge.load(small("fp32"), "tensorrt_rtx") as session:
        for batch, tokens, length in ((4, 9, 12), (1, 2, 2), (3, 7, 10), (4, 9, 12)):
            inputs = arrays(batch, tokens, length)
            agree(session(*inputs.values()), eager(inputs), tolerance=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads(small: DeploySmall) -> None:
    """The threads of the parent do not exist in the child, which would wait for them forever."""
    with attnforge.load(small("fp32"), "onnxruntime-cpu", threads=1) as session:
        feeds = arrays()
        expected = session.run_async(feeds).result()["output"]
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(20)
                again = session.run_async(feeds).result()["output"]
                session.close()
                status = 0 if np.array_equal(again, expected) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert np.array_equal(session.run_async(feeds).result()["output"], expected)


def test_invalid_numbers_of_threads(small: DeploySmall) -> None:
    for threads in (0, -3, 100_000):
        with pytest.raises(UsageError, match="give 1 to 1,024"):
            attnforge.load(small("fp32"), "onnxruntime-cpu", threads=threads)


class Unreadable:
    """An array whose library refuses to export it."""

    def __dlpack__(self, **options: Any) -> Any:
        raise RuntimeError("two\nlines")

    def __dlpack_device__(self) -> tuple[int, int]:
        raise ValueError("no device")


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(3, 4, 16, device="meta"),
        torch.ones(3, 4, 16).to_sparse(),
        torch.ones(3, 4, 16).to(torch.float8_e4m3fn),
        Unreadable(),
        np.array([None], object),
        "text",
        None,
    ],
    ids=["meta", "sparse", "fp8", "unreadable", "objects", "text", "none"],
)
def test_values_that_are_no_arrays_of_numbers_are_refused(small: DeploySmall, value: Any) -> None:
    with attnforge.load(small("fp32"), "onnxruntime-cpu") as session:
        for values, out in (({**arrays(), "x": value}, None), (arrays(), {"output": value})):
            with pytest.raises(InputError) as raised:
                session.run(values, out=out)
            assert "\n" not in str(raised.value)


def test_inputs_without_names_are_refused(small: DeploySmall) -> None:
    with attnforge.load(small("fp32"), "onnxruntime-cpu") as session:
        given: Any
        for given in (None, [1, 2], 3):
            with pytest.raises(InputError, match="inputs by name must be a mapping"):
                session.run(given)
            with pytest.raises(InputError, match="inputs by name must be a mapping"):
                session.run_async(given).result()
        for sizes in ({"batch": 10**12}, {"batch": "a"}, {"batch": -1}, {"batch": 10**30}, {"batch": 9}):
            with pytest.raises(InputError):
                session.warm_up(sizes)  # type: ignore[arg-type]


def test_inputs_larger_than_memory_are_refused_before_they_are_made(small: DeploySmall) -> None:
    specs = [spec.model_copy(deep=True) for spec in small("fp32").manifest.inputs]
    specs[0].dims[2] = 2**40
    with pytest.raises(UnavailableError, match="GiB, and this machine has"):
        reference.make_inputs(reference.at(specs, {}), specs, {})
