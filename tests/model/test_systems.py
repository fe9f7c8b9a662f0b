"""The systems S1 ... S13 as laws: what each must compute, refuse, and agree with, in eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.errors import ShapeError, UnavailableError, UnknownNameError, UsageError
from attnforge.model import (
    MODELS,
    CrossAttention,
    EncoderLayer,
    Example,
    FeedForward,
    GeneralAttention,
    GeneralMultiHeadAttention,
    LearnedPositions,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    ParameterFreeAttention,
    PatchAttention,
    PatchAttentionClassifier,
    PostSoftmaxScale,
    ReshapeWithoutTranspose,
    SelfAttention,
    SinusoidalPositions,
    TransformerEncoder,
    VisionTransformer,
    WorkedExample,
    attention,
    build_model,
    digits,
    identities,
    merge_patches,
    split_patches,
    worked_example,
)
from attnforge.model.general import ALIGNS, SCORES

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


Module = TypeVar("Module", bound=nn.Module)


def randomized(module: Module) -> Module:
    """In float64 and eval mode, all parameters random: biases and norms start at 0 and 1, which hides mistakes."""
    with torch.no_grad():
        for parameter in module.double().eval().parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) / math.sqrt(parameter.shape[-1]))
    return module


def agree(given: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=atol)


def differ(a: Tensor, b: Tensor) -> bool:
    return (a - b).abs().max().item() > 1e-3


# The function that all of them share


@pytest.mark.parametrize("mask_shape", [None, (5, 7), (1, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_attention_is_scaled_dot_product_attention(mask_shape: tuple[int, ...] | None) -> None:
    query, key, value = randn(2, 3, 5, 8), randn(2, 3, 7, 8), randn(2, 3, 7, 4)
    mask = None
    if mask_shape is not None:
        mask = torch.rand(mask_shape) < 0.6
        mask[..., 0] = True
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    agree(attention(query, key, value, scale=0.3, attn_mask=mask), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_may_attend_to_nothing_yields_zeros(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 4, 8).to(dtype) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    output = attention(query, key, value, scale=0.5, attn_mask=mask)
    assert output.dtype == dtype
    assert torch.equal(output[:, 1], torch.zeros_like(output[:, 1]))
    agree(output[:, [0, 2, 3]], attention(query[:, [0, 2, 3]], key, value, scale=0.5), atol=0.01)


# S1 and S2


@pytest.mark.parametrize("value_dim", [None, 6, 8, 20])
@pytest.mark.parametrize("bias", [False, True])
def test_s1_self_attention(value_dim: int | None, bias: bool) -> None:
    module = randomized(SelfAttention(10, 8, value_dim, bias))
    x = randn(3, 5, 10)
    query, key, value = (x @ p.weight.T for p in (module.query_proj, module.key_proj, module.value_proj))
    if bias:
        query, key = query + module.query_proj.bias, key + module.key_proj.bias
        value = value + module.value_proj.bias
    expected = torch.softmax(torch.einsum("bid,bjd->bij", query, key) / math.sqrt(8), dim=2) @ value
    assert expected.shape == (3, 5, value_dim or 8)
    agree(module(x), expected)
    agree(module(x[1]), expected[1])


def test_s1_has_no_bias_by_default_and_takes_masks() -> None:
    module = randomized(SelfAttention(10, 8))
    assert set(dict(module.named_parameters())) == {"query_proj.weight", "key_proj.weight", "value_proj.weight"}
    x = randn(2, 5, 10)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    agree(module(x, causal)[:, :3], module(x[:, :3], causal[:3, :3]))
    agree(module(x, causal.expand(2, 5, 5)), module(x, causal))


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "num_heads"), [(12, 12, 3), (12, 6, 3), (4, 20, 2), (8, 5, 1), (4, 4, 4)]
)
def test_s2_is_heads_of_s1_side_by_side(key_dim: int, value_dim: int, num_heads: int) -> None:
    module = randomized(MultiHeadSelfAttention(10, key_dim, value_dim, num_heads))
    x = randn(3, 5, 10)
    heads = []
    for head in range(num_heads):
        single = SelfAttention(10, key_dim // num_heads, value_dim // num_heads).double()
        for name in ("query_proj", "key_proj", "value_proj"):
            rows = getattr(module, name).weight.chunk(num_heads)[head]
            getattr(single, name).weight = nn.Parameter(rows.detach())
        heads.append(single(x))
    expected = torch.cat(heads, dim=-1)
    assert expected.shape == (3, 5, value_dim)
    agree(module(x), expected)
    agree(module(x[0]), expected[0])


def test_s2_masks_are_those_of_s3() -> None:
    """S3 with an identity for its output projection is S2."""
    module, x = randomized(MultiHeadSelfAttention(12, 12, 12, 3)), randn(2, 5, 12)
    full = MultiHeadAttention(12, 3, bias=False).double()
    for name in ("query_proj", "key_proj", "value_proj"):
        getattr(full, name).load_state_dict(getattr(module, name).state_dict())
    full.output_proj.weight = nn.Parameter(torch.eye(12, dtype=torch.float64))
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    for kwargs in ({"attn_mask": torch.rand(2, 3, 5, 5) < 0.5}, {"key_padding_mask": padding}, {"is_causal": True}):
        agree(module(x, **kwargs), full(x, x, x, **kwargs))
        assert differ(module(x, **kwargs), module(x))


# S3


def mask_cases(num_queries: int, num_keys: int) -> dict[str, dict[str, Tensor | bool]]:
    """Masks in this project's terms for B 2 and 4 heads; key 0 is always allowed, for torch gives NaN where none is."""
    allowed = torch.rand(2, 4, num_queries, num_keys) < 0.5
    allowed[..., 0] = True
    padding = torch.arange(num_keys) >= torch.tensor([[num_keys], [2]])
    return {
        "none": {},
        "shared": {"attn_mask": allowed[0, 0]},
        "batch": {"attn_mask": allowed[:, 0]},
        "batch-1": {"attn_mask": allowed[:, :1]},
        "heads": {"attn_mask": allowed},
        "padding": {"key_padding_mask": padding},
        "padding-heads": {"attn_mask": allowed, "key_padding_mask": padding},
        "causal": {"is_causal": True},
        "causal-padding": {"is_causal": True, "key_padding_mask": padding},
        "causal-heads": {"is_causal": True, "attn_mask": allowed},
    }


