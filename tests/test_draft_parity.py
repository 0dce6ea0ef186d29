"""The draft model against two others: the upstream wheel and transformers' own assistant.

Both are oracles only. Random small checkpoints in float32, several rounds, contexts longer than the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockdraft.config import (
    ConvConfig,
    DraftConfig,
    GqaConfig,
    LayerConfig,
    RopeConfig,
    SelectorConfig,
)
from blockdraft.draft import DraftModel

WIDTH, VOCAB, TAPS, BLOCK, MASK = 48, 160, (1, 3, 4), 6, 159
LIMIT = 1e-5
DEFAULT_ROPE = RopeConfig(theta=1e4)


@dataclass(frozen=True)
class Layout:
    """One draft: layer kinds (f full, s sliding), causality (None = by kind), parts, extras."""

    kinds: str
    causal: bool | None = None
    is_v2: bool = True
    window: int = 7
    heads: tuple[int, int, int] = (6, 2, 8)
    bias: bool = False
    softcap: float | None = None
    multiplier: float = 1.0
    rope: RopeConfig = DEFAULT_ROPE
    conv: tuple[int, int] = (2, 16)

    def config(self) -> DraftConfig:
        layers = tuple(
            LayerConfig(
                is_causal=(kind == "s") if self.causal is None else self.causal,
                window=self.window if kind == "s" else None,
            )
            for kind in self.kinds
        )
        num_heads, num_kv_heads, head_dim = self.heads
        return DraftConfig(
            hidden_size=WIDTH,
            intermediate_size=80,
            vocab_size=VOCAB,
            rms_norm_eps=1e-6,
            max_position_embeddings=512,
            attention=GqaConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, has_bias=self.bias),
            layers=layers,
            rope=self.rope,
            block_size=BLOCK,
            mask_token_id=MASK,
            target_layer_ids=TAPS,
            num_target_layers=8,
            target_hidden_size=WIDTH,
            conv=ConvConfig(kernel_size=self.conv[0], group_size=self.conv[1]) if self.is_v2 else None,
            selector=SelectorConfig(rank=12, top_k=5) if self.is_v2 else None,
            output_multiplier=self.multiplier,
            final_logit_softcapping=self.softcap,
        )


YARN = RopeConfig(
    theta=5e4,
    kind="yarn",
    params=(("factor", 8.0), ("original_max_position_embeddings", 64.0), ("beta_fast", 16.0)),
)
YARN_MSCALE = replace(YARN, params=(*YARN.params, ("mscale", 0.7), ("mscale_all_dim", 1.3)))
LLAMA3 = RopeConfig(
    theta=1e4,
    kind="llama3",
    params=(
        ("factor", 8.0),
        ("low_freq_factor", 1.0),
        ("high_freq_factor", 4.0),
        ("original_max_position_embeddings", 64.0),
    ),
)
LINEAR = RopeConfig(theta=1e4, kind="linear", params=(("factor", 4.0),))

LAYOUTS = {
    "v1 full": Layout("ff", is_v2=False),
    "v1 default mix": Layout("ssf", is_v2=False),
    "v1 sliding causal": Layout("ss", causal=True, is_v2=False),
    "v1 mix bidirectional, bias, softcap": Layout("sf", False, False, bias=True, softcap=2.0, multiplier=0.7),
    "v2 full": Layout("fff"),
    "v2 sliding default": Layout("sss"),
    "v2 default mix": Layout("ssf"),
    "v2 sliding bidirectional": Layout("ss", causal=False),
    "v2 all causal": Layout("sf", causal=True),
    "v2 mix bidirectional": Layout("sfs", causal=False),
    "v2 bias": Layout("sf", bias=True),
    "v2 softcap and multiplier": Layout("sf", softcap=1.5, multiplier=1.7),
    "v2 heads wider than the draft": Layout("sf", heads=(4, 4, 16)),
    "v2 one kv head": Layout("fs", heads=(4, 1, 10)),
    "v2 three taps": Layout("sf", conv=(3, 8)),
    "v2 yarn": Layout("fs", rope=YARN),
    "v2 yarn with mscale": Layout("f", rope=YARN_MSCALE),
    "v1 llama3 rope": Layout("sf", is_v2=False, rope=LLAMA3),
    "v1 linear rope": Layout("f", is_v2=False, rope=LINEAR),
    "v2 window 2": Layout("ss", window=2),
}


def random_model(config: DraftConfig, seed: int) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        is_gain = name.endswith("norm.weight")
        # Kernels far from 1 multiply through the layers until float32 itself is off by more than LIMIT.
        std = 0.2 if is_gain else 0.06 if "kernel_projection" in name else 0.17
        parameter.normal_(1.0 if is_gain else 0.0, std)
        if name.endswith("base_kernel"):
            parameter[:, 0] += 1.0
    return model


def hf_config(layout: Layout, config: DraftConfig) -> Any:
    """The same draft as the config object that the wheel takes."""
    transformers = pytest.importorskip("transformers")
    draft: dict[str, Any] = {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": list(TAPS),
        "output_multiplier": config.output_multiplier,
    }
    if config.final_logit_softcapping is not None:
        draft["final_logit_softcapping"] = config.final_logit_softcapping
    if config.conv is not None and config.selector is not None:
        draft |= {"conv_kernel_size": config.conv.kernel_size, "conv_group_size": config.conv.group_size}
        draft |= {"selector_rank": config.selector.rank, "selector_top_k": config.selector.top_k}
    names = {"f": "full_attention", "s": "sliding_attention"}
    rope = {name: int(n) if name.startswith("original") else n for name, n in layout.rope.numbers.items()}
    result = transformers.Qwen3Config(
        hidden_size=WIDTH,
        intermediate_size=config.intermediate_size,
        vocab_size=VOCAB,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.attention.num_heads,
        num_key_value_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        attention_bias=config.attention.has_bias,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        use_sliding_window="s" in layout.kinds,
        sliding_window=layout.window if "s" in layout.kinds else None,
        layer_types=[names[kind] for kind in layout.kinds],
        rope_parameters={"rope_theta": layout.rope.theta, "rope_type": layout.rope.kind, **rope},
    )
    result.dflash_config = draft
    result.num_target_layers = config.num_target_layers
    result.is_causal = layout.causal
    result._attn_implementation = "sdpa"
    return result


def wheel_twin(wheel: ModuleType, layout: Layout, model: DraftModel) -> Any:
    cls = wheel.DFlash2DraftModel if layout.is_v2 else wheel.DFlashDraftModel
    twin = cls(hf_config(layout, model.config)).eval()
    state = model.state_dict()
    for name in list(state):
        if name.endswith("_codebook"):
            state[f"{name}.weight"] = state.pop(name)
    twin.load_state_dict(state, strict=True)
    return twin


@pytest.fixture(scope="module")
def wheel() -> ModuleType:
    pytest.importorskip("dflash", reason="the upstream wheel is a development dependency: dflash==0.1.0")
    module: ModuleType = pytest.importorskip("dflash.model")
    return module


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_equals_the_wheel(wheel: ModuleType, name: str) -> None:
    layout = LAYOUTS[name]
    model = random_model(layout.config(), seed=len(name))
    twin = wheel_twin(wheel, layout, model)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight.normal_(0, 0.3)
    cache, theirs = model.new_cache(), wheel._make_cache(twin.config)
    start = 0
    # A long prompt, then rounds that commit 1..BLOCK positions; the last block is cut short.
    for num_new, length in ((11, BLOCK), (1, BLOCK), (4, BLOCK), (BLOCK, BLOCK), (2, 3), (3, 2)):
        taps = torch.randn(num_new, len(TAPS), WIDTH)
        noise = torch.randn(1, length, WIDTH)
        positions = torch.arange(start, start + num_new + length)[None]
        want = twin(
            target_hidden=taps.flatten(1)[None],
            noise_embedding=noise,
            position_ids=positions,
            past_key_values=theirs,
            use_cache=True,
        )
        start += num_new
        wheel._crop_to(theirs, start)
        model.inject(taps, cache)
        assert cache.num_positions == start
        got = model(noise, [cache])
        torch.testing.assert_close(got, want, atol=LIMIT, rtol=LIMIT)

        anchor = int(torch.randint(VOCAB, ()))
        proposal = model.propose(got[0], anchor, head(got[0, 1:]), 0.0, None)
        if layout.is_v2:
            ids, *_ = twin.propose(want[:, 1:], torch.tensor([anchor]), head, 0.0)
        else:
            ids = twin.compute_logits(want[:, 1:], head).argmax(-1)
        assert proposal.q is None
        assert proposal.ids_G.tolist() == ids[0].tolist()


@pytest.mark.parametrize("name", ["v2 default mix", "v2 softcap and multiplier"])
@torch.no_grad()
def test_sampled_law_equals_the_wheel(wheel: ModuleType, name: str) -> None:
    layout = LAYOUTS[name]
    model = random_model(layout.config(), seed=5)
    twin = wheel_twin(wheel, layout, model)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight.normal_(0, 0.3)
    hidden = torch.randn(BLOCK, WIDTH)
    proposal = model.propose(hidden, 7, head(hidden[1:]), 0.8, torch.Generator().manual_seed(1))
    assert proposal.q is not None
    logits = twin.compute_logits(hidden[None, 1:], head)
    selector = twin.candidate_selector
    previous = torch.tensor([7, *proposal.ids_G[:-1].tolist()])
    for g in range(BLOCK - 1):
        ids = proposal.q.ids_GM[g]
        assert set(ids.tolist()) == set(logits[0, g].topk(5).indices.tolist())
        edges = selector.successor_codebook(ids) @ (
            selector.predecessor_codebook(previous[g]) * selector.hidden_projection(hidden[1 + g])
        )
        want = ((logits[0, g, ids] + edges) / 0.8).softmax(-1)
        torch.testing.assert_close(proposal.q.probs_GM[g], want, atol=1e-6, rtol=1e-4)


def assistant_twin(layout: Layout, model: DraftModel) -> Any:
    """transformers' own DFlash assistant with the same weights: v1, bidirectional, two other names.

    Its window is the distance at which a key is still seen; ours counts positions seen backwards, with the
    row itself, as the wheel does. The same number in its config means one position more.
    """
    name = "transformers.models.muse_glimmer_assistant"
    modeling = pytest.importorskip(f"{name}.modeling_muse_glimmer_assistant")
    configuration = pytest.importorskip(f"{name}.configuration_muse_glimmer_assistant")
    config = model.config
    kinds = {"f": "full_attention", "s": "sliding_attention"}
    theirs = configuration.MuseGlimmerAssistantConfig(
        hidden_size=WIDTH,
        intermediate_size=config.intermediate_size,
        vocab_size=VOCAB,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.attention.num_heads,
        num_key_value_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act="silu",
        max_position_embeddings=config.max_position_embeddings,
        sliding_window=layout.window - 1,
        layer_types=[kinds[kind] for kind in layout.kinds],
        rope_parameters={"rope_theta": layout.rope.theta, "rope_type": "default"},
        target_layer_ids=list(TAPS),
        block_size=BLOCK,
        mask_token_id=MASK,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    theirs._attn_implementation = "sdpa"
    twin = modeling.MuseGlimmerAssistantModel(theirs).eval()
    state = model.state_dict()
    state["encoder.fc.weight"] = state.pop("fc.weight")
    state["encoder.output_norm_enc.weight"] = state.pop("hidden_norm.weight")
    twin.load_state_dict(state, strict=True)
    return twin


@pytest.mark.parametrize("kinds", ["ff", "s", "sf"])
@torch.no_grad()
def test_equals_the_assistant_of_transformers(kinds: str) -> None:
    layout = Layout(kinds, causal=False, is_v2=False)
    model = random_model(layout.config(), seed=3)
    twin = assistant_twin(layout, model)
    theirs = pytest.importorskip("transformers.cache_utils").DFlashCache(config=twin.config)
    theirs.activate_past_recording()
    cache = model.new_cache()
    for num_new in (13, 1, 4, BLOCK, 2):
        taps, noise = torch.randn(num_new, len(TAPS), WIDTH), torch.randn(1, BLOCK, WIDTH)
        positions = torch.arange(cache.num_positions, cache.num_positions + num_new + BLOCK)[None]
        theirs.set_previous_accepted_tokens(num_new)
        want = twin(
            noise_embeds=noise,
            context_hidden_states=taps.flatten(1)[None],
            position_ids=positions,
            cache=theirs,
        ).last_hidden_state
        theirs.crop(-BLOCK)
        model.inject(taps, cache)
        got: Tensor = model(noise, [cache])
        torch.testing.assert_close(got, want, atol=LIMIT, rtol=LIMIT)
