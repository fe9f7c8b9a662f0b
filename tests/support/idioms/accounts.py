"""Modules with softmaxes, attention or neither, each with its account in the certificate."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.idioms.catalogue import HEAD_DIM, HEADS, SCALE, WIDTH, Idiom


class Heads(nn.Module):
    """Projections to query, key and value of (B, 4, n, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)

    def qkv(self, x: Tensor) -> Any:
        return self.packed(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4).unbind(0)

    def merged(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


class TalkingHeads(Heads):
    """CaiT's blocks: scores and weights are mixed over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(HEADS, HEADS), nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        scores = self.before((q @ k.mT * SCALE).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.merged(weights @ v)


class ClassAttention(Heads):
    """CaiT's last blocks: the first token attends to all."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        return self.merged((q[:, :, :1] @ k.mT * SCALE).softmax(-1) @ v)


class CaiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = TalkingHeads(), ClassAttention()

    def forward(self, x: Tensor) -> Any:
        return self.last(x + self.block(x))


class TalkingByConvolution(Heads):
    """EfficientFormerV2's heads, mixed by 1 × 1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(HEADS, HEADS, 1), nn.Conv2d(HEADS, HEADS, 1)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        return self.merged(self.after(self.before(q @ k.mT * SCALE).softmax(-1)) @ v)


class ConViT(Heads):
    """A gated sum of two softmaxes: of the scores, and of a map of positions, which is constant."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.gate = nn.Linear(3, HEADS), nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        distance = torch.arange(x.shape[1], dtype=x.dtype)[:, None] - torch.arange(x.shape[1])
        by_position = self.position(torch.stack([distance, distance.square(), distance.sin()], -1)).permute(2, 0, 1)
        gate = self.gate.sigmoid().view(1, -1, 1, 1)
        weights = (1 - gate) * (q @ k.mT * SCALE).softmax(-1) + gate * by_position.softmax(-1)
        return self.merged(self.normalised(weights) @ v)

    def normalised(self, weights: Tensor) -> Tensor:
        return weights / weights.sum(-1).unsqueeze(-1)


class Differential(Heads):
    """The difference of two softmaxes, the second times a factor of its head, with each query's own share added."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.second = nn.Parameter(torch.rand(HEADS, 1, 1)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        other = self.second(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        weights = (q @ k.mT * SCALE).softmax(-1) - self.factor * (other @ k.mT * SCALE).softmax(-1)
        return self.merged((weights + torch.eye(x.shape[1])) @ v)


class TotalOverQueries(ConViT):
    """A sum of softmaxes, divided by its total over the queries."""

    def normalised(self, weights: Tensor) -> Tensor:
        return weights / weights.sum(-2).unsqueeze(-2)


class Bahdanau(nn.Module):
    """Additive attention."""

    returns_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.score = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        hidden = torch.tanh(self.query(x)[:, :, None] + self.key(memory)[:, None])
        weights = self.score(hidden).squeeze(-1).softmax(-1)
        return (weights @ memory, weights) if self.returns_weights else weights @ memory


class BahdanauWithWeights(Bahdanau):
    """Both walks end: the scores are no product, and the weights are an output."""

    returns_weights = True


class BahdanauOverSteps(nn.Module):
    """The memory is joined of the states of single steps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = BahdanauWithWeights()

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, torch.stack([x[:, i].tanh() for i in range(4)], 1))


class Latents(Heads):
    """Learned tokens attend to each other; the mean of the weights is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.latents * x.mean(1, keepdim=True))
        weights = (q @ k.mT * SCALE).softmax(-1)
        return self.merged(weights @ v), weights.mean(1)


class Gated(Heads):
    """Attention, gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.merged(F.scaled_dot_product_attention(*self.qkv(x))) * self.gate(x).sigmoid()


class LinearAttention(Heads):
    """elu + 1 as feature map: no softmax."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return self.merged(q @ (k.mT @ v) / (q @ k.sum(-2)[..., None]))


class EfficientAttention(Heads):
    """Linear attention whose feature maps are softmaxes: over features, and over tokens."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        return self.merged(q.softmax(-1) @ (k.softmax(-2).mT @ v))


