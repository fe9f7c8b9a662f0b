"""A cache is inserted where it computes the same function; a model that cannot have one is refused with a reason."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attnforge
from attnforge.bundle import CANONICAL, Bundle, Manifest
from attnforge.errors import UsageError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.decoding.insert import with_cache
from attnforge.export.decoding.tokens import NotByToken
from attnforge.export.diagnosis.stages import sites_of
from attnforge.export.graphs.build import dims_of
from attnforge.export.graphs.execute import in_float64
from attnforge.export.graphs.float64 import inline_functions
from attnforge.export.graphs.nodes import constant_of, input_of, is_op
from attnforge.export.graphs.saving import load_graph
from attnforge.export.lowering.onnxruntime import lower
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.sources.huggingface import around
from attnforge.export.sources.torch_module import capture
from attnforge.precision import PRECISIONS
from attnforge.quiet import quiet
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.parity.budget import relative_error
from tests.support.bundles import rewrite
from tests.support.decoders import KINDS, PLACES, DeployDecoder, decoder_example

WIDTH, HEADS, WORDS = 32, 4, 40


class Causal(nn.Module):
    """One layer of causal attention, whose parts subclasses override."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def embedded(self, x: Tensor) -> Tensor:
        position: Tensor = self.positions(torch.arange(x.shape[1]))
        embedding: Tensor = self.table(x)
        return embedding + position

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def mixed(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.attended(*heads).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mixed(self.embedded(x)))
        return logits


def inserted(
    module: nn.Module, capacity: int = 64, *, batch: Any = None, args: tuple[Tensor, ...] | None = None,
    tokens: str = "tokens",
) -> Any:  # fmt: skip
    """The record of a module's step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        args = args or (torch.randint(0, WORDS, (2, 9)),)
    dims = {1: Dim(tokens, min=2, max=32)}
    if batch is None:
        dims[0] = Dim("batch", min=1, max=4)
    shapes = tuple(dims for _ in args)
    captured = capture(module.eval(), args, shapes, PRECISIONS["fp32"])
    sites = canonicalize(captured.model).sites
    return with_cache(captured.model, sites, captured.inputs, captured.outputs, capacity)


# --- published models -------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97, "intermediate_size": 96,
    "max_position_embeddings": 128,
}  # fmt: skip
AUTO: Any = transformers.AutoModelForCausalLM
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=97, n_positions=128, bos_token_id=0, eos_token_id=0
        )
    ),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED)),
    "Mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=24)),
    "Gemma 2": lambda: AUTO.from_config(
        transformers.Gemma2Config(**GROUPED, sliding_window=24, query_pre_attn_scalar=16), attn_implementation="eager"
    ),
    "GPT-OSS": lambda: AUTO.from_config(
        transformers.GptOssConfig(
            **GROUPED,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=24,
            pad_token_id=0,
            layer_types=["sliding_attention", "full_attention"],
        ),
        attn_implementation="eager",
    ),
    "BLOOM": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=96, n_layer=2, n_head=6, vocab_size=97)
    ),
    "MPT": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(d_model=64, n_layers=2, n_heads=4, vocab_size=97, max_seq_len=128)
    ),
}
BIASED = {"BLOOM": 6, "MPT": 4}
"""Numbers of heads of models that have a bias by distance instead of positions."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(f"published-{name}")) for name in MODELS]
)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Bundle]:
    """A published model in a small configuration, in fp16, deployed with a cache of 72 tokens."""
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        module, args, shapes = around(MODELS[request.param]().eval(), 2, 9, 3, 70, only="input_ids")
    folder = tmp_path_factory.mktemp("published") / "bundle"
    targets = ["onnxruntime", "tensorrt_rtx"]
    return request.param, attnforge.deploy(
        module, args, folder, shapes, "fp16", targets, tune=False, cache_tokens=72, stop=[2]
    )


def test_a_published_model_is_the_same_function_step_by_step(published: tuple[str, Bundle]) -> None:
    name, bundle = published
    report = attnforge.verify(bundle).backends["onnxruntime-cpu"]
    assert report.passed, (name, report.failures)
    stepwise = next(c for c in report.comparisons if c.where == "normal-largest token by token")
    assert stepwise.passed  # 64 steps after a prompt
    decoding = bundle.manifest.decoding
    assert decoding is not None and decoding.places == 72 and decoding.vocabulary == 97 and decoding.stop == [2]
    windows = {"Mistral": [24, 24], "Gemma 2": [24, None], "GPT-OSS": [24, None]}.get(name, [None, None])
    assert [cache.window for cache in decoding.caches] == windows


