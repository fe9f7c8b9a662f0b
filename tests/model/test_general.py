"""S5 to S7, attention with any score and any alignment, against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.model.attention import ParameterFreeAttention, SelfAttention
from attnforge.model.general import ALIGNS, SCORES, GeneralAttention, GeneralMultiHeadAttention
from tests.support.tensors import agree, randn, randomized

# S5 and S6


def score_by_hand(
    name: str, score: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, head: int | None
) -> Tensor:
    """Compute the score of one query (d_q,) and one key (d_k,) from the formula and the module's parameters."""
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
def test_s5_matches_its_formula(score: str, align: str) -> None:
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
def test_s6_matches_its_formula(score: str, align: str) -> None:
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
    score = nn.Bilinear(1, 1, 1)  # any module with parameters

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


def test_s6_with_trivial_weights_is_s5_and_heads_have_their_own_parameters() -> None:
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
    directions = randn(5, 1000)  # a point is in the hull if no direction separates it from all rows
    hull, points = x @ directions, output @ directions
    assert (points <= hull.amax(1, keepdim=True) + 1e-12).all()
    assert (points >= hull.amin(1, keepdim=True) - 1e-12).all()
    agree(ParameterFreeAttention(scaled)(torch.ones_like(x)), torch.ones_like(x))