class Mixture(nn.Module):
    """Experts, weighted by a softmax over them and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, 8))

    def outputs(self, x: Tensor) -> Tensor:
        return torch.einsum("bnd,edo->bneo", x, self.experts)

    def forward(self, x: Tensor) -> Any:
        return torch.einsum("bne,bneo->bno", self.gate(x).softmax(-1), self.outputs(x))


class MixtureByProduct(Mixture):
    def forward(self, x: Tensor) -> Any:
        return (self.gate(x).softmax(-1).unsqueeze(-2) @ self.outputs(x)).squeeze(-2)


class MixtureBySum(Mixture):
    def forward(self, x: Tensor) -> Any:
        return (self.gate(x).softmax(-1).unsqueeze(-1) * self.outputs(x)).sum(-2)


class BestExperts(Mixture):
    """The two best experts, whose gates are renormalised."""

    def forward(self, x: Tensor) -> Any:
        gates, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        outputs = self.outputs(x).gather(-2, chosen.unsqueeze(-1).expand(-1, -1, -1, 8))
        return (gates / gates.sum(-1, keepdim=True)).unsqueeze(-2) @ outputs


class MaskedExperts(Mixture):
    """The softmax of the best logits, where the others are masked."""

    def forward(self, x: Tensor) -> Any:
        logits = self.gate(x)
        least = logits.topk(2, dim=-1).values[..., -1:]
        gates = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
        return (gates.unsqueeze(-2) @ self.outputs(x)).squeeze(-2)


class Deformable(nn.Module):
    """Deformable attention: queries weight a few points at which they sample the values, at two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.weights = nn.Linear(WIDTH, HEADS * 2 * 3 * 2), nn.Linear(WIDTH, HEADS * 2 * 3)

    def forward(self, x: Tensor) -> Any:
        places = self.places(x).tanh().unflatten(-1, (HEADS, 2, 3, 2)).transpose(1, 2).flatten(0, 1)
        weights = self.weights(x).unflatten(-1, (HEADS, 6)).softmax(-1).unflatten(-1, (2, 3))
        weights = weights.transpose(1, 2).reshape(-1, 1, x.shape[1], 6)
        values = x.reshape(*x.shape[:2], HEADS, HEAD_DIM).permute(0, 2, 3, 1).reshape(-1, HEAD_DIM, 1, x.shape[1])
        levels = enumerate((values, values[..., ::2]))
        sampled = [F.grid_sample(level, places[:, :, i], align_corners=False) for i, level in levels]
        attended: Any = (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1)
        return attended.unflatten(0, (-1, HEADS)).flatten(1, 2).mT


class BlockSparse(Heads):
    """BigBird's blocks: scores of blocks of keys are joined, and each part of the weights meets its values."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        scores = torch.cat([q @ part.mT for part in k[:, :, :6].split(2, 2)], -1) * SCALE
        weights = scores.softmax(-1).split(2, -1)
        return self.merged(sum(part @ values for part, values in zip(weights, v[:, :, :6].split(2, 2), strict=True)))


class SelectiveKernel(nn.Module):
    """SKNet: a softmax over two branches, by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.choose = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Any:
        branches = torch.stack([self.first(x), self.second(x).relu()], 1)  # (B, 2, n, 8)
        choice = self.choose(branches.sum(1).mean(1)).unflatten(-1, (2, 1, 8)).softmax(1)
        return (branches * choice).sum(1)


class SqueezeAndExcite(nn.Module):
    """A sigmoid by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x * self.gate(x.mean(1, keepdim=True)).sigmoid()


class ChannelSoftmax(SqueezeAndExcite):
    """A softmax over channels, that scales them."""

    def forward(self, x: Tensor) -> Any:
        return x * self.gate(x.mean(1, keepdim=True)).softmax(-1)


class SlotAttention(nn.Module):
    """A softmax over the queries (slots), renormalised over the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(5, WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        slots = self.slots.expand(x.shape[0], -1, -1)
        for _ in range(2):
            weights = (self.key(x) @ self.query(slots).mT * WIDTH**-0.5).softmax(-1) + 1e-8
            slots = slots + (weights / weights.sum(1, keepdim=True)).mT @ self.value(x)
        return slots


class LatentPooling(nn.Module):
    """Learned queries attend to tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(self.latents.expand(x.shape[0], -1, -1), x, x, need_weights=False)[0]


class WeightedMean(nn.Module):
    """The mean of tokens, with a score for each."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        return (self.score(x).softmax(1) * x).sum(1)


class DeepWeightedMean(WeightedMean):
    """The same, with a score that is no product, and with the weights as an output."""

    def forward(self, x: Tensor) -> Any:
        weights = self.score(x.tanh()).sigmoid().softmax(1)
        return (weights * x).sum(1), weights


class MaskedWeights(Heads):
    """DeBERTa's and SEW-D's softmax: the weights of masked keys are set to zero."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        q, k, v = self.qkv(x)
        hidden = ~mask.unsqueeze(1)
        scores = (q @ k.mT * SCALE).masked_fill(hidden, torch.finfo(x.dtype).min)
        return self.merged(scores.softmax(-1).masked_fill(hidden, 0) @ v)


class DisentangledMaskedWeights(Heads):
    """The same, with scores of queries and relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, HEAD_DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        q, k, v = self.qkv(x)
        distance = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).clamp(-32, 31) + 32
        places = (q @ self.positions.weight.mT).gather(-1, distance.expand(*q.shape[:-1], -1)) / HEAD_DIM**0.5
        hidden = ~mask.unsqueeze(1)
        scores = (q @ k.mT * SCALE + places).masked_fill(hidden, torch.finfo(x.dtype).min)
        return self.merged(scores.softmax(-1).masked_fill(hidden, 0) @ v)


