"""A mixture of experts sorts tokens and still computes each on its own; what does not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import moe

import attnforge
from attnforge.export.decoding.tokens import NotByToken
from attnforge.export.sources.huggingface import around
from attnforge.quiet import quiet
from tests.export.decoding.test_insert import SMALL, WIDTH, Causal, inserted

EXPERTS = 4


class Experts(Causal):
    """The two best experts of each token, computed expert by expert, in parts that subclasses override."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.bias = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.matrices = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def flat(self, numbers: Tensor) -> Tensor:
        return numbers.reshape(-1)

    def taken(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order // 2]

    def ends(self, numbers: Tensor) -> Tensor:
        counts = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        return counts.cumsum(0, dtype=torch.int32)

    def computed(self, rows: Tensor, ends: Tensor, numbers: Tensor) -> Tensor:
        return moe._grouped_mm(rows, self.matrices, ends).relu() + self.bias[numbers]

    def put_back(self, results: Tensor, order: Tensor) -> Tensor:
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0])
        return results[places]

    def mixed(self, x: Tensor) -> Tensor:
        rows = super().mixed(x).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        numbers, order = self.flat(chosen).sort()
        results = self.computed(self.taken(rows, order), self.ends(numbers), numbers)
        results = self.put_back(results * weights.reshape(-1)[order][:, None], order)
        return x + results.view(-1, 2, WIDTH).sum(1).view(x.shape)


class ByExpertFirst(Experts):
    """All tokens' best experts come before their second best, and rows are taken as if they did not."""

    def flat(self, numbers: Tensor) -> Tensor:
        return numbers.t().reshape(-1)


class OfAnEarlierToken(Experts):
    def taken(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order // 2 // 2]


class OfAnotherGroup(Experts):
    """As if each token had three experts."""

    def taken(self, rows: Tensor, order: Tensor) -> Tensor:
        return rows[order // 3]


class OtherEnds(Experts):
    """The first expert has no rows, and the last those of two."""

    def ends(self, numbers: Tensor) -> Tensor:
        counts = torch.histc((numbers.float() + 1).clamp(max=EXPERTS - 1), bins=EXPERTS, min=0, max=EXPERTS - 1)
        return counts.cumsum(0, dtype=torch.int32)


class CountedByHalves(Experts):
    """A bin is not one number."""

    def ends(self, numbers: Tensor) -> Tensor:
        counts = torch.histc(numbers.float() * 0.5, bins=EXPERTS, min=0, max=EXPERTS - 1)
        return counts.cumsum(0, dtype=torch.int32)


class Summed(Experts):
    def computed(self, rows: Tensor, ends: Tensor, numbers: Tensor) -> Tensor:
        return super().computed(rows.cumsum(0), ends, numbers)


class Normalised(Experts):
    def computed(self, rows: Tensor, ends: Tensor, numbers: Tensor) -> Tensor:
        return super().computed(rows, ends, numbers).softmax(0)


class Numbered(Experts):
    """Adds the index in the order of the sort."""

    def computed(self, rows: Tensor, ends: Tensor, numbers: Tensor) -> Tensor:
        return super().computed(rows + torch.arange(rows.shape[0])[:, None], ends, numbers)


class BetweenRows(Experts):
    def computed(self, rows: Tensor, ends: Tensor, numbers: Tensor) -> Tensor:
        return super().computed(rows, ends, numbers) + (numbers[:, None] == numbers).sum(1, keepdim=True)


class PutBackByOrder(Experts):
    """The order is not its own inverse."""

    def put_back(self, results: Tensor, order: Tensor) -> Tensor:
        return results[order]


class OfOtherWeights(Experts):
    """Eight numbers for each token, of which two are read as if they were all."""

    def computed(self, rows: Tensor, ends: Tensor, numbers: Tensor) -> Tensor:
        return super().computed(rows, ends, numbers) * self.others[self.order][:, None]

    def taken(self, rows: Tensor, order: Tensor) -> Tensor:
        self.others, self.order = rows[:, :8].reshape(-1, 2, 4).reshape(-1), order
        return super().taken(rows, order)


class OneRow(Experts):
    """Replaces a number of the row that is first in the order."""

    def computed(self, rows: Tensor, ends: Tensor, numbers: Tensor) -> Tensor:
        return super().computed(rows, ends, numbers).scatter(1, torch.zeros(1, 1, dtype=torch.int64), 5.0)


class NotPutBack(Experts):
    def put_back(self, results: Tensor, order: Tensor) -> Tensor:
        return results


class ViewedByHalves(Experts):
    """What is put back is viewed as if all tokens' best experts came first."""

    def put_back(self, results: Tensor, order: Tensor) -> Tensor:
        return super().put_back(results, order).view(2, -1, WIDTH).transpose(0, 1)


class PutBackReversed(Experts):
    def put_back(self, results: Tensor, order: Tensor) -> Tensor:
        places = torch.empty_like(order)
        places[order] = order.shape[0] - 1 - torch.arange(order.shape[0])
        return results[places]


def test_experts_may_have_a_cache() -> None:
    assert inserted(Experts()).places == 64


MIXING: dict[type[Experts], str] = {
    ByExpertFirst: "GatherND .* reads sorted rows",
    OfAnEarlierToken: "Mod .* reads sorted rows",
    OfAnotherGroup: "GatherND .* reads sorted rows",
    OtherEnds: "Reshape .* reads sorted rows",
    CountedByHalves: "Reshape .* reads sorted rows",
    Summed: "CumSum .* reads sorted rows",
    Normalised: "Softmax .* reads sorted rows",
    Numbered: "Add .* reads sorted rows",
    BetweenRows: "Equal .* reads sorted rows",
    PutBackByOrder: "GatherND .* reads sorted rows",
    OfOtherWeights: "GatherND .* reads sorted rows",
    OneRow: "ScatterElements .* reads sorted rows",
    NotPutBack: "Reshape .* reads sorted rows",
    PutBackReversed: "ScatterND .* reads sorted rows",
    ViewedByHalves: "Reshape .* regroups the tokens",
}


@pytest.mark.parametrize("kind", MIXING)
def test_experts_that_mix_tokens_are_refused(kind: type[Experts]) -> None:
    with pytest.raises(NotByToken, match=MIXING[kind]):
        inserted(kind())


def test_deepseek_is_the_same_function_step_by_step(tmp_path: Path) -> None:
    """Keys in two parts, groups of experts, the best of the best groups, and a shared expert."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    sizes: dict[str, Any] = {**latent, **experts, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SMALL, **sizes))
        module, args, shapes = around(model.train(False), 2, 9, 3, 70, only="input_ids")
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache_tokens=72
    )
    assert bundle.manifest.attention.fused["onnxruntime"] == 2
    report = attnforge.verify(bundle, backends=["onnxruntime-cpu"]).backends["onnxruntime-cpu"]
    assert report.passed, report.failures
    assert next(c for c in report.comparisons if c.where == "normal-largest token by token").passed
