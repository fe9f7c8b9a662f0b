"""S12, the decoder, compared with transformers' Llama, Mistral and GPT-2, and with itself without a cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnforge.errors import ShapeError, UsageError
from attnforge.model import build_model
from attnforge.model.attention import attention
from attnforge.model.decoder import Decoder, DecoderSizes, KeyValueCache, RotaryPositions, SwiGLU
from tests.support.decoders import generate
from tests.support.tensors import agree, differ, randn, randomized

LLAMA = DecoderSizes(vocab_size=61, embed_dim=32, num_heads=4, num_layers=2, max_tokens=40, num_kv_heads=2)
GPT2 = replace(
    LLAMA, num_kv_heads=None, positions="learned", norm="layer", feed_forward="gelu-tanh", bias=True, tied=True
)
SIZES = {
    "llama": LLAMA,
    "one key head": replace(LLAMA, num_kv_heads=1),
    "a head for each": replace(LLAMA, num_kv_heads=None, tied=True),
    "window": replace(LLAMA, window=5),
    "soft cap": replace(LLAMA, soft_cap=0.5, num_layers=1),
    "gpt-2": GPT2,
    "mixed": replace(GPT2, num_kv_heads=2, norm="rms", feed_forward="gelu", window=3, soft_cap=2.0, tied=False),
}


def decoder_of(sizes: DecoderSizes) -> Decoder:
    return randomized(Decoder(sizes))


def ids_of(sizes: DecoderSizes, batch: int, tokens: int) -> Tensor:
    return torch.randint(0, sizes.vocab_size, (batch, tokens))


# Against transformers


def as_llama(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' Llama or Mistral to our names."""
    names = {
        "model.embed_tokens": "embedding", "model.norm": "norm", "model.layers": "layers", "lm_head": "head",
        "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn": "attention",
        "mlp": "feed_forward", "q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj",
        "o_proj": "output_proj",
    }  # fmt: skip
    renamed = {}
    for name, weight in weights.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[name] = weight
    return renamed


def as_gpt2(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of transformers' GPT-2, transpose its matrices and split its fused projections."""
    names = {
        "transformer.wte": "embedding", "transformer.wpe": "position_embedding", "transformer.ln_f": "norm",
        "transformer.h": "layers", "ln_1": "norm1", "ln_2": "norm2", "attn.c_proj": "attention.output_proj",
        "mlp.c_fc": "feed_forward.linear1", "mlp.c_proj": "feed_forward.linear2",
    }  # fmt: skip
    renamed = {}
    for name, weight in weights.items():
        if name == "lm_head.weight":  # tied to the embedding
            continue
        weight = weight.T if "c_" in name and weight.ndim == 2 else weight
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if "attn.c_attn" in name:
            for part, projection in zip(weight.chunk(3), ("query_proj", "key_proj", "value_proj"), strict=True):
                renamed[name.replace("attn.c_attn", f"attention.{projection}")] = part
        else:
            renamed[name] = weight
    return renamed


def llama_config(sizes: DecoderSizes, **more: Any) -> dict[str, Any]:
    """The arguments of a Llama-like transformers configuration for these sizes."""
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.embed_dim,
        "intermediate_size": sizes.feed_forward_dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": sizes.max_tokens,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": sizes.tied,
        "attn_implementation": "sdpa",  # eager computes partly in float32
    } | more


def norms_in_float64(monkeypatch: pytest.MonkeyPatch, norm: type) -> None:
    """Remove the cast to float32 from transformers' RMSNorm, which would hide errors up to 1e-7."""

    def forward(self: Any, x: Tensor) -> Tensor:
        output: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return output

    monkeypatch.setattr(norm, "forward", forward)


def with_their_angles(decoder: Decoder, theirs: nn.Module) -> Decoder:
    """Give the decoder the cosines and sines of transformers, which always computes them in float32."""
    assert decoder.rotary is not None
    positions = torch.arange(decoder.sizes.max_tokens)[None]
    cos, sin = theirs.get_submodule("model.rotary_emb")(torch.zeros(1, dtype=torch.float64), positions)
    agree(decoder.rotary.cos, cos[0], atol=1e-5)
    agree(decoder.rotary.sin, sin[0], atol=1e-5)
    decoder.rotary.cos, decoder.rotary.sin = cos[0], sin[0]
    return decoder


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_matches_transformers_llama(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = replace(LLAMA, num_kv_heads=kv_heads)
    theirs = randomized(transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_config(sizes))))
    ours = decoder_of(sizes)
    ours.load_state_dict(as_llama(theirs.state_dict()))
    ids = ids_of(sizes, 3, 40)
    with torch.no_grad():
        logits = with_their_angles(ours, theirs)(ids)
        agree(logits, theirs(ids).logits, atol=1e-6)
        norms_in_float64(monkeypatch, type(theirs.model.norm))
        agree(logits, theirs(ids).logits, atol=1e-10)


