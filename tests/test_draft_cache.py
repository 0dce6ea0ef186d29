"""The append-only context: equal to a recomputation from scratch, in pieces, alone or among other rows.

The recomputation is written here from the formulas alone, in float64, without any cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from blockdraft.config import ConvConfig, DraftConfig, GqaConfig, LayerConfig, RopeConfig, SelectorConfig
from blockdraft.draft import DraftCache, DraftModel
from blockdraft.draft.attention import visible
from blockdraft.errors import CheckpointError

WIDTH, TAPS, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 4, 2, 6
EXACT = 1e-12

FULL, SLIDING, FULL_CAUSAL, SLIDING_BOTH = (
    LayerConfig(is_causal=False, window=None),
    LayerConfig(is_causal=True, window=5),
    LayerConfig(is_causal=True, window=None),
    LayerConfig(is_causal=False, window=5),
)
LAYOUTS: dict[str, tuple[LayerConfig, ...]] = {
    "full": (FULL, FULL),
    "causal": (FULL_CAUSAL, SLIDING),
    "sliding": (SLIDING, SLIDING),
    "sliding both ways": (SLIDING_BOTH, SLIDING_BOTH),
    "default mix": (SLIDING, FULL),
    "two windows": (SLIDING, LayerConfig(is_causal=False, window=9)),
    "window 1": (LayerConfig(is_causal=True, window=1), SLIDING),
    "only window 1": (LayerConfig(is_causal=False, window=1),),
}


def make_config(layers: Sequence[LayerConfig], *, is_v2: bool = True) -> DraftConfig:
    return DraftConfig(
        hidden_size=WIDTH,
        intermediate_size=40,
        vocab_size=50,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        attention=GqaConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, has_bias=True),
        layers=tuple(layers),
        rope=RopeConfig(theta=1e4),
        block_size=8,
        mask_token_id=49,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        target_hidden_size=WIDTH,
        conv=ConvConfig(kernel_size=2, group_size=8) if is_v2 else None,
        selector=SelectorConfig(rank=4, top_k=3) if is_v2 else None,
    )


def make_model(
    layers: Sequence[LayerConfig], *, is_v2: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(make_config(layers, is_v2=is_v2)).to(dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.25)
    return model


def make_taps(count: int) -> Tensor:
    return torch.randn(count, TAPS, WIDTH, dtype=torch.float64)


def make_noise(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, WIDTH, dtype=torch.float64)


def filled(model: DraftModel, taps: Tensor, pieces: Sequence[int]) -> DraftCache:
    cache = model.new_cache()
    for piece in torch.split(taps, list(pieces)):
        model.inject(piece, cache)
    return cache


def from_scratch(model: DraftModel, taps: Tensor, noise_LD: Tensor) -> Tensor:
    """One block over its whole context: no cache, a loop over rows, heads and keys."""
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config
    eps, start, length = config.rms_norm_eps, taps.shape[0], noise_LD.shape[0]

    def norm(x: Tensor, name: str) -> Tensor:
        scaled: Tensor = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * state[name]
        return scaled

    def linear(x: Tensor, name: str) -> Tensor:
        result: Tensor = x @ state[f"{name}.weight"].T
        total: Tensor = result + state.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))
        return total

    def turn(head: Tensor, position: int) -> Tensor:
        half = HEAD_DIM // 2
        out = head.clone()
        for j in range(half):
            angle = position * config.rope.theta ** (-2 * j / HEAD_DIM)
            a, b = head[j], head[j + half]
            out[j] = a * math.cos(angle) - b * math.sin(angle)
            out[j + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def conv(x: Tensor, u: Tensor, side: int, name: str) -> Tensor:
        if config.conv is None:
            return x
        dynamic = linear(u, f"{name}.kernel_projection")
        groups = WIDTH // config.conv.group_size
        kernels = dynamic.view(length, 2, config.conv.kernel_size, groups)
        out = torch.zeros_like(x)
        for t in range(length):
            for tap in range(min(config.conv.kernel_size, t + 1)):
                part = kernels[t, side, tap].repeat_interleave(config.conv.group_size)
                out[t] += (state[f"{name}.base_kernel"][side, tap] + part) * x[t - tap]
        return out

    context = norm(linear(taps.flatten(1), "fc"), "hidden_norm.weight")
    x = noise_LD
    for index, rule in enumerate(config.layers):
        at = f"layers.{index}"
        u = norm(x, f"{at}.input_layernorm.weight")
        block = conv(u, u, 0, f"{at}.attention_conv")
        source = torch.cat((context, block))
        keys = linear(source, f"{at}.self_attn.k_proj").view(start + length, KV_HEADS, HEAD_DIM)
        values = linear(source, f"{at}.self_attn.v_proj").view(start + length, KV_HEADS, HEAD_DIM)
        queries = linear(block, f"{at}.self_attn.q_proj").view(length, HEADS, HEAD_DIM)
        keys, queries = (
            norm(keys, f"{at}.self_attn.k_norm.weight"),
            norm(queries, f"{at}.self_attn.q_norm.weight"),
        )
        mixed = torch.zeros(length, HEADS, HEAD_DIM, dtype=torch.float64)
        for row in range(length):
            q_at = start + row
            seen = [
                k_at
                for k_at in range(start + length)
                if not (rule.is_causal and k_at > q_at) and (rule.window is None or abs(q_at - k_at) < rule.window)
            ]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                query = turn(queries[row, head], q_at)
                scores = torch.stack([query @ turn(keys[k_at, kv], k_at) for k_at in seen]) / HEAD_DIM**0.5
                mixed[row, head] = scores.softmax(0) @ values[seen, kv]
        x = x + conv(linear(mixed.flatten(1), f"{at}.self_attn.o_proj"), u, 1, f"{at}.attention_conv")
        u = norm(x, f"{at}.post_attention_layernorm.weight")
        a = conv(u, u, 0, f"{at}.mlp_conv")
        gate = linear(a, f"{at}.mlp.gate_proj")
        y = linear(gate * gate.sigmoid() * linear(a, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
        x = x + conv(y, u, 1, f"{at}.mlp_conv")
    return norm(x, "norm.weight")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_v2", [True, False])
def test_equals_recomputation_from_scratch(name: str, is_v2: bool) -> None:
    model = make_model(LAYOUTS[name], is_v2=is_v2)
    taps = make_taps(14)
    cache = model.new_cache()
    for num_new, length in ((1, 3), (3, 5), (8, 8), (2, 1)):
        model.inject(taps[cache.num_positions : cache.num_positions + num_new], cache)
        noise = make_noise(1, length)
        want = from_scratch(model, taps[: cache.num_positions], noise[0])
        torch.testing.assert_close(model(noise, [cache])[0], want, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("name", LAYOUTS)
def test_empty_context(name: str) -> None:
    model = make_model(LAYOUTS[name])
    noise = make_noise(1, 4)
    cache = model.new_cache()
    model.inject(make_taps(0), cache)
    assert cache.num_positions == 0
    want = from_scratch(model, make_taps(0), noise[0])
    torch.testing.assert_close(model(noise, [cache])[0], want, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("pieces", [(6, 4, 3), (1,) * 13, (12, 1), (0, 13, 0)])
def test_injection_in_pieces(name: str, pieces: tuple[int, ...]) -> None:
    model = make_model(LAYOUTS[name])
    taps, noise = make_taps(13), make_noise(1, 8)
    whole, parts = filled(model, taps, [13]), filled(model, taps, pieces)
    assert whole.num_positions == parts.num_positions == 13
    torch.testing.assert_close(model(noise, [parts]), model(noise, [whole]), atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("name", LAYOUTS)
def test_long_run_of_small_steps(name: str) -> None:
    """Compaction and growth many times over: still the last W - 1 positions, in order."""
    model = make_model(LAYOUTS[name])
    taps, noise = make_taps(400), make_noise(1, 8)
    small, whole = model.new_cache(), filled(model, taps, [400])
    generator = torch.Generator().manual_seed(4)
    while small.num_positions < 400:
        count = int(torch.randint(1, 9, (), generator=generator))
        model.inject(taps[small.num_positions : small.num_positions + count], small)
    for index, rule in enumerate(model.config.layers):
        keys, values = small.layer(index)
        assert keys.shape == values.shape == (KV_HEADS, 400 if rule.window is None else rule.window - 1, HEAD_DIM)
        for mine, theirs in zip(small.layer(index), whole.layer(index), strict=True):
            torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)
    torch.testing.assert_close(model(noise, [small]), model(noise, [whole]), atol=EXACT, rtol=EXACT)


def test_memory_is_bounded_by_the_window() -> None:
    sliding, full = make_model(LAYOUTS["sliding"]), make_model(LAYOUTS["full"])
    caches = [filled(model, make_taps(600), [6] * 100) for model in (sliding, full)]
    slot = 2 * 2 * KV_HEADS * HEAD_DIM * 8  # layers, keys and values, heads, width, float64
    assert caches[0].num_bytes <= 64 * slot
    assert 600 * slot <= caches[1].num_bytes <= 2 * 606 * slot
    assert sliding.new_cache().num_bytes == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_forward_leaves_the_caches_alone(name: str) -> None:
    model = make_model(LAYOUTS[name])
    cache = filled(model, make_taps(9), [9])

    def everything() -> list[Tensor]:
        return [store.buffer_NKSA.clone() for store in cache._stores]

    before, noise = everything(), make_noise(1, 8)
    first = model(noise, [cache])
    assert all(torch.equal(a.view(torch.int64), b.view(torch.int64)) for a, b in zip(before, everything(), strict=True))
    assert cache.num_positions == 9
    assert torch.equal(model(noise, [cache]), first)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_unequal_length_equal_each_alone(name: str) -> None:
    model = make_model(LAYOUTS[name])
    caches = [filled(model, make_taps(count), [count]) for count in (1, 12, 0, 5)]
    noise = make_noise(4, 6)
    together = model(noise, caches)
    for row, cache in enumerate(caches):
        alone = model(noise[row : row + 1], [cache])
        torch.testing.assert_close(together[row : row + 1], alone, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("is_causal", [True, False])
def test_window_edge(is_causal: bool) -> None:
    """The key exactly W back is invisible, the one W - 1 back is visible (13 positions committed, W = 5)."""
    model = make_model([LayerConfig(is_causal=is_causal, window=5)], is_v2=False)
    taps, noise = make_taps(13), make_noise(1, 3)
    base = model(noise, [filled(model, taps, [13])])[0]
    for position in range(13):
        moved = taps.clone()
        moved[position] += 1.0
        change = (model(noise, [filled(model, moved, [13])])[0] - base).abs().amax(-1)
        for row in range(3):
            is_seen = 13 + row - position < 5
            assert (float(change[row]) > 1e-6) == is_seen, (position, row)
            assert is_seen or float(change[row]) == 0.0


def test_visibility_rule_against_a_loop() -> None:
    queries, keys = torch.arange(20, 28), torch.arange(0, 28)
    for is_causal in (True, False):
        for window in (None, 1, 2, 7, 100):
            rule = LayerConfig(is_causal=is_causal, window=window)
            got = visible(queries, keys, rule)
            for i, q in enumerate(queries.tolist()):
                for j, k in enumerate(keys.tolist()):
                    want = (not is_causal or k <= q) and (window is None or abs(q - k) < window)
                    assert bool(got[i, j]) == want


@pytest.mark.parametrize("name", LAYOUTS)
def test_width_5_is_a_prefix_of_width_8_iff_causal(name: str) -> None:
    model = make_model(LAYOUTS[name])
    cache = filled(model, make_taps(11), [11])
    noise = make_noise(1, 8)
    difference = float((model(noise[:, :5], [cache]) - model(noise, [cache])[:, :5]).abs().max())
    # In a window of 1 a row sees itself only, whatever the flag says.
    if all(layer.is_causal or layer.window == 1 for layer in model.config.layers):
        assert difference < EXACT
    else:
        assert difference > 1e-3


@pytest.mark.parametrize("name", ["default mix", "full", "causal"])
def test_training_closure_equals_serving(name: str) -> None:
    """``block_forward`` with the caller's own attention gives what ``forward`` gives, and has gradients."""
    model = make_model(LAYOUTS[name])
    starts, length = (3, 7, 10), 6
    taps, noise = make_taps(10), make_noise(3, 6)
    served = model(noise, [filled(model, taps[:start], [start]) for start in starts])

    model.requires_grad_(True)
    context = model.fuse(taps)
    positions = torch.arange(10)
    block_positions = torch.tensor(starts)[:, None] + torch.arange(length)
    pairs = [model.context_kv(i, context, positions) for i in range(model.config.num_layers)]

    def attention(index: int, q_BLHA: Tensor, k_BLKA: Tensor, v_BLKA: Tensor) -> Tensor:
        k_CKA, v_CKA = pairs[index]
        rows = []
        for b, start in enumerate(starts):
            keys = torch.cat((k_CKA[:start], k_BLKA[b])).repeat_interleave(HEADS // KV_HEADS, dim=1)
            values = torch.cat((v_CKA[:start], v_BLKA[b])).repeat_interleave(HEADS // KV_HEADS, dim=1)
            scores = torch.einsum("lha,sha->hls", q_BLHA[b], keys) / HEAD_DIM**0.5
            key_positions = torch.cat((positions[:start], block_positions[b]))
            seen = visible(block_positions[b], key_positions, model.config.layers[index])
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            rows.append(torch.einsum("hls,sha->lha", weights, values))
        return torch.stack(rows)

    trained = model.block_forward(noise, block_positions, attention)
    torch.testing.assert_close(trained, served, atol=EXACT, rtol=EXACT)
    torch.autograd.backward((trained * torch.randn_like(trained)).sum())
    for parameter_name, parameter in model.named_parameters():
        if not parameter_name.startswith("candidate_selector"):
            assert parameter.grad is not None and float(parameter.grad.abs().max()) > 0, parameter_name


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_precisions_and_packed_weights(dtype: torch.dtype, limit: float) -> None:
    """Off by rounding only, measured over the whole block: single elements of bfloat16 rows cancel."""
    model = make_model(LAYOUTS["default mix"])
    taps, noise = make_taps(9), make_noise(1, 8)
    want = model(noise, [filled(model, taps, [9])])

    def error(got: Tensor) -> float:
        assert got.dtype == dtype
        return float((got.double() - want).norm() / want.norm())

    model.to(dtype)
    assert error(model(noise.to(dtype), [filled(model, taps, [4, 5])])) < limit
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.pack_() == 0:
        pytest.skip("this torch build has no oneDNN")
    assert error(model(noise.to(dtype), [filled(model, taps, [4, 5])])) < limit
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_positions_beyond_the_stated_length_still_compute() -> None:
    model = make_model(LAYOUTS["full"])
    assert model.max_length == 128
    cache = filled(model, make_taps(700), [700])
    assert cache.num_positions == 700
    assert bool(torch.isfinite(model(make_noise(1, 8), [cache])).all())


def test_from_checkpoint_accounts_for_every_tensor() -> None:
    source = make_model(LAYOUTS["default mix"], dtype=torch.float32)
    tensors = source.state_dict()
    extras = {
        "embed_tokens.weight": torch.randn(50, WIDTH),
        "lm_head.weight": torch.randn(50, WIDTH),
        "mask_embedding": torch.randn(WIDTH),
    }
    checkpoint = SimpleNamespace(config=source.config, tensors={**tensors, **extras})
    model = DraftModel.from_checkpoint(checkpoint, torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not any(p.requires_grad for p in model.parameters())
    assert model.state_dict().keys() == checkpoint.tensors.keys()
    assert model.own_embedding is not None and model.own_head is not None and model.mask_embedding is not None
    kept = DraftModel.from_checkpoint(checkpoint)
    assert all(torch.equal(kept.state_dict()[name], tensor) for name, tensor in checkpoint.tensors.items())

    def load(**changes: Tensor | None) -> None:
        changed = {**tensors, **changes}
        wanted = {name: tensor for name, tensor in changed.items() if tensor is not None}
        DraftModel.from_checkpoint(SimpleNamespace(config=source.config, tensors=wanted))

    with pytest.raises(CheckpointError, match=r"missing: fc\.weight"):
        load(**{"fc.weight": None})
    with pytest.raises(CheckpointError, match="left over: stray"):
        load(stray=torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"norm\.weight \(3,\) instead of \(32,\)"):
        load(**{"norm.weight": torch.zeros(3)})


def test_noise_rows() -> None:
    base = make_config(LAYOUTS["full"])
    config = DraftConfig(
        **{name: getattr(base, name) for name in base.__slots__ if name != "input_embedding_scale"},
        input_embedding_scale=0.5,
    )
    table = torch.randn(50, WIDTH)

    def embed(ids: Tensor) -> Tensor:
        return table[ids]

    plain = DraftModel(config)
    noise = plain.noise([7, 12], 4, embed)
    assert noise.shape == (2, 4, WIDTH)
    for row, anchor in enumerate((7, 12)):
        assert torch.equal(noise[row, 0], table[anchor] * 0.5)
        assert torch.equal(noise[row, 1:], (table[49] * 0.5).expand(3, -1))
    assert torch.equal(plain.noise([3], 1, embed)[0], table[[3]] * 0.5)

    own = DraftModel(config, has_embedding=True, has_mask_embedding=True)
    assert own.own_embedding is not None and own.mask_embedding is not None
    noise = own.noise(torch.tensor([7]), 3, embed)
    assert torch.equal(noise[0, 0], own.own_embedding[7] * 0.5)
    assert torch.equal(noise[0, 2], own.mask_embedding * 0.5)


def test_wrong_tap_shape_is_named() -> None:
    model = make_model(LAYOUTS["full"])
    with pytest.raises(ValueError, match=r"the last two axes must be \(2, 32\)"):
        model.inject(torch.randn(4, 3, WIDTH, dtype=torch.float64), model.new_cache())
