"""mistral.rs: what it does with a draft."""

from __future__ import annotations

from blockdraft.inspection.engines.rules import EngineRules, Facts, Rule


def _theta_is_missed(draft: Facts) -> bool:
    """It looks for the base in rope_parameters and takes 1e7 where there is none."""
    params = draft.raw.get("rope_parameters") or {}
    return bool(draft.raw) and params.get("rope_theta") is None and draft.config.rope.theta != 1e7


MISTRAL_RS = EngineRules(
    name="mistral.rs",
    read="speculative/dflash.rs at 9e92262",
    how="takes the width, {width}, from the file",
    how_dspark="",
    rules=(
        Rule(
            name="dspine",
            level="refused",
            when=lambda draft: draft.family == "dspine",
            text="no class for adjacent injection was found",
            source="mistral.rs speculative/; only the trainer's own code (SpecForge) runs one",
        ),
        Rule(
            name="dialect",
            level="refused",
            when=lambda draft: draft.dialect not in ("z-lab",),
            text="it does not read {dialect} files: `blockdraft convert` to z-lab first",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="dspark",
            level="refused",
            when=lambda draft: draft.family == "dspark",
            text="no Markov head",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="mla",
            level="refused",
            when=lambda draft: draft.is_mla,
            text="no latent attention in drafts",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="bias",
            level="refused",
            when=lambda draft: draft.config.attention.has_bias,
            text="no biases in attention",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="rope",
            level="lower_acceptance",
            when=lambda draft: draft.config.rope.kind != "default",
            text="rope scaling ({rope}) is ignored",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="theta_place",
            level="lower_acceptance",
            when=_theta_is_missed,
            text="rope_theta is read in rope_parameters only: it would take 1e7, not {theta}",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="nested_only",
            level="lower_acceptance",
            when=lambda draft: draft.only_top(
                "target_layer_ids",
                "conv_kernel_size",
                "conv_group_size",
                "selector_rank",
                "selector_top_k",
                "input_embedding_scale",
            ),
            text="taps, convolution, selector and embedding scale are read in dflash_config only, taps then guessed",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="causality_place",
            level="lower_acceptance",
            when=lambda draft: draft.only_nested("is_causal", "causal"),
            text="is_causal is read at top level only; without it sliding layers become causal, full ones not",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="parallel_streams",
            level="unknown",
            when=lambda draft: draft.config.tap_stream == "mean",
            text="the file means the mean of the target's parallel streams; that it taps that was not read",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="soft_cap",
            level="lower_acceptance",
            when=lambda draft: draft.is_v2 and draft.config.final_logit_softcapping is not None,
            text="the soft cap of {cap:g} is not applied, so the selector weighs candidates otherwise",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="sampling",
            level="note",
            when=lambda draft: True,
            text="greedy proposals at every temperature: exact, lower acceptance at T > 0",
            source="mistral.rs speculative/dflash.rs",
        ),
        Rule(
            name="own_tensors",
            level="unknown",
            when=lambda draft: bool(draft.own),
            text="whether it uses an embedding, head or mask vector of the file's own was not read",
            source="mistral.rs speculative/dflash.rs",
        ),
    ),
)