def for_cuda(bundle: Bundle, folder: Path) -> Bundle:
    """A copy of a bundle whose step for CUDA runs on the CPU's kernels, which also compute in fp16."""

    def on_cpu(manifest: Manifest) -> None:
        record = manifest.targets["onnxruntime"]
        assert record.cuda_model is not None
        record.model = record.cuda_model

    return rewrite(Path(shutil.copytree(bundle.path, folder)), on_cpu)


def test_the_step_for_cuda_is_the_same_function(published: tuple[str, Bundle], tmp_path: Path) -> None:
    name, bundle = published
    step = for_cuda(bundle, tmp_path / "cuda")
    nodes = of_type(load_graph(step, step.manifest.targets["onnxruntime"].model), "GroupQueryAttention")
    assert len(nodes) == (0 if name in BIASED else 2)  # CUDA's kernel adds no bias
    for node in nodes:  # it reads this number on the host, so none that the device computes
        assert int(constant_of(node.inputs[6])) == 72  # type: ignore[arg-type]
    report = attnforge.verify(step, ["onnxruntime-cpu"]).backends["onnxruntime-cpu"]
    assert report.passed, (name, report.failures)


def test_tensorrt_fuses_prompts_and_steps_of_a_published_model(published: tuple[str, Bundle]) -> None:
    name, bundle = published
    fused = bundle.manifest.attention.fused
    assert fused["onnxruntime"] == 2 and fused["tensorrt_rtx"] == (0 if name == "Gemma 2" else 2)
    (engine,) = bundle.manifest.targets["tensorrt_rtx"].engines
    assert [profile["tokens"] for profile in engine.profiles] == [(1, 9, 70), (1, 1, 1)]
    if name == "Gemma 2":
        reasons = {unfused.reason for unfused in bundle.manifest.attention.unfused if unfused.target == "tensorrt_rtx"}
        assert reasons == {"a soft cap on the scores, which no fused kernel computes"}


def test_the_kernel_rotates_queries_and_keys_by_one_table_for_all_layers(published: tuple[str, Bundle]) -> None:
    name, bundle = published
    deployed = load_graph(bundle, bundle.manifest.targets["onnxruntime"].model)
    nodes = of_type(deployed, "GroupQueryAttention")
    if name == "GPT-2" or name in BIASED:
        assert [len(node.inputs) for node in nodes] == [11 if name in BIASED else 7] * 2
        assert len({node.inputs[-1] for node in nodes}) == 1  # one bias for all layers
        assert_one_step(load_graph(bundle, CANONICAL), deployed, bundle)
        return
    assert turns_of(deployed) == [1, 1]
    assert len({node.inputs[7] for node in nodes}) == len({node.inputs[8] for node in nodes}) == 1
    assert not of_type(deployed, "RotaryEmbedding") and not of_type(deployed, "Transpose")
    assert_one_step(load_graph(bundle, CANONICAL), deployed, bundle)


def falcon(**sizes: Any) -> nn.Module:
    return transformers.FalconForCausalLM(transformers.FalconConfig(**SMALL, **sizes))