def test_it_matches_transformers_mistral(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = replace(LLAMA, window=5)
    theirs = randomized(
        transformers.MistralForCausalLM(transformers.MistralConfig(**llama_config(sizes, sliding_window=5)))
    )
    ours = decoder_of(sizes)
    ours.load_state_dict(as_llama(theirs.state_dict()))
    norms_in_float64(monkeypatch, type(theirs.model.norm))
    ids = ids_of(sizes, 2, 21)
    with torch.no_grad():
        agree(with_their_angles(ours, theirs)(ids), theirs(ids).logits, atol=1e-10)


def test_it_matches_transformers_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=GPT2.vocab_size,
        n_positions=GPT2.max_tokens,
        n_embd=GPT2.embed_dim,
        n_layer=GPT2.num_layers,
        n_head=GPT2.num_heads,
        attn_implementation="eager",
    )
    theirs = randomized(transformers.GPT2LMHeadModel(config))
    ours = decoder_of(GPT2)
    ours.load_state_dict(as_gpt2(theirs.state_dict()))
    ids = ids_of(GPT2, 3, 40)
    with torch.no_grad():
        agree(ours(ids), theirs(ids).logits, atol=1e-10)


def test_it_generates_what_transformers_generates() -> None:
    transformers = pytest.importorskip("transformers")
    ids = ids_of(LLAMA, 2, 6)
    config = transformers.LlamaConfig(**llama_config(LLAMA), pad_token_id=0, bos_token_id=None, eos_token_id=None)
    theirs = randomized(transformers.LlamaForCausalLM(config))
    ours = decoder_of(LLAMA)
    ours.load_state_dict(as_llama(theirs.state_dict()))
    written = theirs.generate(ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(generate(with_their_angles(ours, theirs), ids, 20), written[:, 6:])


# With a cache


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("chunks", [[24], [9, 15], [1, 7, 8, 5, 3], [1] * 24])
def test_steps_with_a_cache_match_the_whole_sequence(name: str, chunks: list[int]) -> None:
    decoder, ids = decoder_of(SIZES[name]), ids_of(SIZES[name], 3, 24)
    with torch.no_grad():
        expected = decoder(ids)
    cache, past, logits = decoder.empty_cache(3), torch.zeros(3, dtype=torch.int64), []
    for chunk in torch.split(ids, chunks, dim=1):
        logits.append(decoder.step(chunk, past, cache))
        past = past + chunk.shape[1]
    agree(torch.cat(logits, dim=1), expected)
    for tensor in (*cache.keys, *cache.values):
        assert tensor.shape == (3, decoder.sizes.kv_heads, 40, 8)
        assert tensor[:, :, :24].abs().amin(-1).min() > 0 and not tensor[:, :, 24:].any()


@pytest.mark.parametrize("name", SIZES)
def test_ragged_rows_match_each_row_alone(name: str) -> None:
    decoder, ids = decoder_of(SIZES[name]), ids_of(SIZES[name], 3, 24)
    with torch.no_grad():
        expected = decoder(ids)
    lengths = torch.tensor([11, 4, 1])
    prompt = torch.where(torch.arange(11) < lengths[:, None], ids[:, :11], 7)  # arbitrary padding
    cache, past = decoder.empty_cache(3, 27), lengths
    logits = decoder.step(prompt, torch.zeros_like(lengths), cache)
    for row, length in enumerate(lengths):
        agree(logits[row, :length], expected[row, :length])
    for tokens in (1, 1, 3, 1, 5, 2):
        positions = past[:, None] + torch.arange(tokens)
        agree(decoder.step(ids.gather(1, positions), past, cache), expected[torch.arange(3)[:, None], positions])
        past = past + tokens


def test_steps_update_only_their_slots_in_place() -> None:
    decoder, ids = decoder_of(LLAMA), ids_of(LLAMA, 2, 12)
    cache = decoder.empty_cache(2, 16)
    addresses = [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)]
    decoder.step(ids[:, :8], torch.tensor([0, 3]), cache)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    decoder.step(ids[:, 8:], torch.tensor([8, 5]), cache)
    assert [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)] == addresses
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        changed = (tensor != old).any(-1).any(1)  # (batch, cache_tokens)
        assert changed[0].nonzero().flatten().tolist() == [8, 9, 10, 11]
        assert changed[1].nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_slots_after_a_rows_tokens_do_not_matter() -> None:
    decoder, ids = decoder_of(LLAMA), ids_of(LLAMA, 2, 6)
    clean, stale = decoder.empty_cache(2, 20), decoder.empty_cache(2, 20)
    for tensor in (*stale.keys, *stale.values):
        tensor.fill_(1e3)
    past = torch.tensor([0, 0])
    assert torch.equal(decoder.step(ids, past, stale), decoder.step(ids, past, clean))


