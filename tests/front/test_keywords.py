"""Names and keywords as users guess them: in the front door's list, in help, and in what is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import attnforge
from attnforge.bundle import CANONICAL
from attnforge.errors import BundleError, CaptureError, InputError, UnknownNameError, UsageError
from attnforge.export.graphs.saving import load_graph
from attnforge.export.options import DeployOptions
from attnforge.export.sources.torch_module import capture
from attnforge.keywords import ALIASES, guessable
from attnforge.precision import PRECISIONS, spelled
from attnforge.runtime.cases import shape_of, sizes_at

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass
class Options:
    cache_tokens: int | None = None
    stop: Sequence[int] = ()


@guessable(Options)
def called(targets: Sequence[str] = (), **options: Any) -> tuple[Sequence[str], Mapping[str, Any]]:
    return targets, options


def test_other_names_and_single_values_are_accepted() -> None:
    assert called(target="onnxruntime", max_cache_len=64, eos_token_id=2) == (
        ("onnxruntime",), {"cache_tokens": 64, "stop": (2,)},
    )  # fmt: skip
    assert called("onnxruntime") == (("onnxruntime",), {})
    assert called(["a", "b"], stop=[1]) == (["a", "b"], {"stop": [1]})


def test_unknown_keywords_get_the_nearest_known_one() -> None:
    with pytest.raises(UnknownNameError, match=r"'cache_token'; known: .*; did you mean cache_tokens\?"):
        called(cache_token=3)
    with pytest.raises(UsageError, match="max_cache_len is another name of cache_tokens, and both were given"):
        called(max_cache_len=3, cache_tokens=4)
    with pytest.raises(UsageError, match="target is another name of targets, and both were given"):
        called(["a"], target="b")
    with pytest.raises(UnknownNameError, match=r"'dynamic_axes'; known: .* did you mean dynamic_shapes\?"):
        attnforge.deploy(torch.nn.Identity(), torch.ones(1), dynamic_axes={})  # type: ignore[call-arg]


def test_a_keyword_of_other_tools_is_answered_with_the_value_that_does_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"deploy has no keyword 'io_precision': precision='auto-fp16'"):
        attnforge.deploy(torch.nn.Identity(), torch.ones(1), io_precision="fp32")  # type: ignore[call-arg]
    bundle = attnforge.deploy(
        torch.nn.Linear(8, 8), torch.randn(2, 8), tmp_path / "bundle", precision="auto-fp16", targets="onnxruntime",
        tune=False,
    )  # fmt: skip
    graph = load_graph(bundle, CANONICAL).graph
    assert {value.dtype for value in (*graph.inputs, *graph.outputs)} == {ir.DataType.FLOAT}
    assert any(node.op_type == "Gemm" and node.outputs[0].dtype == ir.DataType.FLOAT16 for node in graph)


def test_every_alias_stands_for_a_keyword_of_the_front_door() -> None:
    functions = (attnforge.deploy, attnforge.load, attnforge.verify, attnforge.diagnose, attnforge.benchmark)
    known = {name for function in functions for name in inspect.signature(function).parameters}
    assert known.issuperset(ALIASES.values()) and known.isdisjoint(set(ALIASES) - {"backend"})


def test_the_signature_of_deploy_has_every_option() -> None:
    shown = inspect.signature(attnforge.deploy).parameters
    assert shown.keys() >= set(DeployOptions.__dataclass_fields__)
    assert all(f"        {name}: " in (attnforge.deploy.__doc__ or "") for name in shown), "not described"


@pytest.mark.parametrize("given", [torch.float16, "float16", "torch.float16", "half", "fp16"])
def test_a_precision_is_also_given_as_a_dtype(given: object) -> None:
    assert spelled(given) == "fp16" and spelled(torch.int8) == "int8"


def test_example_inputs_by_name() -> None:
    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    x, y = torch.ones(2, 3), torch.ones(3, 4)
    captured = capture(Product(), {"y": y, "x": x}, None, PRECISIONS["fp32"])
    assert [spec.text() for spec in captured.inputs] == ["float32[2, 3]", "float32[3, 4]"]
    with pytest.raises(CaptureError, match=r"inputs were given for y; Product\.forward takes x, y: give the first"):
        capture(Product(), {"y": y}, None, PRECISIONS["fp32"])


def test_openvino_is_a_backend() -> None:
    with pytest.raises(UsageError, match=r"openvino needs no target of its own.*load with backend='openvino'"):
        DeployOptions(targets=["openvino"])


def test_the_front_door_lists_its_names_alone() -> None:
    assert dir(attnforge) == sorted(attnforge.__all__)
    assert attnforge.inspect is attnforge.Bundle and callable(attnforge.bench) and callable(attnforge.run)


def test_a_golden_bundle_by_guesses() -> None:
    """The verbs of the command line, inputs as keywords, and what is answered instead of a guess that cannot work."""
    bundle = attnforge.inspect(GOLDEN / "encoder-fp32")
    assert "sizes: " in bundle.summary() and "attention: " in bundle.summary()
    feeds = {spec.name: np.ones(shape_of(spec, sizes_at([spec], "min")), spec.dtype) for spec in bundle.manifest.inputs}
    outputs = attnforge.run(bundle, feeds, "onnxruntime-cpu", cuda_graphs=False)
    with pytest.raises(UnknownNameError, match=r"unknown keyword of load 'backends'; .* did you mean backend\?"):
        attnforge.run(bundle, feeds, backends="onnxruntime-cpu")
    with attnforge.load(bundle, "onnxruntime-cpu", max_concurrency=1) as session:  # type: ignore[call-arg]
        (first, *_), answer = outputs.values(), session(**feeds)
        np.testing.assert_array_equal(answer[0] if isinstance(answer, tuple) else answer, first)
        with pytest.raises(InputError, match=r"is missing; the model takes .*, and wrong was given"):
            session.run({"wrong": 1})
        with pytest.raises(InputError, match="input 'x' was given twice, by position and by name"):
            session(feeds["x"], x=feeds["x"])
        with pytest.raises(InputError, match="3 inputs were given; the model takes 1: x"):
            session(1, 2, 3, x=feeds["x"])
        with pytest.raises(InputError, match="inputs by name must be a mapping, not ndarray; call the session"):
            session.run(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="device is 1, and onnxruntime-cpu runs on the CPU; leave it out"):
        attnforge.load(bundle, "onnxruntime-cpu", device=1)
    report = attnforge.verify(bundle, backend="onnxruntime-cpu")  # type: ignore[call-arg]
    assert report.summary().splitlines()[1].startswith("onnxruntime-cpu: error ")


def test_a_model_in_place_of_a_bundle_gets_the_command_that_deploys_it(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 23]> graph (float[batch, N] x) => (float[batch, N] y) { y = Neg(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "their.onnx")
    (tmp_path / "config.json").touch()
    (tmp_path / "my $model.pt2").touch()
    for given, command in (
        ("their.onnx", "deploy {}/their.onnx --dim batch=1:4:16 --dim N=1:4:16 --out their.bundle"),
        ("my $model.pt2", "deploy '{}/my $model.pt2' --trust-source --out 'my $model.bundle'"),
        (".", f"deploy hf:{{}} --out {tmp_path.name}.bundle"),
    ):
        message = f"it is a model; make one with attnforge {command}".format(tmp_path)
        with pytest.raises(BundleError, match=re.escape(message)):
            attnforge.inspect(tmp_path / given)