@pytest.mark.parametrize(
    ("make", "sites"),
    [
        pytest.param(falcon, 2, id="one key head, taken by a list of indices"),
        pytest.param(lambda: falcon(alibi=True), 2, id="Falcon with ALiBi"),
        pytest.param(lambda: falcon(new_decoder_architecture=True, num_kv_heads=2), 2, id="Falcon 40B"),
        pytest.param(
            lambda: transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**GROUPED)), 4, id="values repeated"
        ),
    ],
)
def test_other_published_models_may_have_a_cache(make: Callable[[], nn.Module], sites: int) -> None:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        module, args, shapes = around(make().eval(), 2, 9, 3, 70, only="input_ids")
        captured = capture(module, args, shapes, PRECISIONS["fp32"])
    found = canonicalize(captured.model).sites
    record = with_cache(captured.model, found, captured.inputs, captured.outputs, 72)
    assert len(record.caches) == sites


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A Llama in fp32, in which the exporter writes the rotation as one operator."""
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        module, args, shapes = around(MODELS["Llama"]().eval(), 2, 9, 3, 70, only="input_ids")
    folder = tmp_path_factory.mktemp("llama") / "bundle"
    return attnforge.deploy(module, args, folder, shapes, targets=["onnxruntime"], tune=False, cache_tokens=72)


def test_a_step_in_fp32_for_cuda_has_no_kernel_of_16_bits(llama: Bundle, tmp_path: Path) -> None:
    step = for_cuda(llama, tmp_path / "cuda")
    assert not of_type(load_graph(step, step.manifest.targets["onnxruntime"].model), "GroupQueryAttention")
    report = attnforge.verify(step, ["onnxruntime-cpu"]).backends["onnxruntime-cpu"]
    assert report.passed, report.failures


def other_table(model: ir.Model) -> None:
    """Use sines as cosines for the keys of the first layer."""
    node = of_type(model, "RotaryEmbedding")[1]
    node.replace_input_with(1, node.inputs[2])


def other_pairs(model: ir.Model) -> None:
    """Rotate pairs of neighbours instead of halves for the keys of the first layer."""
    of_type(model, "RotaryEmbedding")[1].attributes["interleaved"] = ir.AttrInt64("interleaved", 1)


def decomposed(model: ir.Model) -> None:
    """Compute the same function with products."""
    inline_functions(model)
    assert not of_type(model, "RotaryEmbedding")


@pytest.mark.parametrize(("change", "turns"), [(other_table, [0, 1]), (other_pairs, [0, 1]), (decomposed, [0, 0])])
def test_keys_that_are_not_rotated_like_queries_are_rotated_before(
    llama: Bundle, change: Callable[[ir.Model], None], turns: list[int]
) -> None:
    assert turns_of(load_graph(llama, llama.manifest.targets["onnxruntime"].model)) == [1, 1]
    lowered_otherwise(llama, change, turns)


def halves_exchanged(model: ir.Model) -> None:
    """Keep the halves of the first layer's keys in order, and negate the other half."""
    cat = user_of(of_type(model, "Neg")[1])
    first, second = cat.inputs
    cat.replace_input_with(0, second)
    cat.replace_input_with(1, first)


def cosines_twice(model: ir.Model) -> None:
    """Use cosines as sines for the keys of the first layer."""
    turned = user_of(user_of(of_type(model, "Neg")[1]))
    plain = next(value.producer() for value in user_of(turned).inputs if value is not turned.outputs[0] and value)
    assert plain is not None
    turned.replace_input_with(1, plain.inputs[1])


@pytest.mark.parametrize("change", [halves_exchanged, cosines_twice])
def test_what_is_nearly_a_rotation_stays_as_written(
    published: tuple[str, Bundle], change: Callable[[ir.Model], None]
) -> None:
    name, bundle = published
    if name in ("GPT-2", "GPT-OSS") or name in BIASED:  # GPT-OSS subtracts the halves
        assert not of_type(load_graph(bundle, CANONICAL), "Neg")
    else:
        lowered_otherwise(bundle, change, [0, 1])


def lowered_otherwise(bundle: Bundle, change: Callable[[ir.Model], None], turns: list[int]) -> None:
    """Check that a changed step is lowered to the same function, with `do_rotary` of the kernels as in `turns`."""
    canonical, lowered = (load_graph(bundle, CANONICAL) for _ in range(2))
    for model in (canonical, lowered):
        change(model)
    lower(lowered, sites_of(bundle.manifest.attention), {"batch": 2, "tokens": 9})
    assert turns_of(lowered) == turns
    assert_one_step(canonical, lowered, bundle)


def turns_of(model: ir.Model) -> list[int]:
    return [node.attributes.get_int("do_rotary", 0) or 0 for node in of_type(model, "GroupQueryAttention")]


def user_of(node: ir.Node) -> ir.Node:
    return next(iter(node.outputs[0].uses())).node