def test_invalid_steps_are_refused_before_anything_is_written() -> None:
    decoder, ids = decoder_of(replace(LLAMA, max_tokens=12)), ids_of(LLAMA, 2, 4)
    cache, past = decoder.empty_cache(2, 10), torch.tensor([3, 6])
    longer = decoder.empty_cache(2, 20)
    other = decoder_of(replace(LLAMA, num_layers=1)).empty_cache(2)
    heads = KeyValueCache(tuple(keys[:, :1] for keys in cache.keys), cache.values)
    for message, error, arguments in (
        ("4 tokens after 7; cache and positions have room for 10", ShapeError, (ids, past + 1, cache)),
        ("4 tokens after 9; cache and positions have room for 12", ShapeError, (ids, past + 3, longer)),
        ("past is -1 in one row", UsageError, (ids, past - 4, cache)),
        (r"past is torch.int64 \(1,\); give int64 \(2,\)", UsageError, (ids, past[:1], cache)),
        ("past is torch.int32", UsageError, (ids, past.int(), cache)),
        ("ids are .* to 61; give 0 to 60", UsageError, (ids.clamp(max=5).index_fill(1, past[:1], 61), past, cache)),
        ("ids are -1 to", UsageError, (ids.index_fill(1, past[:1], -1), past, cache)),
        (
            r"the cache is \(2, 2, 10, 8\) per layer; give \(1, 2, cache_tokens, 8\)",
            ShapeError,
            (ids[:1], past[:1], cache),
        ),
        (r"the cache is \(2, 1, 10, 8\) per layer; give \(2, 2", ShapeError, (ids, past, heads)),
        ("the cache has 1 layers; the decoder has 2", ShapeError, (ids, past, other)),
    ):
        with pytest.raises(error, match=message) as caught:
            decoder.step(*arguments)
        assert "\n" not in str(caught.value)
        assert not any(tensor.any() for tensor in (*cache.keys, *cache.values))
    decoder.step(ids, past, cache)
    with pytest.raises(ShapeError, match="cache_tokens is 0"):
        decoder.empty_cache(2, 0)


# Generating


@pytest.mark.parametrize("name", SIZES)
def test_greedy_generation_matches_the_whole_sequence(name: str) -> None:
    decoder, ids = decoder_of(SIZES[name]), ids_of(SIZES[name], 2, 5)
    written = generate(decoder, ids, 12)
    with torch.no_grad():
        whole = decoder(torch.cat([ids, written], dim=1))
    assert written.shape == (2, 12)
    assert torch.equal(written, whole[:, 4:-1].argmax(-1))