class Contrastive(Heads):
    """CLIP's probabilities: pairs, but no values."""

    def forward(self, x: Tensor) -> Any:
        q, k, _ = self.qkv(x)
        return (q @ k.mT).softmax(-1)


class Expectation(nn.Module):
    """The mean of a distribution over bins."""

    def __init__(self) -> None:
        super().__init__()
        self.bins = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Any:
        return self.bins(x).softmax(-1) @ torch.arange(16, dtype=x.dtype)


class ExternalAttention(nn.Module):
    """Attention to learned keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.values(self.keys(x).softmax(-1))


class Unused(nn.Module):
    """Attention of which nothing is used, another that is constant, and softmaxes over one element."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.table, self.one = nn.Parameter(torch.randn(7, WIDTH)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        self.pooler(x, x, x)
        table = F.scaled_dot_product_attention(self.table[None], self.table[None], self.table[None])
        return x + table.mean(1) + self.one(x).softmax(-1)


class UnusedOperator(Heads):
    """An attention operator whose result is not used: torch.export keeps it, and the dropout after it, as they might
    draw random numbers."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x)
        F.dropout(F.scaled_dot_product_attention(k, q, v), training=False)
        return self.merged(F.scaled_dot_product_attention(q, k, v))


class Classes(nn.Module):
    """Attention, the softmax of a classifier, and logarithms of another."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return logits.softmax(-1), logits.log_softmax(-1)


FORM, GATE, WITHOUT_EFFECT = "", "its axis is one of weights", "computes the outputs without it"

ACCOUNTS: dict[type[nn.Module], tuple[list[str], list[str]]] = {
    CaiT: (["MatMul mixes the attention weights", FORM], []),
    TalkingByConvolution: (["weights go through Conv"], []),
    ConViT: ([FORM], [WITHOUT_EFFECT]),
    Differential: ([FORM] * 2, []),
    TotalOverQueries: (["weights go through Add"], [WITHOUT_EFFECT]),
    Bahdanau: (["additive score"], []),
    BahdanauWithWeights: (["an output of the model"], []),
    BahdanauOverSteps: (["an output of the model"], []),
    Latents: (["used 2 times"], []),
    Gated: ([FORM], []),
    LinearAttention: ([], []),
    EfficientAttention: (["not from an inner product"] * 2, []),
    Mixture: ([FORM], []),
    MixtureByProduct: ([FORM], []),
    MixtureBySum: ([FORM], []),
    BestExperts: ([], [GATE]),
    MaskedExperts: ([], [GATE]),
    Deformable: (["neither side of Add is an inner product"], []),
    BlockSparse: (["in more than two parts"], []),
    SelectiveKernel: ([], [GATE]),
    SqueezeAndExcite: ([], []),
    ChannelSoftmax: ([], [GATE]),
    SlotAttention: (["weights go through Add"] * 2, []),
    LatentPooling: ([FORM], []),
    WeightedMean: ([FORM], []),
    DeepWeightedMean: (["scores come from Sigmoid"], []),
    MaskedWeights: ([FORM], []),
    DisentangledMaskedWeights: ([FORM], []),
    Contrastive: (["an output of the model"], []),
    Expectation: ([FORM], []),
    ExternalAttention: ([FORM], []),
    Unused: ([FORM], [WITHOUT_EFFECT, "runs over one element"]),
    UnusedOperator: ([FORM], [WITHOUT_EFFECT]),
    Classes: ([FORM], [GATE]),
}
"""The sites of every module, each by its reason or :data:`FORM`, and why its other softmaxes are no attention."""

MODULES = {
    kind.__name__: Idiom(kind.__name__, kind, tuple(signature(kind.forward).parameters)[1:], ("static",))
    for kind in ACCOUNTS
}