def of_type(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def assert_one_step(canonical: ir.Model, lowered: ir.Model, bundle: Bundle) -> None:
    """Check that both are the same function in float64, after pasts of several lengths. A soft cap is skipped, as its
    fused form has no double path."""
    if any(node.attributes.get_float("softcap", 0.0) for node in of_type(canonical, "Attention")):
        return
    decoding, rng = bundle.manifest.decoding, np.random.default_rng(0)
    assert decoding is not None
    caches = {
        spec.name: rng.standard_normal((3, *(dim for dim in spec.dims[1:] if isinstance(dim, int))))
        for spec in decoding.tensors
    }
    feeds = {
        "input_ids": rng.integers(0, 97, (3, 1)),
        "past": np.array([60, 0, 17]),
        "kept": np.zeros(1, np.int64),
        **caches,
    }
    expected, results = (in_float64(model)(feeds) for model in (canonical, lowered))
    assert list(expected) == list(results)
    for output, array in expected.items():
        assert relative_error(results[output], array) < 1e-12, output


@pytest.mark.parametrize("kind", KINDS)
def test_which_form_reads_the_cache(decoders: DeployDecoder, kind: str) -> None:
    certificate = decoders(kind, "fp16").manifest.attention
    wanted = "Attention, filled part of the cache" if kind == "uneven" else "com.microsoft::GroupQueryAttention"
    assert all(site.targets["onnxruntime"].form.startswith(wanted) for site in certificate.details)
    assert certificate.fused == {"onnxruntime": 2, "tensorrt_rtx": 0 if kind == "capped" else 2}


def test_the_form_that_reads_the_cache_is_measured(decoders: DeployDecoder) -> None:
    bundle = decoders("rotary", "fp32")
    canonical = load_graph(bundle, CANONICAL)
    tuner = Tuner({"batch": 2, "tokens": 9}, 2.0)
    first, second = lower(canonical, sites_of(bundle.manifest.attention), tuner.sizes, tuner=tuner)
    assert set(first.measured) == {
        "MatMul·Softmax·MatMul, filled part",
        "Attention, filled part of the cache",
        "com.microsoft::GroupQueryAttention, cache in place",
    }
    assert first.form in first.measured and not first.dropped
    assert f"for a token after {PLACES // 2}" in first.why and "for a prompt of 9" in first.why
    assert second.measured == first.measured  # equal layers share one measurement


def test_a_canonical_step_is_standard_onnx(decoders: DeployDecoder) -> None:
    import onnx

    model = onnx.load(decoders("rotary", "fp32").path / CANONICAL)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
    caches = [value.name for value in model.graph.input if value.name.startswith(("key_cache", "value_cache"))]
    assert [f"{name}.next" for name in caches] == [value.name for value in model.graph.output][1:]


# --- models that can and cannot be decoders ---------------------------------------------------------------------------


class Features(Causal):
    """Takes embedded tokens."""

    def embedded(self, x: Tensor) -> Tensor:
        return x


def test_tokens_may_be_features(tmp_path: Path) -> None:
    module, args = Features().eval(), (torch.randn(2, 9, WIDTH),)
    shapes = {"x": {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=16)}}
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, "fp32", ["onnxruntime"], tune=False, cache_tokens=20
    )
    assert attnforge.verify(bundle).passed
    x = torch.randn(1, 20, WIDTH)
    with attnforge.load(bundle) as session, torch.no_grad():
        decoder = session.decoder()
        answers = [decoder.prefill(x[:, :5]), *(decoder.step(x[:, position]) for position in range(5, 20))]
        assert relative_error(torch.stack(answers, 1).numpy(), module(x)[:, 4:].numpy()) < 2e-6


class OnlyLater(Causal):
    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Relative(Causal):
    """A bias that flattens with the distance."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position = torch.arange(query.shape[2])
        bias = -0.5 * (1.0 + (position[:, None] - position).abs()).log()
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + bias
        hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


class Chunked(Causal):
    """A query sees only the earlier tokens of its own chunk."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position = torch.arange(query.shape[2])
        seen = (position[:, None] // 8 == position // 8) & (position[:, None] >= position)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


class Pooled(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x - x.mean(1, keepdim=True))


class Convolved(Causal):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)

    def mixed(self, x: Tensor) -> Tensor:
        earlier = F.pad(x.transpose(1, 2), (2, 0))
        return super().mixed(self.convolution(earlier).transpose(1, 2))


class Shifted(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))


class Summed(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x + x.cumsum(1))


class Backwards(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x.flip(1))


class ByLength(Causal):
    """Positions as fractions of the length."""

    def embedded(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1]) / x.shape[1]
        embedding: Tensor = self.table(x)
        return embedding + position[:, None]