def test_ragged_rows_are_continued_like_each_row_alone() -> None:
    decoder, ids = decoder_of(LLAMA), ids_of(LLAMA, 3, 9)
    lengths = torch.tensor([9, 2, 6])
    written = generate(decoder, ids, 10, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(generate(decoder, ids[row : row + 1, :length], 10)[0], written[row])


def test_sampling_follows_the_probabilities_and_the_seed() -> None:
    decoder, ids = decoder_of(LLAMA), ids_of(LLAMA, 1, 5)
    many = ids.expand(4000, 5)
    with torch.no_grad():
        logits = decoder(ids)[0, -1]
    for temperature in (logits.std().item(), logits.std().item() / 5):
        draws = generate(decoder, many, 1, temperature=temperature, generator=torch.Generator().manual_seed(3))
        again = generate(decoder, many, 1, temperature=temperature, generator=torch.Generator().manual_seed(3))
        assert torch.equal(draws, again)
        expected = (logits / temperature).softmax(-1)
        shares = torch.bincount(draws.flatten(), minlength=61) / 4000
        assert (shares - expected).abs().max() < 5 * math.sqrt(0.25 / 4000)
    assert expected.max() > 0.25  # otherwise temperatures could not be distinguished


# Parts


def test_later_tokens_and_tokens_before_the_window_do_not_matter() -> None:
    ids, other = ids_of(LLAMA, 2, 15), ids_of(LLAMA, 2, 15)
    for name, sizes in SIZES.items():
        decoder = decoder_of(sizes)
        with torch.no_grad():
            logits = decoder(ids)
            agree(decoder(torch.cat([ids[:, :9], other[:, 9:]], dim=1))[:, :9], logits[:, :9])
            earlier = decoder(torch.cat([other[:, :1], ids[:, 1:]], dim=1))
        if sizes.window is None:
            assert differ(earlier[:, -1], logits[:, -1]), name
        else:  # each layer reaches window - 1 tokens back
            reach = sizes.num_layers * (sizes.window - 1)
            agree(earlier[:, reach + 1 :], logits[:, reach + 1 :])
            assert differ(earlier[:, reach], logits[:, reach]), name


def test_rotary_scores_depend_only_on_the_distance() -> None:
    from attnforge.model.decoder import rotate

    rotary = randomized(RotaryPositions(8, 50))
    query, key = randn(1, 1, 1, 8), randn(1, 1, 1, 8)

    def score(query_position: int, key_position: int) -> Tensor:
        turned = (rotate(x, *rotary(torch.tensor([[p]]))) for x, p in ((query, query_position), (key, key_position)))
        return (next(turned) * next(turned)).sum()

    agree(score(7, 3), score(44, 40), atol=1e-5)  # the table is float32
    assert differ(score(7, 3), score(7, 4))
    angle = 3 * 10000 ** (-2 * 1 / 8)
    pair = rotate(torch.eye(8)[1].view(1, 1, 1, 8), *RotaryPositions(8, 50)(torch.tensor([[3]]))).flatten()
    assert pair[1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert pair[5].item() == pytest.approx(math.sin(angle), abs=1e-6)
    assert not rotary.state_dict()


def test_swiglu_and_the_soft_cap_match_their_formulas() -> None:
    layer, x = randomized(SwiGLU(6, 10, bias=True)), randn(2, 3, 6)
    state = layer.state_dict()
    gate = x @ state["gate_proj.weight"].T + state["gate_proj.bias"]
    up = x @ state["up_proj.weight"].T + state["up_proj.bias"]
    hidden = gate / (1 + (-gate).exp()) * up
    agree(layer(x), hidden @ state["down_proj.weight"].T + state["down_proj.bias"])
    query, key, value = randn(3, 2, 7, 4)
    capped = 0.3 * torch.tanh(query @ key.mT * 0.5 / 0.3)
    agree(attention(query, key, value, scale=0.5, soft_cap=0.3), capped.softmax(-1) @ value)


def test_the_decoder_caps_its_scores() -> None:
    capped, ids = decoder_of(replace(LLAMA, soft_cap=1e-9)), ids_of(LLAMA, 2, 9)
    free = Decoder(LLAMA).double()
    free.load_state_dict(capped.state_dict())
    with torch.no_grad():
        assert differ(capped(ids), free(ids))
        for layer in free.layers:  # equal scores
            layer.get_parameter("attention.query_proj.weight").zero_()
        agree(capped(ids), free(ids), atol=1e-8)


def test_default_sizes() -> None:
    assert (LLAMA.head_dim, LLAMA.kv_heads, LLAMA.feed_forward_dim) == (8, 2, 96)  # 85.3, up to a multiple of 16
    assert (GPT2.kv_heads, GPT2.feed_forward_dim) == (4, 128)
    assert replace(GPT2, hidden_dim=50).feed_forward_dim == 50
    untied = sum(parameter.numel() for parameter in Decoder(replace(GPT2, tied=False)).parameters())
    tied = sum(parameter.numel() for parameter in Decoder(GPT2).parameters())
    assert untied - tied == 61 * 32


@pytest.mark.parametrize("name", SIZES)
def test_it_exports_with_any_batch_and_any_tokens(name: str) -> None:
    decoder, sizes = decoder_of(SIZES[name]), SIZES[name]
    shapes = {"input_ids": {0: Dim("batch", min=1, max=8), 1: Dim("tokens", min=1, max=40)}}
    program = torch.export.export(decoder, (ids_of(sizes, 2, 12),), dynamic_shapes=shapes).module()
    for batch, tokens in ((1, 1), (1, 40), (8, 7)):
        ids = ids_of(sizes, batch, tokens)
        with torch.no_grad():
            agree(program(ids), decoder(ids))


def test_options_of_the_registered_decoder() -> None:
    options = {"positions": "learned", "norm": "layer", "feed_forward": "gelu", "window": "9", "soft_cap": "4"}
    module, (ids,), _ = build_model("decoder", **options, tied="true", bias="1", num_tokens=33, batch_size=3)
    assert isinstance(module, Decoder) and ids.shape == (3, 33)
    assert (module.sizes.window, module.sizes.soft_cap, module.sizes.tied) == (9, 4.0, True)
    plain = build_model("decoder").module
    assert isinstance(plain, Decoder)
    assert (plain.sizes.window, plain.sizes.soft_cap, plain.sizes.kv_heads) == (None, None, 2)
