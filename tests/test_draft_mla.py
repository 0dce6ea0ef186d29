"""Latent attention: equal to a forward pass from the formulas, to its other form, to transformers' own.

Published sizes are counted on the meta device; everything else is small, in float64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.config import DraftConfig, GqaConfig, LayerConfig, MlaConfig, RopeConfig
from blockdraft.draft import DraftModel
from blockdraft.draft.attention import visible
from blockdraft.draft.mla import LatentAttention
from blockdraft.draft.rope import Rotary, rope_frequencies
from blockdraft.errors import ConfigError
from blockdraft.formats import zlab
from blockdraft.train.blocks import block_hidden
from drafts import K3_FIVE_LAYERS, K3_SIX_LAYERS, K31
from mla_kit import (
    HEADS,
    LATENT,
    LAYOUTS,
    PLAIN,
    ROPE,
    VOCAB,
    WIDTH,
    YARN,
    FromScratch,
    filled,
    make_config,
    make_model,
    make_noise,
    make_taps,
)
from train_kit import blocks_at

EXACT = 1e-10
VARIANTS: dict[str, dict[str, Any]] = {
    "v2": {},
    "v1": {"is_v2": False},
    "one query projection": {"q_lora_rank": None},
    "plain rope": {"rope": PLAIN},
    "biases": {"has_bias": True},
    "norms per tap": {"has_tap_norms": True},
}


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=EXACT, rtol=EXACT)


# ---- against the formulas --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LAYOUTS)
def test_rounds_over_a_cache_equal_one_pass_from_scratch(name: str) -> None:
    """Contexts below, at and past the windows; blocks of every length; injected in pieces of every size."""
    model = make_model(make_config(LAYOUTS[name]))
    reference, taps, cache = FromScratch(model), make_taps(21), model.new_cache()
    for num_new, length in ((0, 4), (1, 3), (3, 5), (9, 8), (1, 2), (6, 8), (1, 1)):
        model.inject(taps[cache.num_positions : cache.num_positions + num_new], cache)
        noise = make_noise(1, length)
        same(model(noise, [cache])[0], reference.hidden(taps[: cache.num_positions], noise[0]))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_part_that_a_config_can_ask_for(name: str) -> None:
    model = make_model(make_config(LAYOUTS["sliding both ways and full"], **VARIANTS[name]))
    taps, noise = make_taps(11), make_noise(1, 8)
    same(model(noise, [filled(model, taps, [4, 7])])[0], FromScratch(model).hidden(taps, noise[0]))


def test_a_long_run_with_random_acceptance_and_rows_of_unequal_length() -> None:
    model = make_model(make_config(LAYOUTS["default mix"]))
    generator = torch.Generator().manual_seed(4)
    taps, caches = make_taps(300), [model.new_cache() for _ in range(3)]
    for step in range(60):
        for cache in caches:
            count = int(torch.randint(1, 6, (), generator=generator))
            model.inject(taps[cache.num_positions : cache.num_positions + count], cache)
        if step % 20 == 19:
            noise = make_noise(3, 5)
            together = model(noise, caches)
            for row, cache in enumerate(caches):
                fresh = filled(model, taps[: cache.num_positions], [cache.num_positions])
                same(together[row : row + 1], model(noise[row : row + 1], [fresh]))
    sliding = caches[0].layer(0)[0]
    assert sliding.shape == (1, 4, LATENT + ROPE)


# ---- the two forms ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_expanded_and_absorbed_attention_are_one_function(q_lora_rank: int | None) -> None:
    config = make_config(LAYOUTS["full"], q_lora_rank=q_lora_rank, has_bias=True)
    attention = make_model(config).layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    rows, source = make_noise(1, 5)[0], make_noise(1, 9)[0]
    rotary = Rotary(config.rope, ROPE)
    at_rows = rotary.at(torch.arange(20, 25), dtype=torch.float64)
    at_source = rotary.at(torch.arange(9), dtype=torch.float64)
    results = []
    for absorbed in (False, True):
        q_LHA = attention.query(rows, at_rows, absorbed=absorbed)
        k_SJA, v_SJW = attention.key_value(source, at_source, absorbed=absorbed)
        assert k_SJA.shape[1] == v_SJW.shape[1] == (1 if absorbed else HEADS)
        weights = torch.einsum("lha,sha->hls", q_LHA, k_SJA.expand(-1, HEADS, -1))
        weights = (weights * config.softmax_scale).softmax(-1)
        values = v_SJW.expand(-1, HEADS, -1)
        results.append(attention.output(torch.einsum("hls,shw->lhw", weights, values), absorbed=absorbed))
    same(results[0], results[1])


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_over_many_blocks_equals_serving_each(name: str) -> None:
    """The expanded form under the trainer's masks gives what the absorbed form gives over a cache."""
    model = make_model(make_config(LAYOUTS[name]))
    ids = torch.randint(0, VOCAB - 1, (24,)).tolist()
    anchors, length = [0, 3, 7, 8, 15, 19], 5
    taps, table = make_taps(24), torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    trained = block_hidden(model, table, taps[None], blocks_at(ids, anchors, length))
    for x, anchor in enumerate(anchors):
        noise = model.noise([ids[anchor]], length, lambda rows: table[rows])
        same(trained[x : x + 1], model(noise, [filled(model, taps[:anchor], [anchor])]))