class ScaledByLength(Causal):
    """Queries grow with the logarithm of the number of tokens."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attended(query * torch.ones(query.shape[2]).sum().log(), key, value)


class OnlyTheLast(Causal):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, -1]


class RepeatedHalves(Causal):
    """Two rows for each token, read as if all tokens' first rows came before their second."""

    def mixed(self, x: Tensor) -> Tensor:
        rows = torch.cat([x, x.relu()], -1).view(x.shape[0], -1, WIDTH)
        return super().mixed(rows.view(x.shape[0], 2, x.shape[1], WIDTH).sum(1))


class TokensFirst(Causal):
    """Rows of all samples' first tokens before those of their second, as nn.MultiheadAttention has them."""

    def mixed(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, WIDTH).relu()
        return super().mixed(rows.view(x.shape[1], x.shape[0], WIDTH).transpose(0, 1))


class OtherSamples(Causal):
    """Tokens come first, and rows are read as if samples did."""

    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x.transpose(0, 1).reshape(-1, WIDTH).relu().view(x.shape))


class TwoOrders(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, WIDTH) + x.reshape(-1, WIDTH)
        return super().mixed(rows.view(x.shape))


class FirstRow(Causal):
    """Replaces a number of the first token of a call."""

    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x.scatter(2, torch.zeros(x.shape[0], 1, 1, dtype=torch.int64), 5.0))


class AddsTheFirst(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x + x.gather(2, torch.arange(WIDTH).expand(x.shape[0], 1, WIDTH)))


class NoAttention(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return x


class ByThreshold(Causal):
    """Positions are stretched once there are more than 12 tokens."""

    def embedded(self, x: Tensor) -> Tensor:
        factor = torch.where(torch.scalar_tensor(x.shape[1]) > 12, 0.1, 0.2)
        embedding: Tensor = self.table(x)
        return embedding + (torch.arange(x.shape[1]) * factor)[:, None]


class ByParity(Causal):
    def embedded(self, x: Tensor) -> Tensor:
        embedding: Tensor = self.table(x)
        return embedding + (torch.arange(x.shape[1]) * (x.shape[1] % 2) * 0.1)[:, None]


class PooledSamples(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x - x.mean(0, keepdim=True))


class NormalisedOverTokens(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(F.group_norm(x.mT, 4).mT)


class SummedPairs(Causal):
    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x + torch.einsum("bts,bsf->btf", x @ x.mT, x))


class ReturnsPositions(Causal):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), torch.arange(x.shape[1]).expand(x.shape[0], -1)


class MisreadCopies(Causal):
    """Two copies of all tokens, read as two rows of each token."""

    def mixed(self, x: Tensor) -> Tensor:
        return super().mixed(x.repeat(1, 2, 1).view(x.shape[0], x.shape[1], 2, WIDTH).sum(2))


class SamplesAsHeads(Causal):
    """Scales rows by position while heads and samples share an axis."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = value.flatten(0, 1) * self.positions.weight[: value.shape[2], : value.shape[3]]
        return super().attended(query, key, rows.view(value.shape))


REFUSED: dict[type[Causal], str] = {
    OnlyLater: "is bidirectional: a token sees later ones",
    Relative: r"leaves band −∞ … 0, residue: bias; .* not a bias by distance \(ALiBi\): .* is computed by Log",
    Chunked: r"leaves band −∞ … 0 and blocks of 8",
    Pooled: "ReduceMean .* works along the tokens",
    Convolved: "Conv .* works along the tokens",
    Shifted: "works along the tokens|Concat|Slice",
    Summed: "CumSum .* works along the tokens",
    Backwards: "Slice .* works along the tokens",
    ByLength: "has other numbers for a position when there are more tokens",
    ScaledByLength: "depends on the number of tokens and does not have one entry per token",
    OnlyTheLast: r"returns a result for every token: \(batch, tokens",
    RepeatedHalves: "Reshape .* regroups the tokens",
    OtherSamples: "Reshape .* regroups the tokens",
    TwoOrders: "Add .* combines tokens in different orders",
    FirstRow: "ScatterElements .* indexes some of the tokens",
    AddsTheFirst: "GatherElements .* indexes some of the tokens",
    NoAttention: "the model has no attention",
    ByThreshold: r"when there are more tokens \(15 instead of 8\).* give at most 8 as cache_tokens",
    ByParity: r"when there are more tokens \(3 instead of 2\).* deploy the model without cache_tokens",
    PooledSamples: "ReduceMean .* works along the samples, and a decoder runs prompts sample by sample",
    NormalisedOverTokens: "GroupNormalization .* works along the tokens",
    SummedPairs: "sums over the tokens",
    ReturnsPositions: "output .* does not depend on the tokens; remove it",
    MisreadCopies: "Reshape .* regroups the tokens",
    SamplesAsHeads: "reads the positions of one sample for all samples",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_model_that_cannot_have_a_cache_is_refused_with_a_reason(kind: type[Causal]) -> None:
    with pytest.raises(UsageError, match=REFUSED[kind]):
        inserted(kind())


class KeysByPosition(Causal):
    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position: Tensor = self.positions(torch.arange(key.shape[2]))
        rows = position.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1)
        return super().attended(query, rows.expand_as(key), value)


class PositionsAfterTokens(Causal):
    """A table `(positions, 1, width)`, which is added where tokens come before samples."""

    def embedded(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table(x).transpose(0, 1) + self.positions.weight[: x.shape[1], None]
        return rows.transpose(0, 1)


class OfChannels(Causal):
    """Operators that treat tokens separately, though not all of their kind do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)
        self.over_width = nn.Conv2d(1, 1, (3, 1), padding=(1, 0))

    def mixed(self, x: Tensor) -> Tensor:
        rows = F.group_norm(x.flatten(0, 1)[..., None], 4).view(x.shape)
        rows = self.over_width(self.convolution(self.norm(rows.mT))[:, None])[:, 0].mT
        return super().mixed(torch.einsum("bte,ef->btf", rows, self.qkv.weight[:WIDTH]))


