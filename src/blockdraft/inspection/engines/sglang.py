"""SGLang: what it does with a draft. Text and proposals only differ where a rule says so."""

from __future__ import annotations

from blockdraft.inspection.engines.rules import EngineRules, Rule

SGLANG = EngineRules(
    name="SGLang",
    read="0.5.23; dflash_utils.py, dflash_worker_v2.py, models/dflash.py",
    how="--speculative-algorithm DFLASH; takes the width, {width}, from the file",
    how_dspark="--speculative-algorithm DSPARK, {proposals} proposals",
    rules=(
        Rule(
            name="dspine",
            level="refused",
            when=lambda draft: draft.family == "dspine",
            text="no class for adjacent injection was found",
            source="sglang models/; only the trainer's own code (SpecForge) runs one",
        ),
        Rule(
            name="dialect",
            level="refused",
            when=lambda draft: draft.dialect not in ("z-lab", "deepspec", "k3-dspark", "transformers"),
            text="it does not read {dialect} files: `blockdraft convert` to z-lab first",
            source="sglang dflash_utils.py; speculators PR 1006",
        ),
        Rule(
            name="native",
            level="unknown",
            when=lambda draft: draft.dialect == "transformers",
            text="0.5.23 has a class for Muse Glimmer's assistant; how it reads the keys of this file was not read",
            source="sglang 0.5.23 models/dflash.py (MuseGlimmerAssistantModel, names under encoder.)",
        ),
        Rule(
            name="mla_dflash2",
            level="refused",
            when=lambda draft: draft.is_mla and draft.is_v2,
            text="0.5.23 has no DFlash 2 on latent attention; use the publisher's branch",
            source="SGLang 0.5.23 as released; the K3 draft change (sglang PR 35784) loads a GQA draft",
        ),
        Rule(
            name="mla_dflash",
            level="unknown",
            when=lambda draft: draft.is_mla and draft.family == "dflash",
            text="its loading of drafts on latent attention was not found",
            source="sglang models/dflash.py; SpecForge PR 758 trains them",
        ),
        Rule(
            name="tap_stream",
            level="lower_acceptance",
            when=lambda draft: draft.is_kimi_k3 and draft.config.tap_stream == "prefix",
            text="on Kimi K3 it taps the attention-residual mixture, the file means the prefix stream",
            source="sglang PR 35784 (DFLASH capture is an alias of the DSPARK capture)",
        ),
        Rule(
            name="tap_stream_not_declared",
            level="unknown",
            when=lambda draft: draft.is_kimi_k3 and draft.config.tap_stream is None,
            text="on Kimi K3 it taps the attention-residual mixture, the file does not say which stream it means",
            source="sglang PR 35784 (DFLASH capture is an alias of the DSPARK capture)",
        ),
        Rule(
            name="embedding_scale",
            level="lower_acceptance",
            when=lambda draft: draft.config.input_embedding_scale != 1.0,
            text="input_embedding_scale is never applied",
            source="sglang models/dflash.py; TorchSpec's export for it asserts 1.0",
        ),
        Rule(
            name="nested_only",
            level="lower_acceptance",
            when=lambda draft: draft.only_top(
                "output_multiplier",
                "final_logit_softcapping",
                "conv_kernel_size",
                "conv_group_size",
                "selector_rank",
                "selector_top_k",
            ),
            text="convolution, selector, output_multiplier and soft cap are read in dflash_config only",
            source="sglang dflash_utils.py",
        ),
        Rule(
            name="causality_place",
            level="lower_acceptance",
            when=lambda draft: draft.only_nested("is_causal", "causal"),
            text="is_causal is read at top level only; without it sliding layers become causal, full ones not",
            source="sglang dflash_utils.py",
        ),
        Rule(
            name="causality_default",
            level="note",
            when=lambda draft: draft.has_windows and draft.raw.get("is_causal") is None,
            text="builds before PR 34524 took sliding layers another way; compare acceptance only after it",
            source="sglang PR 34524",
        ),
        Rule(
            name="last_layer",
            level="note",
            when=lambda draft: draft.config.target_layer_ids[-1] == draft.config.num_target_layers - 1,
            text="a tap on the last layer is an index error in some builds, and before or after the norm in others",
            source="sglang issues 32204, 39776",
        ),
        Rule(
            name="v1_sampling",
            level="note",
            when=lambda draft: draft.family == "dflash",
            text="at T > 0 proposals are the most likely ids, checked against the target alone: exact",
            source="sglang dflash_worker_v2.py",
        ),
        Rule(
            name="quantised_head",
            level="note",
            when=lambda draft: draft.is_v2,
            text="the selector reads raw head weights: a quantised target head fails at the first request",
            source="sglang issues 35496, 35534",
        ),
        Rule(
            name="own_tensors",
            level="unknown",
            when=lambda draft: bool(draft.own),
            text="whether it uses an embedding, head or mask vector of the file's own was not read",
            source="sglang models/dflash.py",
        ),
        Rule(
            name="recurrent_target",
            level="note",
            when=lambda draft: draft.is_recurrent,
            text="a target with recurrent state needs --mamba-radix-cache-strategy extra_buffer",
            source="sglang 0.5.23 mamba_hook.py; z-lab/dflash README by an older name, --mamba-scheduler-strategy",
        ),
    ),
)