def torch_masks(case: dict[str, Tensor | bool], num_queries: int, num_keys: int) -> dict[str, Tensor]:
    """The same masks for nn.MultiheadAttention, whose bool attn_mask is True where attending is forbidden."""
    allowed = torch.ones(2, 4, num_queries, num_keys, dtype=torch.bool)
    mask = case.get("attn_mask")
    if isinstance(mask, Tensor):
        allowed = allowed & (mask.unsqueeze(1) if mask.ndim == 3 else mask)
    if case.get("is_causal"):
        allowed = allowed & torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    masks = {"attn_mask": ~allowed.reshape(8, num_queries, num_keys)}
    if isinstance(padding := case.get("key_padding_mask"), Tensor):
        masks["key_padding_mask"] = padding
    return masks


@pytest.mark.parametrize("case", mask_cases(5, 7))
@pytest.mark.parametrize(("bias", "kdim", "vdim"), [(True, None, None), (False, None, None), (True, 10, 6)])
def test_s3_agrees_with_torch(case: str, bias: bool, kdim: int | None, vdim: int | None) -> None:
    theirs = randomized(nn.MultiheadAttention(16, 4, bias=bias, kdim=kdim, vdim=vdim, batch_first=True))
    ours = MultiHeadAttention.from_torch(theirs)
    query, key, value = randn(2, 5, 16), randn(2, 7, kdim or 16), randn(2, 7, vdim or 16)
    masks = mask_cases(5, 7)[case]
    expected, _ = theirs(query, key, value, **torch_masks(masks, 5, 7), need_weights=False)
    agree(ours(query, key, value, **masks), expected)


def test_s3_unbatched_and_at_the_size_of_the_paper() -> None:
    theirs = randomized(nn.MultiheadAttention(512, 8, batch_first=True))
    ours = MultiHeadAttention.from_torch(theirs)
    assert (ours.embed_dim, ours.num_heads, ours.head_dim) == (512, 8, 64)
    assert sum(p.numel() for p in MultiHeadAttention().parameters()) == 4 * (512 * 512 + 512)
    x = randn(2, 9, 512)
    agree(ours(x, x, x), theirs(x, x, x, need_weights=False)[0])
    padding = torch.arange(9) > 4
    expected, _ = theirs(x[0], x[0], x[0], key_padding_mask=padding, need_weights=False)
    agree(ours(x[0], x[0], x[0], key_padding_mask=padding), expected)


def test_s3_a_sample_of_padding_alone_yields_the_output_bias() -> None:
    module, x = randomized(MultiHeadAttention(16, 4)), randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [True] * 5])
    output = module(x, x, x, key_padding_mask=padding)
    agree(output[1], module.output_proj.bias.expand(5, 16))
    agree(output[:1], module(x[:1], x[:1], x[:1]))


def test_s3_refuses_a_torch_module_that_adds_keys() -> None:
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(UsageError, match="add_bias_kv"):
            MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, **{option: True}))


def test_cross_attention_ignores_padded_memory() -> None:
    module = randomized(CrossAttention(16, 4, memory_dim=6))
    query, memory = randn(2, 5, 16), randn(2, 9, 6)
    padding = torch.arange(9).expand(2, 9) >= 4
    output = module(query, memory, padding)
    assert output.shape == (2, 5, 16)
    agree(output, module(query, memory[:, :4]))
    assert differ(output, module(query, memory))


# S4


@pytest.mark.parametrize("dtype", DTYPES)
def test_s4_tables(dtype: torch.dtype) -> None:
    module = WorkedExample().to(dtype)
    x = torch.tensor(worked_example.INPUT, dtype=dtype)
    query, key, value = x @ module.query_weight, x @ module.key_weight, x @ module.value_weight
    scores = query @ key.T  # small integers, so exact in every dtype
    for given, table in (
        (key, [[0, 1, 1], [4, 4, 0], [2, 3, 1]]),
        (query, [[1, 0, 2], [2, 2, 2], [2, 1, 3]]),
        (value, [[1, 2, 3], [2, 8, 0], [2, 6, 3]]),
        (scores, [[2, 4, 4], [4, 16, 12], [4, 12, 10]]),
    ):
        assert given.tolist() == table
    outputs = [[1.936621, 6.683105, 1.595068], [1.999994, 7.963992, 0.053976], [1.999705, 7.759892, 0.358389]]
    accuracy = {torch.float64: 1e-6, torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    agree(module(x).double(), torch.tensor(outputs, dtype=torch.float64), atol=accuracy)


def test_s4_weights_and_rounded_outputs() -> None:
    module = WorkedExample().double()
    x = torch.tensor(worked_example.INPUT, dtype=torch.float64)
    weights = ((x @ module.query_weight) @ (x @ module.key_weight).T).softmax(-1)
    expected = [
        [6.3379e-02, 4.6831e-01, 4.6831e-01],
        [6.0337e-06, 9.8201e-01, 1.7986e-02],
        [2.9539e-04, 8.8054e-01, 1.1917e-01],
    ]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=0)
    # The example's own rounding keeps each row's sum at 1: its first weight, 0.063, is written 0.0, not 0.1.
    table = torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]], dtype=torch.float64)
    agree(table.sum(-1), torch.ones(3, dtype=torch.float64))
    agree(table, weights, atol=0.07)
    rounded = table @ (x @ module.value_weight)
    agree(rounded, torch.tensor([[2.0, 7.0, 1.5], [2.0, 8.0, 0.0], [2.0, 7.8, 0.3]], dtype=torch.float64))