class Experts(Causal):
    """Attention of each token to the results of three experts, and to a memory that no token changes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.memory = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(1, 7, WIDTH))

    def mixed(self, x: Tensor) -> Tensor:
        copies = x.flatten(0, 1).repeat(3, 1).view(3, -1, WIDTH)  # as Llama 4 computes its experts
        x = x + (copies @ self.experts.weight.view(3, WIDTH, WIDTH)).view(3, *x.shape).sum(0)
        experts = self.experts(x).unflatten(-1, (3, WIDTH))
        x = x + ((experts @ x[..., None]).mT.softmax(-1) @ experts).squeeze(2)
        memory = self.memory.expand(x.shape[0], -1, -1)
        return super().mixed(x + F.scaled_dot_product_attention(x, memory, memory))


class OneChunk(Causal):
    """Chunks that are as long as the cache."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position = torch.arange(query.shape[2])
        seen = (position[:, None] // 20 == position // 20) & (position[:, None] >= position)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


@pytest.mark.parametrize("kind", [OneChunk, KeysByPosition, PositionsAfterTokens, OfChannels, Experts])
def test_what_looks_like_a_reason_and_is_none(kind: type[Causal], tmp_path: Path) -> None:
    torch.manual_seed(0)
    shapes = {"x": {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=16)}}
    bundle = attnforge.deploy(
        kind().eval(), (torch.randint(0, WORDS, (2, 9)),), tmp_path / "b", shapes, "fp32", ["onnxruntime"], tune=False,
        cache_tokens=20,
    )  # fmt: skip
    assert bundle.manifest.decoding is not None and len(bundle.manifest.decoding.caches) == 1
    backends = ["onnxruntime-cpu"] if why_not_here("openvino") else ["onnxruntime-cpu", "openvino"]
    assert attnforge.verify(bundle, backends).passed


def test_each_reason_is_needed() -> None:
    """The base class of the refused models is accepted."""
    record = inserted(Causal())
    assert record.places == 64 and len(record.caches) == 1 and record.vocabulary == WORDS


class Pair(Causal):
    """Two outputs: one has a head of its own, after which only operators by element come; the other has none."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mixed = self.mixed(self.embedded(x))
        return 30.0 * torch.tanh(self.head(mixed) / 30.0), mixed


class Shared(Causal):
    """Two outputs of one head."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits, logits.softmax(-1)