def test_every_parameter_is_trained() -> None:
    model = make_model(make_config(LAYOUTS["default mix"], has_tap_norms=True)).requires_grad_(True)
    ids, taps = list(range(1, 21)), make_taps(20)
    table = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    hidden = block_hidden(model, table, taps[None], blocks_at(ids, [6, 12], 5))
    torch.autograd.backward((hidden * torch.randn_like(hidden)).sum())
    for name, parameter in model.named_parameters():
        if not name.startswith("candidate_selector"):
            assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, name


# ---- width, window, memory -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LAYOUTS)
def test_width_5_is_a_prefix_of_width_8_iff_every_layer_is_causal(name: str) -> None:
    model = make_model(make_config(LAYOUTS[name]))
    cache, noise = filled(model, make_taps(11), [11]), make_noise(1, 8)
    difference = float((model(noise[:, :5], [cache]) - model(noise, [cache])[:, :5]).abs().max())
    if all(layer.is_causal for layer in model.config.layers):
        assert difference < 1e-12
    else:
        assert difference > 1e-3


@pytest.mark.parametrize("is_causal", [True, False])
def test_window_edge(is_causal: bool) -> None:
    model = make_model(make_config([LayerConfig(is_causal=is_causal, window=5)], is_v2=False))
    taps, noise = make_taps(13), make_noise(1, 3)
    base = model(noise, [filled(model, taps, [13])])[0]
    for position in range(13):
        moved = taps.clone()
        moved[position] += 1.0
        change = (model(noise, [filled(model, moved, [13])])[0] - base).abs().amax(-1)
        for row in range(3):
            assert (float(change[row]) > 1e-6) == (13 + row - position < 5), (position, row)


def test_the_cache_keeps_one_latent_per_position_and_layer() -> None:
    model = make_model(make_config(LAYOUTS["sliding both ways and full"]))
    cache = filled(model, make_taps(600), [6] * 100)
    keys, values = cache.layer(1)
    assert keys.shape == (1, 600, LATENT + ROPE) and values.shape == (1, 600, LATENT)
    assert values.data_ptr() == keys.data_ptr()
    slot = (LATENT + ROPE) * 8
    assert 604 * slot <= cache.num_bytes <= (64 + 2 * 606) * slot
    published = zlab.config_from_dict(K3_SIX_LAYERS).attention
    assert published.num_cached == 576


# ---- positions and scale ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("factor", [32.0, 64.0])
def test_yarn_tables_equal_those_of_transformers(factor: float) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    configs = pytest.importorskip("transformers.models.deepseek_v3.configuration_deepseek_v3")
    rope = {**K3_SIX_LAYERS["rope_parameters"], "factor": factor}
    theirs = configs.DeepseekV3Config(
        qk_rope_head_dim=64, head_dim=64, max_position_embeddings=1048576, rope_parameters=rope
    )
    want, want_factor = utils.ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    mine = zlab.config_from_dict({**K3_SIX_LAYERS, "rope_parameters": rope}).rope
    got, got_factor = rope_frequencies(mine, 64, torch.float32)
    torch.testing.assert_close(got, want, atol=0, rtol=1e-6)
    assert got_factor == want_factor == 1.0
    kept = torch.isclose(got, 1.0 / mine.theta ** (torch.arange(0, 64, 2) / 64), rtol=1e-6)
    if factor == 32.0:
        assert kept.tolist() == [j <= 15 for j in range(32)]
        stretched = torch.isclose(got * factor, 1.0 / mine.theta ** (torch.arange(0, 64, 2) / 64), rtol=1e-6)
        assert stretched.tolist() == [j >= 26 for j in range(32)]


def test_softmax_scale() -> None:
    published = zlab.config_from_dict(K3_SIX_LAYERS)
    assert math.isclose(published.softmax_scale, 0.130861, rel_tol=1e-5)
    attention = published.attention
    assert attention.softmax_scale(RopeConfig(theta=5e4)) == 192**-0.5
    numbers = {**published.rope.numbers, "factor": 64.0}
    stretched = RopeConfig(theta=5e4, kind="yarn", params=tuple(numbers.items()))
    assert math.isclose(attention.softmax_scale(stretched) * 192**0.5, 2.00474, rel_tol=1e-5)
    without = {name: number for name, number in numbers.items() if not name.startswith("mscale")}
    assert attention.softmax_scale(RopeConfig(theta=5e4, kind="yarn", params=tuple(without.items()))) == 192**-0.5
    grouped = GqaConfig(num_heads=4, num_kv_heads=2, head_dim=64, has_bias=False)
    assert grouped.softmax_scale(stretched) == 64**-0.5


