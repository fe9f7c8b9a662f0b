"""The registry: systems, options, dtypes, exports and weights of the named models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attnforge.errors import ShapeError, UnknownNameError, UsageError
from attnforge.model import MODELS, Example, build_model
from tests.support.tensors import agree, differ

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


NAMES = {
    "self-attention": "S1",
    "multi-head-self-attention": "S2",
    "multi-head-attention": "S3",
    "cross-attention": "S3",
    "worked-example": "S4",
    "general-attention": "S5",
    "additive-attention": "S5",
    "general-multi-head-attention": "S6",
    "parameter-free-attention": "S7",
    "patch-attention": "S8",
    "patch-attention-digits": "S8",
    "transformer-encoder": "S12",
    "decoder": "S12",
    "decoder-digits": "S12",
    "vit": "S12",
    "post-softmax-scale": "S13",
    "reshape-without-transpose": "S13",
}


def small(name: str) -> Example:
    """Build the named example, with a smaller image for patch-attention."""
    return build_model(name, image_size=32) if name == "patch-attention" else build_model(name)


def cast(args: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]


def test_registry_names_and_systems() -> None:
    assert {name: model.system for name, model in MODELS.items()} == NAMES
    assert all(name == model.name and "\n" not in model.summary for name, model in MODELS.items())


@pytest.mark.parametrize("name", NAMES)
def test_registry_builds_the_same_model_twice_and_keeps_the_random_state(name: str) -> None:
    first = small(name)
    torch.rand(3)
    before = torch.get_rng_state()
    second = small(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert not first.module.training
    with torch.inference_mode():
        output = first.module(*first.args)
        assert torch.equal(output, second.module(*second.args))
    assert output.dtype == torch.float32
    assert output.isfinite().all()
    assert output.std() > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_registry_models_compute_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    module, args, _ = small(name)
    with torch.inference_mode():
        expected = module.double()(*cast(args, torch.float64))
        output = module.to(dtype)(*cast(args, dtype))
    assert output.dtype == dtype
    error = (output.double() - expected).norm() / expected.norm()
    assert error < {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]


def other_sizes(example: Example, sizes: dict[str, int]) -> list[Tensor]:
    """Arguments like the example's with other sizes along the dynamic axes; a dim 4*rows is 4 times rows."""
    args = []
    names = example.dynamic_shapes or {}
    for arg, axes in zip(example.args, names.values(), strict=True):
        shape = list(arg.shape)
        for axis, dim in (axes or {}).items():
            factor, _, base = dim.__name__.rpartition("*")
            shape[axis] = int(factor or 1) * sizes[base]
        if arg.is_floating_point():
            args.append(torch.randn(shape).half())
        else:
            args.append(torch.randint(0, 2, shape).to(arg.dtype))
    return args


@pytest.mark.parametrize("name", NAMES)
def test_registry_models_export_with_dynamic_shapes_and_without_float32(name: str) -> None:
    example = small(name)
    module, args = example.module.half(), cast(example.args, torch.float16)
    if name == "patch-attention":  # torch.export treats an example size of one as a constant
        example = build_model(name, image_size=32, max_batch=4)
        module, args = (
            example.module.half(),
            cast(tuple(image.repeat(2, 1, 1, 1) for image in example.args), torch.float16),
        )
    program = torch.export.export(module, tuple(args), dynamic_shapes=example.dynamic_shapes)
    values = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert {value.dtype for value in values if value.is_floating_point()} == {torch.float16}
    if example.dynamic_shapes is None:
        return
    for sizes in (
        {"batch": 1, "tokens": 1, "queries": 1, "keys": 1, "rows": 2, "cols": 2},
        {"batch": 3, "tokens": 37, "queries": 5, "keys": 67, "rows": 7, "cols": 5},
        {"batch": 4, "tokens": 128, "queries": 128, "keys": 1, "rows": 2, "cols": 16},
    ):
        resized = other_sizes(example, sizes)
        with torch.inference_mode():
            agree(program.module()(*resized), module(*resized), atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_weights_round_trip(name: str, tmp_path: Path) -> None:
    source = small(name)
    with torch.no_grad():
        for parameter in source.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    path = tmp_path / "weights.safetensors"
    save_file(source.module.state_dict(), path)
    options = {"image_size": 32} if name == "patch-attention" else {}
    loaded = build_model(name, weights=path, **options)
    with torch.inference_mode():
        expected = source.module(*source.args)
        assert torch.equal(loaded.module(*loaded.args), expected)
        if source.module.state_dict():
            assert differ(small(name).module(*source.args), expected)


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    state = build_model("self-attention").module.state_dict()
    path = tmp_path / "weights.safetensors"
    cases = {
        "lack key_proj.weight": {name: state[name] for name in ("query_proj.weight", "value_proj.weight")},
        "have gate.weight": state | {"gate.weight": torch.ones(2)},
        r"key_proj.weight is \(3, 64\); the model needs \(64, 64\)": state | {"key_proj.weight": torch.ones(3, 64)},
    }
    for message, wrong in cases.items():
        save_file(wrong, path)
        with pytest.raises(UsageError, match=message):
            build_model("self-attention", weights=path)
    path.write_bytes(b"not safetensors")
    for unreadable in (path, tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            build_model("self-attention", weights=str(unreadable))


def test_options_are_converted_and_refused_by_name() -> None:
    assert build_model("self-attention", key_dim="32").module.state_dict()["query_proj.weight"].shape == (32, 64)
    assert vars(build_model("parameter-free-attention", scaled="true").module)["scaled"] is True
    assert vars(build_model("parameter-free-attention", scaled="False").module)["scaled"] is False
    assert "score.pair_weight" in build_model("general-attention", score="concat", align="hard").module.state_dict()
    for name, options, message in (
        ("self-attention", {"key_dim": "many"}, "option key_dim is 'many'; give a int"),
        ("self-attention", {"key_dim": 2.5}, "option key_dim is 2.5"),
        ("self-attention", {"key_dim": True}, "option key_dim is True"),
        ("parameter-free-attention", {"scaled": "maybe"}, "option scaled is 'maybe'"),
        ("general-attention", {"score": 3}, "option score is 3"),
    ):
        with pytest.raises(UsageError, match=message):
            build_model(name, **options)
    with pytest.raises(UnknownNameError, match="unknown option 'depth'; known: dim, scaled"):
        build_model("parameter-free-attention", depth=3)
    with pytest.raises(UnknownNameError, match="unknown model 'mamba'; known: additive-attention, cross-attention"):
        build_model("mamba")
    with pytest.raises(UnknownNameError, match="unknown score 'cosine'"):
        build_model("general-attention", score="cosine")
    with pytest.raises(ShapeError, match="num_heads 7"):
        build_model("multi-head-attention", num_heads="7")