class LogitsAndGates(Causal):
    """An output is read by the operator that computes another one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits, logits.sigmoid()


class GatesAndLogits(Causal):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits.sigmoid(), logits


TAKEN = {
    Causal: [WIDTH], Pair: [WIDTH, WIDTH], Shared: [WORDS, WORDS], LogitsAndGates: [WORDS, WORDS],
    GatesAndLogits: [WORDS, WORDS],
}  # fmt: skip
"""The last dims of what is taken for the outputs."""


@pytest.mark.parametrize(("kind", "taken"), TAKEN.items())
def test_the_head_runs_on_tokens_whose_outputs_are_wanted(kind: type[Causal], taken: list[int], tmp_path: Path) -> None:
    module, args = kind().eval(), (torch.randint(0, WORDS, (2, 9)),)
    shapes = {"x": {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=16)}}
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, "fp32", ["onnxruntime"], tune=False, cache_tokens=40
    )
    graph = load_graph(bundle, CANONICAL).graph
    gathers = [node for node in graph if is_op(node, "Gather") and input_of(node, 1).name == "kept"]
    assert [dims_of(input_of(node))[-1] for node in gathers] == taken
    assert next(spec.text() for spec in bundle.manifest.graph_outputs) == f"float32[batch, kept, {WORDS}]"
    assert attnforge.verify(bundle).passed
    with attnforge.load(bundle) as session:
        decoder = session.decoder(2)
        ids = np.random.default_rng(0).integers(0, WORDS, (2, 33))
        last = decoder.prefill(ids)
        decoder.reset()
        every = decoder.extend(ids)
        for name, rows in every.items():
            got = last[name] if isinstance(last, dict) else last
            assert [len(row) for row in rows] == [33, 33]
            np.testing.assert_allclose(got, np.stack([row[-1] for row in rows]), rtol=0, atol=2e-6)


def test_tokens_may_come_before_samples() -> None:
    assert inserted(TokensFirst()).places == 64


def test_positions_that_end_before_the_cache() -> None:
    with pytest.raises(UsageError, match=r"no positions for 65 tokens: .*give a smaller cache_tokens"):
        inserted(Causal(), 65)


def test_a_cache_that_is_smaller_than_a_run() -> None:
    with pytest.raises(UsageError, match="cache_tokens is 31 and a call may have 32 tokens"):
        inserted(Causal(), 31)


@pytest.mark.parametrize("tokens", ["t", "batch_tokens"])
def test_names_of_dims_may_be_parts_of_others(tokens: str) -> None:
    """`t` is in `batch`, and `batch` in `batch_tokens`; positions have a dim of each."""

    class Expanded(Causal):
        def embedded(self, x: Tensor) -> Tensor:
            position: Tensor = self.positions(torch.arange(x.shape[1]).expand(x.shape[0], -1))
            embedding: Tensor = self.table(x)
            return embedding + position

    assert inserted(Expanded(), tokens=tokens) == inserted(Expanded())


def test_a_static_batch() -> None:
    with pytest.raises(UsageError, match="prompts run sample by sample"):
        inserted(Causal(), batch=2)
    assert inserted(Causal(), batch=1, args=(torch.randint(0, WORDS, (1, 9)),)).places == 64


def test_a_model_that_takes_more_than_tokens() -> None:
    class Masked(Causal):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * mask)

    args = (torch.randint(0, WORDS, (2, 9)), torch.ones(2, 9, dtype=torch.int64))
    with pytest.raises(UsageError, match="takes only tokens, and the model takes x, mask; remove masks and positions"):
        inserted(Masked(), args=args)


def test_a_static_number_of_tokens() -> None:
    captured = capture(Causal().eval(), (torch.randint(0, WORDS, (2, 9)),), None, PRECISIONS["fp32"])
    sites = canonicalize(captured.model).sites
    with pytest.raises(UsageError, match=r"x is int64\[2, 9\]; .* with a dynamic number of tokens"):
        with_cache(captured.model, sites, captured.inputs, captured.outputs, 64)


@pytest.mark.parametrize("options", [{"cache_tokens": 0}, {"cache_tokens": 2**40}, {"stop": [1]}])
def test_invalid_options(tmp_path: Path, options: dict[str, Any]) -> None:
    module, args, shapes = decoder_example()
    with pytest.raises(UsageError, match="cache_tokens"):
        attnforge.deploy(module, args, tmp_path / "b", shapes, "fp32", ["onnxruntime"], **options)


def test_a_cache_and_quantised_products(tmp_path: Path) -> None:
    module, args, shapes = decoder_example()
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, "int8", ["onnxruntime"], tune=False, cache_tokens=PLACES, max_error=0.1
    )
    assert bundle.manifest.quantised is not None and attnforge.verify(bundle).passed
    with attnforge.load(bundle) as session:
        assert np.isfinite(session.decoder().prefill(np.array([[1, 2, 3]]))).all()


def test_reasons_have_a_class() -> None:
    with pytest.raises(NotByToken):
        inserted(Summed())