@pytest.mark.parametrize("rope", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_attention_equals_that_of_deepseek_v3_in_transformers(rope: RopeConfig, q_lora_rank: int | None) -> None:
    """Their attention over [context, block] as one sequence, only the rows of the block looked at."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = make_config(LAYOUTS["full"], rope=rope, q_lora_rank=q_lora_rank, is_v2=False)
    shape = config.attention
    assert isinstance(shape, MlaConfig)
    theirs = modeling.DeepseekV3Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=shape.kv_lora_rank,
        qk_nope_head_dim=shape.qk_nope_head_dim,
        qk_rope_head_dim=shape.qk_rope_head_dim,
        v_head_dim=shape.v_head_dim,
        max_position_embeddings=256,
        rope_parameters={"rope_type": rope.kind, "rope_theta": rope.theta, **rope.numbers},
        attention_bias=False,
    )
    theirs._attn_implementation = "sdpa"
    twin = modeling.DeepseekV3Attention(theirs, 0).eval()
    twin.is_causal = False
    attention = make_model(config, dtype=torch.float32).layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    twin.load_state_dict(attention.state_dict(), strict=True)
    context, block = torch.randn(7, WIDTH), torch.randn(5, WIDTH)
    rows = torch.cat((context, block))[None]
    tables = modeling.DeepseekV3RotaryEmbedding(config=theirs)(rows, torch.arange(12)[None])
    want, _ = twin(hidden_states=rows, position_embeddings=tables, attention_mask=torch.zeros(1, 1, 12, 12))

    rotation = Rotary(config.rope, ROPE).at(torch.arange(12), dtype=torch.float32)
    queries = attention.query(rows[0], rotation, absorbed=True)[7:]
    keys, values = attention.key_value(rows[0], rotation, absorbed=True)
    weights = (torch.einsum("lha,sa->hls", queries, keys[:, 0]) * config.softmax_scale).softmax(-1)
    got = attention.output(torch.einsum("hls,sr->lhr", weights, values[:, 0]), absorbed=True)
    torch.testing.assert_close(got, want[0, 7:], atol=2e-5, rtol=2e-5)


# ---- sizes -----------------------------------------------------------------------------------------------------------
def on_meta(config: DraftConfig, **own: bool) -> tuple[int, int]:
    with torch.device("meta"):
        model = DraftModel(config, **own)
    return sum(parameter.numel() for parameter in model.parameters()), len(model.state_dict())


@pytest.mark.parametrize(
    ("raw", "has_embedding", "num_parameters", "num_tensors"),
    [
        (K31, False, 2_784_811_008, 86),
        (K3_FIVE_LAYERS, True, 3_692_877_824, 87),
        (K3_SIX_LAYERS, True, 4_179_425_280, 103),
        (K3_SIX_LAYERS, False, 3_005_020_160, 102),
    ],
)
def test_published_sizes(raw: dict[str, Any], has_embedding: bool, num_parameters: int, num_tensors: int) -> None:
    config = zlab.config_from_dict(raw)
    assert on_meta(config, has_embedding=has_embedding) == (num_parameters, num_tensors)


def test_names_and_shapes_of_the_model_are_those_of_the_checkpoint() -> None:
    for options in VARIANTS.values():
        config = make_config(LAYOUTS["default mix"], **options)
        with torch.device("meta"):
            state = DraftModel(config).state_dict()
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == zlab.expected_tensors(config)


# ---- precision and refusals ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_precisions_and_packed_weights(dtype: torch.dtype, limit: float) -> None:
    model = make_model(make_config(LAYOUTS["default mix"]))
    taps, noise = make_taps(9), make_noise(1, 8)
    want = model(noise, [filled(model, taps, [9])])

    def error() -> float:
        got = model(noise.to(dtype), [filled(model, taps, [4, 5])])
        assert got.dtype == dtype
        return float((got.double() - want).norm() / want.norm())

    model.to(dtype)
    assert error() < limit
    model.pack_()
    assert error() < limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_attention_heads is 0"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"qk_nope_head_dim": True}, "qk_nope_head_dim is True"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5: rotary positions need an even number"),
        ({"v_head_dim": -1}, "v_head_dim is -1"),
        ({"has_bias": 1}, "attention_bias is 1"),
    ],
)
def test_sizes_that_are_none(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4}
    with pytest.raises(ConfigError, match=message):
        MlaConfig(**{"num_heads": 2, "v_head_dim": 4, "has_bias": False, **sizes, **changes})


def test_the_visibility_rule_is_the_one_of_every_draft() -> None:
    """A block-causal window: causal inside the block, and a window over block and context alike."""
    layer = zlab.config_from_dict(K31).layers[0]
    assert (layer.is_causal, layer.window) == (True, 1024)
    seen = visible(torch.arange(2000, 2008), torch.arange(2008), layer)
    for row in range(8):
        assert seen[row].nonzero()[:, 0].tolist() == list(range(2000 + row - 1023, 2000 + row + 1))