# S5 and S6


def score_by_hand(
    name: str, score: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, head: int | None
) -> Tensor:
    """The score of one query (d_q,) and one key (d_k,), from the formula and the module's own parameters."""
    parameters = score.named_parameters() if isinstance(score, nn.Module) else ()
    p = {name: parameter if head is None else parameter[head] for name, parameter in parameters}
    match name:
        case "dot":
            return q.dot(k)
        case "scaled-dot":
            return q.dot(k) / math.sqrt(len(k))
        case "general":
            return q @ p["weight"] @ k
        case "additive":
            return p["weight"][0] @ torch.tanh(p["query_weight"] @ q + p["key_weight"] @ k + p["bias"][:, 0])
        case _:
            return p["weight"][0] @ torch.tanh(p["pair_weight"] @ torch.cat([q, k]) + p["bias"][:, 0])


def align_by_hand(name: str, scores: Tensor) -> Tensor:
    if name == "softmax":
        return scores.exp() / scores.exp().sum()
    return F.one_hot(scores.argmax(), len(scores)).to(scores.dtype)


def contexts_by_hand(
    module: GeneralAttention | GeneralMultiHeadAttention,
    names: tuple[str, str],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head: int | None = None,
) -> Tensor:
    columns = []
    for q in query.T:
        scores = torch.stack([score_by_hand(names[0], module.score, q, k, head) for k in key.T])
        weights = align_by_hand(names[1], scores)
        columns.append(sum(a * v for a, v in zip(weights, value.T, strict=True)))
    return torch.stack(columns, dim=1)  # (d_v, n_q)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("align", ALIGNS)
def test_s5_is_its_formula(score: str, align: str) -> None:
    query_dim = 4 if "dot" in score else 3
    module = randomized(GeneralAttention(6, 4, 5, query_dim, score, align, query_input_dim=7))
    features, query_features = randn(2, 6, 8), randn(2, 7, 3)
    output = module(features, query_features)
    assert output.shape == (2, 5, 3)
    for sample in range(2):
        query = module.query_weight @ query_features[sample]
        key, value = module.key_weight @ features[sample], module.value_weight @ features[sample]
        agree(output[sample], contexts_by_hand(module, (score, align), query, key, value))
        agree(output[sample], module(features[sample], query_features[sample]))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("align", ALIGNS)
def test_s6_is_its_formula(score: str, align: str) -> None:
    query_dim = 4 if "dot" in score else 3
    module = randomized(GeneralMultiHeadAttention(6, 4, 5, 2, 9, query_dim, score, align, query_input_dim=7))
    features, query_features = randn(2, 6, 8), randn(2, 7, 3)
    output = module(features, query_features)
    assert output.shape == (2, 9, 3)
    for sample in range(2):
        heads = []
        for head in range(2):
            query = module.head_query_weight[head] @ module.query_weight @ query_features[sample]
            key, value = module.key_weight[head] @ features[sample], module.value_weight[head] @ features[sample]
            heads.append(contexts_by_hand(module, (score, align), query, key, value, head))
        agree(output[sample], module.output_weight @ torch.cat(heads))
        agree(output[sample], module(features[sample], query_features[sample]))


def test_s5_in_columns_is_s1_in_rows() -> None:
    columns, rows = randomized(GeneralAttention(6, 4, 5)), SelfAttention(6, 4, 5).double()
    for name in ("query", "key", "value"):
        getattr(rows, f"{name}_proj").weight = getattr(columns, f"{name}_weight")
    x = randn(2, 7, 6)
    agree(columns(x.mT).mT, rows(x))


def test_s5_takes_callables_and_registers_their_parameters() -> None:
    plain = randomized(GeneralAttention(6, 4, 5))
    score = nn.Bilinear(1, 1, 1)  # stands for any module: what counts is that its parameters are found

    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = score

        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return query.mT @ key / 2

    custom = GeneralAttention(6, 4, 5, score=Score(), align=lambda scores: scores.softmax(-1)).double()
    assert "score.inner.weight" in custom.state_dict()
    custom.load_state_dict(plain.state_dict(), strict=False)
    features = randn(6, 8)
    agree(custom(features), plain(features))
    uniform = GeneralAttention(6, 4, 5, score=lambda q, k: q.mT @ k, align=lambda e: torch.ones_like(e) / e.shape[-1])
    features = torch.randn(6, 8)
    agree(uniform(features), (uniform.value_weight @ features).mean(-1, keepdim=True).expand(5, 8), atol=1e-5)


def test_s6_with_trivial_weights_is_s5_and_heads_have_parameters_of_their_own() -> None:
    one = randomized(GeneralAttention(6, 4, 5))
    many = GeneralMultiHeadAttention(6, 4, 5, num_heads=1, output_dim=5).double()
    state = {
        name: parameter if name == "query_weight" else parameter[None] for name, parameter in one.state_dict().items()
    }
    eye = torch.eye(5, dtype=torch.float64)
    many.load_state_dict(state | {"head_query_weight": eye[None, :4, :4], "output_weight": eye})
    features = randn(2, 6, 8)
    agree(many(features), one(features))
    additive = GeneralMultiHeadAttention(6, 4, 5, 3, 7, score="additive")
    assert all(p.shape[0] == 3 for name, p in additive.named_parameters() if name.startswith("score."))


def test_s5_hard_alignment_takes_the_first_of_equal_scores() -> None:
    module = randomized(GeneralAttention(6, 4, 5, align="hard"))
    column = randn(6, 1)
    features = torch.cat([column, column, randn(6, 3) * 1e-3], dim=1)
    output = module(features, column)
    best = (module.key_weight @ features).T @ (module.query_weight @ column)
    first = best[:, 0].argmax().item()
    agree(output, module.value_weight @ features[:, first : first + 1])
    assert torch.equal(module.align(torch.tensor([[1.0, 3.0, 3.0]])), torch.tensor([[0.0, 1.0, 0.0]]))


