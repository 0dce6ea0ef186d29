"""TokenSpeed: what it does with a draft."""

from __future__ import annotations

from blockdraft.inspection.engines.rules import EngineRules, Rule

TOKENSPEED = EngineRules(
    name="TokenSpeed",
    read="models/dflash2.py at 0e92f2ae, drafter/dflash2.py at 259c6ea",
    how="--speculative-num-steps {proposals} --speculative-num-draft-tokens {width}",
    how_dspark="--speculative-num-draft-tokens {width}, or {proposals}",
    rules=(
        Rule(
            name="dspine",
            level="refused",
            when=lambda draft: draft.family == "dspine",
            text="no class for adjacent injection was found",
            source="tokenspeed models/; only the trainer's own code (SpecForge) runs one",
        ),
        Rule(
            name="dialect",
            level="refused",
            when=lambda draft: draft.dialect not in ("z-lab", "torchspec", "k3-dspark"),
            text="it does not read {dialect} files: `blockdraft convert` to z-lab first",
            source="tokenspeed drafter/dflash.py",
        ),
        Rule(
            name="confidence",
            level="note",
            when=lambda draft: draft.config.confidence is not None,
            text="the confidence head is not loaded: every proposal is checked",
            source="tokenspeed models, the K3 DSpark loader",
        ),
        Rule(
            name="startup",
            level="note",
            when=lambda draft: draft.is_mla and draft.is_v2,
            text="builds without the change of PR 1423 die in draft warm-up",
            source="tokenspeed PR 1423",
        ),
        Rule(
            name="full_context",
            level="note",
            when=lambda draft: draft.is_mla and draft.has_windows,
            text="sliding layers compute the whole context; published acceptance was measured so",
            source="lightseekorg/kimi-k3-dflash2 card",
        ),
        Rule(
            name="causality",
            level="lower_acceptance",
            when=lambda draft: draft.is_causal,
            text="builds of August 22 know only bidirectional blocks; later ones read it from the file",
            source="tokenspeed models/dflash2.py, two states",
        ),
        Rule(
            name="sampling",
            level="note",
            when=lambda draft: draft.is_v2,
            text="the selector walks greedily at every temperature: lower acceptance at T > 0",
            source="tokenspeed drafter/dflash2.py",
        ),
        Rule(
            name="nested_only",
            level="lower_acceptance",
            when=lambda draft: draft.only_top("output_multiplier", "final_logit_softcapping"),
            text="output_multiplier and the soft cap are read in dflash_config only",
            source="tokenspeed models/dflash2.py",
        ),
        Rule(
            name="places",
            level="refused",
            when=lambda draft: draft.only_top("target_layer_ids"),
            text="target_layer_ids must stand in dflash_config",
            source="tokenspeed drafter/dflash.py",
        ),
        Rule(
            name="embedding_scale",
            level="lower_acceptance",
            when=lambda draft: draft.config.input_embedding_scale != 1.0,
            text="input_embedding_scale is taken as 1",
            source="tokenspeed models/dflash2.py",
        ),
        Rule(
            name="own_embedding",
            level="note",
            when=lambda draft: "embed_tokens.weight" in draft.own,
            text="the file's own embedding is used only where the target's cannot be reached",
            source="tokenspeed models/dflash2.py",
        ),
        Rule(
            name="own_head",
            level="unknown",
            when=lambda draft: bool({"lm_head.weight", "mask_embedding"} & set(draft.own)),
            text="whether it uses a head or mask vector of the file's own was not read",
            source="tokenspeed models/dflash2.py",
        ),
        Rule(
            name="parallel_streams",
            level="unknown",
            when=lambda draft: draft.config.tap_stream == "mean",
            text="the file means the mean of the target's parallel streams; that it taps that was not read",
            source="tokenspeed drafter",
        ),
        Rule(
            name="tap_stream",
            level="note",
            when=lambda draft: draft.config.tap_stream == "attn_res",
            text="it takes the stream from the file, and refuses where the target cannot hand it out",
            source="tokenspeed drafter, its AttnRes test",
        ),
    ),
)