# S7


@pytest.mark.parametrize("scaled", [False, True])
def test_s7_rows_are_convex_combinations(scaled: bool) -> None:
    x = randn(3, 7, 5)
    output = ParameterFreeAttention(scaled)(x)
    scores = torch.einsum("bid,bjd->bij", x, x) / (math.sqrt(5) if scaled else 1)
    agree(output, scores.softmax(-1) @ x)
    agree(ParameterFreeAttention(scaled)(x[0]), output[0])
    directions = randn(5, 1000)  # a point lies in the hull where no direction separates it from all the rows
    hull, points = x @ directions, output @ directions
    assert (points <= hull.amax(1, keepdim=True) + 1e-12).all()
    assert (points >= hull.amin(1, keepdim=True) - 1e-12).all()
    agree(ParameterFreeAttention(scaled)(torch.ones_like(x)), torch.ones_like(x))


# S8


@pytest.mark.parametrize(
    ("shape", "patch_size"),
    [((3, 224, 224), 4), ((2, 3, 8, 12), 4), ((5, 1, 6, 6), 1), ((2, 2, 6, 9), 3), ((1, 4, 4), 4)],
)
def test_s8_split_and_merge_are_exact_inverses(shape: tuple[int, ...], patch_size: int) -> None:
    image = torch.randn(shape)
    tokens = split_patches(image, patch_size)
    channels, height, width = shape[-3:]
    assert tokens.shape[-2:] == (height * width // patch_size**2, channels * patch_size**2)
    assert torch.equal(merge_patches(tokens, patch_size, height, width), image)
    assert torch.equal(split_patches(merge_patches(tokens, patch_size, height, width), patch_size), tokens)
    batched = image if image.ndim == 4 else image[None]
    unshuffled = F.pixel_unshuffle(batched, patch_size).flatten(2).mT  # 48×56×56 -> 3136 tokens of 48
    assert torch.equal(tokens if image.ndim == 4 else tokens[None], unshuffled)


def test_s8_tokens_are_row_major_and_features_raw_pixels() -> None:
    image = torch.arange(2 * 4 * 6).reshape(2, 4, 6)
    tokens = split_patches(image, 2)
    assert tokens.shape == (6, 8)
    assert tokens[1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]  # row 0, column 1: two channels of 2×2
    assert tokens[3].tolist() == [12, 13, 18, 19, 36, 37, 42, 43]  # row 1, column 0


def test_s8_patch_attention_is_s2_over_patches() -> None:
    module, image = randomized(PatchAttention(3, 4, 12, 3)), randn(2, 3, 8, 16)
    output = module(image)
    assert output.shape == (2, 8, 12)
    agree(output, module.attention(F.unfold(image, 4, stride=4).mT))
    agree(module(image[0]), output[0])
    assert PatchAttention().attention.query_proj.weight.shape == (192, 48)


# S9


@pytest.mark.parametrize(("key_dim", "value_dim", "num_heads"), [(12, 12, 3), (12, 20, 4), (8, 4, 1), (6, 6, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_s9_selection_is_slicing_exactly(key_dim: int, value_dim: int, num_heads: int, dtype: torch.dtype) -> None:
    query, key, value = randn(2, 5, key_dim).to(dtype), randn(2, 7, key_dim).to(dtype), randn(2, 7, value_dim).to(dtype)
    selection = identities.selection_matrices(key_dim, num_heads, dtype)
    assert set(selection.flatten().tolist()) <= {0.0, 1.0}
    for matrix, part in zip(selection, query.chunk(num_heads, dim=-1), strict=True):
        assert torch.equal(query @ matrix, part)
    assert torch.equal((selection @ selection.mT).sum(0), torch.eye(key_dim, dtype=dtype))
    by_slicing = identities.multi_head_by_slicing(query, key, value, num_heads)
    assert torch.equal(by_slicing, identities.multi_head_by_selection(query, key, value, num_heads))
    q, k, v = (torch.stack(x.chunk(num_heads, dim=-1), dim=1) for x in (query, key, value))  # (B, h, n, d / h)
    expected = F.scaled_dot_product_attention(q, k, v)
    agree(by_slicing, torch.cat(expected.unbind(1), dim=-1), atol=1e-12 if dtype == torch.float64 else 1e-6)


def test_s9_heads_are_the_diagonal_blocks_of_the_full_product() -> None:
    query, key, value = randn(2, 5, 12), randn(2, 7, 12), randn(2, 7, 6)
    blocks = identities.stacked_scores(query, key, 3).reshape(2, 3, 5, 3, 7)  # (B, h, n_q, h, n_k)
    heads = [q @ k.mT for q, k in zip(query.chunk(3, -1), key.chunk(3, -1), strict=True)]
    for head in range(3):
        agree(blocks[:, head, :, head], heads[head])
    agree(sum(heads[1:], heads[0]), query @ key.mT)
    # Multi-head attention is full attention of the stacked heads with all other blocks masked.
    q, k, v = (torch.cat(x.chunk(3, -1), dim=1) for x in (query, key, value))
    mask = torch.eye(3).repeat_interleave(5, 0).repeat_interleave(7, 1).bool()
    full = attention(q, k, v, scale=1 / 2, attn_mask=mask)  # (B, 3 · 5, 2)
    agree(torch.cat(full.chunk(3, dim=1), dim=-1), identities.multi_head_by_slicing(query, key, value, 3))


# S10


def test_s10_moments_of_a_dot_product() -> None:
    samples, key_dim = 400_000, 6
    query_mean, query_variance, key_mean, key_variance = 0.7, 1.5, -0.4, 0.6
    uniform = (
        torch.rand(samples, key_dim, dtype=torch.float64) - 0.5
    )  # variance 1/12: the law is not about normal entries
    query = query_mean + uniform * math.sqrt(12 * query_variance)
    key = key_mean + randn(samples, key_dim) * math.sqrt(key_variance)
    products = (query * key).sum(-1)
    mean, variance = products.mean().item(), products.var().item()
    mean_error = math.sqrt(variance / samples)
    kurtosis = ((products - mean) ** 4).mean().item() / variance**2
    variance_error = variance * math.sqrt((kurtosis - 1) / samples)

    arguments = (key_dim, query_mean, query_variance, key_mean, key_variance)
    assert abs(mean - identities.dot_product_mean(key_dim, query_mean, key_mean)) < 4 * mean_error
    assert abs(variance - identities.dot_product_variance(*arguments)) < 4 * variance_error
    # The samples are enough to reject every near miss.
    both = query_variance * key_variance
    left, right = query_variance * key_mean**2, query_mean**2 * key_variance
    near_misses = {
        "no means": key_dim * both,
        "one mean only": key_dim * (both + left),
        "the other mean only": key_dim * (both + right),
        "means swapped": key_dim * (both + query_variance * query_mean**2 + key_mean**2 * key_variance),
        "means not squared": key_dim * (both + query_variance * key_mean + query_mean * key_variance),
        "deviations for variances": key_dim * (math.sqrt(both) + left + right),
        "d_k + 1": identities.dot_product_variance(key_dim + 1, *arguments[1:]),
    }
    for name, wrong in near_misses.items():
        assert abs(variance - wrong) > 10 * variance_error, name
    assert abs(mean - key_dim * (query_mean + key_mean)) > 10 * mean_error


@pytest.mark.parametrize("key_dim", [1, 16, 256])
def test_s10_scaled_scores_have_variance_one(key_dim: int) -> None:
    samples = 100_000
    scores = (randn(samples, key_dim) * randn(samples, key_dim)).sum(-1)
    scaled = scores / math.sqrt(key_dim)
    error = math.sqrt((3 + 6 / key_dim - 1) / samples)  # the kurtosis of a sum of d products of normals is 3 + 6 / d
    assert abs(scaled.var().item() - 1) < 4 * error
    assert identities.dot_product_variance(key_dim, 0, 1, 0, 1) == key_dim
    if key_dim > 1:
        assert abs(scores.var().item() - 1) > 10 * error


def test_s10_unscaled_half_precision_scores_saturate() -> None:
    tokens, key_dim = 64, 4096
    query, key = torch.randn(2, tokens, key_dim).half()
    values = torch.eye(tokens).half()  # so that the outputs are the weights
    unscaled = attention(query, key, values, scale=1.0)
    scaled = attention(query, key, values, scale=1 / math.sqrt(key_dim))
    assert (unscaled.amax(-1) > 0.99).float().mean() > 0.8  # nearly every query sees one key
    assert (unscaled == 0).float().mean() > 0.5  # and gives the others nothing at all
    assert scaled.amax() < 0.5
    assert (scaled > 0).all()
    huge = torch.full((1, key_dim), 5.0).half()  # 4096 · 25 is beyond 65504, the largest float16
    assert (huge @ huge.mT).isinf().all()
    assert not ((huge / math.sqrt(key_dim)) @ huge.mT).isinf().any()


# S11


def orderless_modules() -> dict[str, nn.Module]:
    return {
        "S1": SelfAttention(8, 8),
        "S2": MultiHeadSelfAttention(8, 8, 4, 2),
        "S7": ParameterFreeAttention(),
        "S13a": PostSoftmaxScale(8, 8, num_heads=2),
        "post-norm encoder": TransformerEncoder(2, 8, 2),
        "pre-norm encoder": TransformerEncoder(2, 8, 2, norm_first=True, final_norm=True),
    }


@pytest.mark.parametrize("name", orderless_modules())
def test_s11_permuting_tokens_permutes_outputs(name: str) -> None:
    module, x = randomized(orderless_modules()[name]), randn(2, 9, 8)
    order = torch.randperm(9)
    assert order.tolist() != list(range(9))
    agree(module(x[:, order]), module(x)[:, order])


@pytest.mark.parametrize(("positions", "is_causal"), [("sinusoidal", False), ("learned", False), (None, True)])
def test_s11_positions_and_causality_break_it(positions: str | None, is_causal: bool) -> None:
    encoder = TransformerEncoder(2, 8, 2, max_length=16, positions=positions, is_causal=is_causal)
    module, x = randomized(encoder), randn(2, 9, 8)
    order = torch.arange(9).flip(0)
    assert differ(module(x[:, order]), module(x)[:, order])


def test_s11_holds_in_columns_and_over_memory() -> None:
    order = torch.randperm(9)
    general, features = randomized(GeneralAttention(6, 4, 5)), randn(6, 9)
    agree(general(features[:, order]), general(features)[:, order])
    cross, query, memory = randomized(CrossAttention(8, 2)), randn(2, 4, 8), randn(2, 9, 8)
    agree(cross(query, memory[:, order]), cross(query, memory))


# S12


def torch_encoder(norm_first: bool, activation: str, final_norm: bool, bias: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        16, 4, 24, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first, bias=bias
    )
    norm = nn.LayerNorm(16) if final_norm else None
    # Nested tensors zero what padding tokens put out, which is an optimization and not the function.
    return randomized(nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("activation", "final_norm", "bias"), [("relu", False, True), ("gelu", True, True), ("relu", True, False)]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_s12_encoder_agrees_with_torch(
    norm_first: bool, activation: str, final_norm: bool, bias: bool, padded: bool, is_causal: bool
) -> None:
    theirs = torch_encoder(norm_first, activation, final_norm, bias)
    ours = TransformerEncoder.from_torch(theirs, is_causal=is_causal)
    x = randn(2, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [3]]) if padded else None
    forbidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if is_causal else None
    expected = theirs(x, mask=forbidden, src_key_padding_mask=padding)
    agree(ours(x, padding), expected)


def test_s12_from_torch_copies() -> None:
    theirs = torch_encoder(False, "relu", True)
    ours, x = TransformerEncoder.from_torch(theirs), randn(1, 4, 16)
    before = ours(x)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert torch.equal(ours(x), before)
    with pytest.raises(UsageError, match="activation"):
        EncoderLayer.from_torch(nn.TransformerEncoderLayer(8, 2, activation=F.silu))


def test_s12_vit_is_the_torch_encoder_over_patches() -> None:
    theirs, vit = torch_encoder(True, "gelu", True), randomized(VisionTransformer(8, 4, 10, 16, 4, 2))
    ours = TransformerEncoder.from_torch(theirs)
    vit.encoder.layers, vit.encoder.norm = ours.layers, ours.norm
    image = randn(2, 3, 8, 8)
    patches = vit.embedding(F.unfold(image, 4, stride=4).mT)
    x = torch.cat([vit.class_token.expand(2, 1, 16), patches], dim=1)
    expected = vit.head(theirs(x + vit.state_dict()["encoder.positions.table"])[:, 0])
    assert expected.shape == (2, 10)
    agree(vit(image), expected)


def test_s12_tokens_are_embedded_given_positions_and_truncated() -> None:
    encoder = randomized(TransformerEncoder(2, 16, 4, vocab_size=50, max_length=6, positions="learned"))
    tokens = torch.randint(0, 50, (2, 9))
    padding = torch.arange(9) >= torch.tensor([[9], [4]])
    state = encoder.state_dict()
    x = state["embedding.weight"][tokens[:, :6]] + state["positions.table"]
    for layer in encoder.layers:
        x = layer(x, key_padding_mask=padding[:, :6])
    assert x.shape == (2, 6, 16)
    agree(encoder(tokens, padding), x)
    agree(encoder(tokens[:, :6], padding[:, :6]), x)
    assert encoder(tokens[:, :3]).shape == (2, 3, 16)


def test_s12_what_is_padded_or_later_does_not_matter() -> None:
    x, other = randn(2, 7, 16), randn(2, 7, 16)
    padding = torch.arange(7).expand(2, 7) >= 4
    late = torch.where(padding[..., None], other, x)
    encoder = randomized(TransformerEncoder(2, 16, 4))
    agree(encoder(late, padding)[:, :4], encoder(x, padding)[:, :4])
    assert differ(encoder(late)[:, :4], encoder(x)[:, :4])
    causal = randomized(TransformerEncoder(2, 16, 4, is_causal=True))
    agree(causal(late)[:, :4], causal(x)[:, :4])
    assert differ(causal(late)[:, 4:], causal(x)[:, 4:])
    everything = encoder(x, torch.ones(2, 7, dtype=torch.bool))
    assert everything.isfinite().all()


def test_s12_sinusoidal_table() -> None:
    positions = SinusoidalPositions(6, 40)
    added = positions(torch.zeros(2, 40, 6))
    for t in (0, 1, 17, 39):
        for i in range(3):
            angle = t / 10000 ** (2 * i / 6)
            assert added[1, t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert added[1, t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert not positions.state_dict()
    assert positions.half()(torch.zeros(1, 3, 6).half()).dtype == torch.float16


def test_s12_learned_positions_and_feed_forward() -> None:
    learned, x = randomized(LearnedPositions(4, 10)), randn(2, 6, 4)
    agree(learned(x) - x, learned.table[:6].expand(2, 6, 4))
    layer = randomized(FeedForward(4, 7, "gelu"))
    hidden = x @ layer.linear1.weight.T + layer.linear1.bias
    gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    agree(layer(x), gelu @ layer.linear2.weight.T + layer.linear2.bias)
    for token in range(6):
        agree(layer(x)[:, token], layer(x[:, token]))


# S13


@pytest.mark.parametrize("num_heads", [None, 1, 2, 4])
def test_s13a_scale_after_the_softmax(num_heads: int | None) -> None:
    slip = randomized(PostSoftmaxScale(10, 8, 12, num_heads))
    right = MultiHeadSelfAttention(10, 8, 12, num_heads or 1).double()
    right.load_state_dict(slip.state_dict())
    x = randn(2, 5, 10)
    head_dim = 8 // (num_heads or 1)
    unscaled = MultiHeadSelfAttention(10, 8, 12, num_heads or 1).double()
    unscaled.load_state_dict(slip.state_dict())
    unscaled.scale = 1.0
    # Where: softmax of unscaled scores, then the factor, which moves past the product with V.
    agree(slip(x), unscaled(x) / math.sqrt(head_dim))
    # That: it differs from the right module, also by more than a factor.
    assert differ(slip(x), right(x))
    assert differ(slip(x) * math.sqrt(head_dim), right(x))


def test_s13a_rows_of_weights_sum_to_one_over_root_d() -> None:
    slip, x = PostSoftmaxScale(8, 4, 8).double(), randn(2, 5, 8)
    slip.value_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    slip.value_proj.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))  # every value is 1: outputs are row sums
    agree(slip(x), torch.full((2, 5, 8), 1 / math.sqrt(4), dtype=torch.float64))
    right = SelfAttention(8, 4, 8).double()
    right.load_state_dict(slip.state_dict(), strict=False)
    right.value_proj = slip.value_proj
    agree(right(x), torch.ones(2, 5, 8, dtype=torch.float64))


def test_s13a_agrees_where_a_head_is_one_wide() -> None:
    slip, x = randomized(PostSoftmaxScale(10, 4, 8, num_heads=4)), randn(2, 5, 10)
    right = MultiHeadSelfAttention(10, 4, 8, 4).double()
    right.load_state_dict(slip.state_dict())
    agree(slip(x), right(x))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 8), (2, 8), (3, 5)])
def test_s13b_is_exactly_the_reshape(batch: int, tokens: int) -> None:
    slip, x = randomized(ReshapeWithoutTranspose(10, 8, 12, 4)), randn(batch, tokens, 10)
    query, key, value = (p(x).flatten() for p in (slip.query_proj, slip.key_proj, slip.value_proj))
    rows = []
    for run in range(4 * batch):  # the flat buffer is cut into 4 · B sequences of n parts, one after the other
        q, k = (t[run * tokens * 2 : (run + 1) * tokens * 2].reshape(tokens, 2) for t in (query, key))
        v = value[run * tokens * 3 : (run + 1) * tokens * 3].reshape(tokens, 3)
        rows.append(torch.softmax(q @ k.T / math.sqrt(2), -1) @ v)
    agree(slip(x), torch.cat(rows).reshape(batch, tokens, 12))
    right = MultiHeadSelfAttention(10, 8, 12, 4).double()
    right.load_state_dict(slip.state_dict())
    assert differ(slip(x), right(x))


def influence(module: nn.Module, x: Tensor, sample: int, token: int) -> Tensor:
    """Which (B, n) inputs the output of one token depends on."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x)[sample, token].sum(), x)
    return gradient.abs().amax(-1) > 0


@pytest.mark.parametrize("tokens", [8, 5])
def test_s13b_a_token_attends_within_its_run_only(tokens: int) -> None:
    slip, x = randomized(ReshapeWithoutTranspose(10, 8, 8, 4)), randn(2, tokens, 10)
    right = MultiHeadSelfAttention(10, 8, 8, 4).double()
    right.load_state_dict(slip.state_dict())
    for token in range(tokens):
        runs = {part // tokens for part in range(4 * token, 4 * token + 4)}  # those that the token's four parts lie in
        reached = {part // 4 for part in range(4 * tokens) if part // tokens in runs}
        assert len(reached) < tokens
        for sample in range(2):
            seen = influence(slip, x, sample, token)
            assert set(seen[sample].nonzero().flatten().tolist()) == reached
            assert not seen[1 - sample].any()
            assert influence(right, x, sample, token)[sample].all()
    if tokens == 8:
        agree(slip(x)[:, :2], slip(x[:, [0, 1, 7, 6, 5, 4, 3, 2]])[:, :2])  # tokens 0 and 1 are a run of their own
    order = torch.arange(tokens).flip(0).roll(1)
    assert differ(slip(x[:, order]), slip(x)[:, order])  # S11 is lost


def test_s13b_agrees_with_one_head() -> None:
    slip, x = randomized(ReshapeWithoutTranspose(10, 8, 12, 1)), randn(2, 5, 10)
    right = SelfAttention(10, 8, 12).double()
    right.load_state_dict(slip.state_dict())
    agree(slip(x), right(x))


# What is refused

REFUSED: dict[str, Callable[[], object]] = {
    "S1 query_dim": lambda: SelfAttention(8, 8, query_dim=4),
    "S1 size": lambda: SelfAttention(8, 0),
    "S1 width": lambda: SelfAttention(8, 8)(torch.randn(3, 7)),
    "S2 key_dim": lambda: MultiHeadSelfAttention(8, 10, 8, 4),
    "S2 value_dim": lambda: MultiHeadSelfAttention(8, 8, 10, 4),
    "S2 heads": lambda: MultiHeadSelfAttention(8, 8, 8, 0),
    "S2 width": lambda: MultiHeadSelfAttention(8, 8, 8, 2)(torch.randn(2, 3, 7)),
    "S3 embed_dim": lambda: MultiHeadAttention(10, 4),
    "S3 key": lambda: MultiHeadAttention(8, 2, kdim=6)(*torch.randn(3, 2, 4, 8)),
    "S3 mask rank": lambda: MultiHeadAttention(8, 2)(*torch.randn(3, 2, 4, 8), torch.ones(4, dtype=torch.bool)),
    "S3 padding rank": lambda: MultiHeadAttention(8, 2)(
        *torch.randn(3, 2, 4, 8), key_padding_mask=torch.ones(4, dtype=torch.bool)
    ),
    "S4 width": lambda: WorkedExample()(torch.randn(3, 3)),
    "S5 dot": lambda: GeneralAttention(8, 8, 8, query_dim=4, score="dot"),
    "S5 scaled-dot": lambda: GeneralAttention(8, 8, 8, query_dim=4),
    "S5 size": lambda: GeneralAttention(8, 8, -1),
    "S5 features": lambda: GeneralAttention(8, 4, 4)(torch.randn(5, 7)),
    "S5 query features": lambda: GeneralAttention(8, 4, 4, query_input_dim=6)(torch.randn(8, 7)),
    "S6 dot": lambda: GeneralMultiHeadAttention(8, 8, 8, 2, 8, query_dim=4),
    "S6 heads": lambda: GeneralMultiHeadAttention(8, 8, 8, 0, 8),
    "S6 output_dim": lambda: GeneralMultiHeadAttention(8, 8, 8, 2, 0),
    "S8 height": lambda: split_patches(torch.randn(3, 10, 8), 4),
    "S8 width": lambda: PatchAttention()(torch.randn(2, 3, 8, 10)),
    "S8 patch size": lambda: split_patches(torch.randn(3, 8, 8), 0),
    "S8 channels": lambda: PatchAttention()(torch.randn(2, 1, 8, 8)),
    "S8 merge size": lambda: merge_patches(torch.randn(4, 48), 4, 8, 10),
    "S8 merge tokens": lambda: merge_patches(torch.randn(5, 48), 4, 8, 8),
    "S8 merge features": lambda: merge_patches(torch.randn(4, 47), 4, 8, 8),
    "S8 digits": lambda: PatchAttentionClassifier()(torch.randn(2, 1, 10, 10)),
    "S8 digits patch": lambda: PatchAttentionClassifier(patch_size=3),
    "S9 width": lambda: identities.selection_matrices(10, 4),
    "S9 value": lambda: identities.multi_head_by_slicing(torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 6), 4),
    "S12 odd": lambda: SinusoidalPositions(7, 10),
    "S12 sinusoidal length": lambda: SinusoidalPositions(8, 10)(torch.randn(2, 11, 8)),
    "S12 learned length": lambda: LearnedPositions(8, 10)(torch.randn(2, 11, 8)),
    "S12 learned width": lambda: LearnedPositions(8, 10)(torch.randn(2, 5, 1)),
    "S12 layers": lambda: TransformerEncoder(0, 8, 2),
    "S12 vit patch": lambda: VisionTransformer(10, 4, 10, 8, 2, 1),
    "S12 vit image": lambda: VisionTransformer(8, 4, 10, 8, 2, 1)(torch.randn(2, 3, 12, 12)),
    "S13a heads": lambda: PostSoftmaxScale(8, 10, num_heads=4),
    "S13b heads": lambda: ReshapeWithoutTranspose(8, 8, 10, 4),
    "S13b batch": lambda: ReshapeWithoutTranspose(8, 8, 8, 4)(torch.randn(5, 8)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_fit_are_refused_in_one_line(case: str) -> None:
    with pytest.raises(ShapeError) as caught:
        REFUSED[case]()
    assert "\n" not in str(caught.value)


def test_names_and_masks_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown score 'cosine'; known: additive, concat, dot"):
        GeneralAttention(8, 8, 8, score="cosine")
    with pytest.raises(UnknownNameError, match="unknown align 'sparsemax'; known: hard, softmax"):
        GeneralMultiHeadAttention(8, 8, 8, 2, 8, align="sparsemax")
    with pytest.raises(UnknownNameError, match="unknown activation 'silu'"):
        FeedForward(8, 8, "silu")
    with pytest.raises(UnknownNameError, match="unknown positions 'rotary'"):
        TransformerEncoder(1, 8, 2, max_length=4, positions="rotary")
    with pytest.raises(UsageError, match="max_length"):
        TransformerEncoder(1, 8, 2, positions="learned")
    x = torch.randn(2, 4, 8)
    with pytest.raises(UsageError, match=r"attn_mask is torch\.float32"):
        MultiHeadSelfAttention(8, 8, 8, 2)(x, attn_mask=torch.zeros(4, 4))
    with pytest.raises(UsageError, match=r"key_padding_mask is torch\.int64"):
        MultiHeadSelfAttention(8, 8, 8, 2)(x, key_padding_mask=torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"attn_mask is torch\.float32"):
        SelfAttention(8, 8)(x, torch.zeros(4, 4))


# The registry

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
    "vit": "S12",
    "post-softmax-scale": "S13",
    "reshape-without-transpose": "S13",
}


def small(name: str) -> Example:
    """The example of a name, the one large image made smaller."""
    return build_model(name, image_size=32) if name == "patch-attention" else build_model(name)


def cast(args: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    return [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]


def test_registry_names_and_systems() -> None:
    assert {name: model.system for name, model in MODELS.items()} == NAMES
    assert all(name == model.name and "\n" not in model.summary for name, model in MODELS.items())


@pytest.mark.parametrize("name", NAMES)
def test_registry_builds_the_same_model_twice_and_leaves_the_random_state(name: str) -> None:
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
    """Arguments like the example's, of other sizes along the dynamic axes; a dim derived as 4*rows is 4 times rows."""
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
    if name == "patch-attention":  # torch.export itself takes an example of one as a constant
        example = build_model(name, image_size=32, max_batch=4)
        module, args = example.module.half(), cast([image.repeat(2, 1, 1, 1) for image in example.args], torch.float16)
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


def test_options_are_read_and_refused_by_name() -> None:
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


# The trained digits


def test_digits_are_classified() -> None:
    pytest.importorskip("sklearn")
    split = digits.load_digits_split()
    module = build_model("patch-attention-digits").module
    assert isinstance(module, PatchAttentionClassifier)
    assert digits.accuracy(module, split.test_images, split.test_labels) >= 0.975
    assert digits.accuracy(module, split.test_images.flip(-1), split.test_labels) < 0.8  # where the pixels are matters
    assert (Path(digits.__file__).parent / "weights" / "patch-attention-digits.safetensors").stat().st_size < 1_000_000


def test_digits_split_is_fixed_disjoint_and_stratified() -> None:
    pytest.importorskip("sklearn")
    split, again = digits.load_digits_split(), digits.load_digits_split()
    assert all(torch.equal(a, b) for a, b in zip(split, again, strict=True))
    assert split.train_images.shape == (1347, 1, 8, 8)
    assert split.test_images.shape == (450, 1, 8, 8)
    assert split.train_images.dtype == torch.float32
    assert (split.train_images.min().item(), split.train_images.max().item()) == (0, 1)
    counts = torch.bincount(torch.cat([split.train_labels, split.test_labels]))
    assert ((torch.bincount(split.test_labels) / counts - 0.25).abs() < 0.01).all()
    train, test = ({image.numpy().tobytes() for image in images} for images in (split.train_images, split.test_images))
    assert not train & test


def test_shifts_move_by_at_most_one_pixel() -> None:
    image = torch.zeros(500, 1, 8, 8)
    image[:, 0, 3, 4] = 1
    moved = digits.shifted(image, torch.Generator().manual_seed(0))
    places = {tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(500))
    edge = torch.zeros(500, 1, 8, 8)
    edge[:, 0, 0] = 1  # moved up, the row is gone; nothing wraps around
    assert (digits.shifted(edge, torch.Generator().manual_seed(0))[:, 0, 7] == 0).all()


def test_training_command_writes_weights_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        monkeypatch.setattr("sys.argv", ["digits", "--out", str(file), "--epochs", "1"])
        digits.main()
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "held-out accuracy 0." in capsys.readouterr().out
    fresh = build_model("patch-attention-digits", weights=files[0]).module.state_dict()
    shipped = build_model("patch-attention-digits").module.state_dict()
    assert not torch.equal(fresh["head.weight"], shipped["head.weight"])


def test_digits_without_scikit_learn_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UnavailableError, match="pip install scikit-learn"):
        digits.load_digits_split()
