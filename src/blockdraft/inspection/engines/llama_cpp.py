"""llama.cpp: what its converter and its server do with a draft."""

from __future__ import annotations

from blockdraft.inspection.engines.rules import EngineRules, Facts, Rule


def _has_lost_numbers(draft: Facts) -> bool:
    """A number that changes proposals; without a selector the scale of logits does not."""
    config = draft.config
    is_scaled = config.output_multiplier != 1.0 or config.final_logit_softcapping is not None
    return config.input_embedding_scale != 1.0 or (draft.is_v2 and is_scaled)


LLAMA_CPP = EngineRules(
    name="llama.cpp",
    read="build 11434; GGUF architecture dflash",
    how="convert to GGUF; --spec-type draft-dflash --spec-draft-n-max {proposals}",
    how_dspark="convert to GGUF (PRs 25173, 26275)",
    rules=(
        Rule(
            name="dspine",
            level="refused",
            when=lambda draft: draft.family == "dspine",
            text="no class for adjacent injection was found",
            source="llama.cpp; only the trainer's own code (SpecForge) runs one",
        ),
        Rule(
            name="dialect",
            level="refused",
            when=lambda draft: draft.dialect not in ("z-lab", "deepspec"),
            text="it does not read {dialect} files: `blockdraft convert` to z-lab first",
            source="llama.cpp convert_hf_to_gguf.py",
        ),
        Rule(
            name="dspark",
            level="unknown",
            when=lambda draft: draft.family == "dspark",
            text="DSpark has changes of its own there (PRs 25173, 26275), which were not read",
            source="llama.cpp PRs 25173, 26275",
        ),
        Rule(
            name="mla",
            level="refused",
            when=lambda draft: draft.is_mla,
            text="its dflash architecture has keys for grouped-query attention only",
            source="llama.cpp PRs 22105, 27342: the keys of the architecture",
        ),
        Rule(
            name="theta_place",
            level="note",
            when=lambda draft: bool(draft.raw) and draft.raw.get("rope_theta") is None,
            text="the converter wants rope_theta at top level of both configs: copy it there first",
            source="build 11434, measured",
        ),
        Rule(
            name="lost_numbers",
            level="lower_acceptance",
            when=_has_lost_numbers,
            text="GGUF has no key for input_embedding_scale, output_multiplier or a draft's soft cap",
            source="llama.cpp PR 27342: the keys of the architecture",
        ),
        Rule(
            name="rope",
            level="unknown",
            when=lambda draft: draft.config.rope.kind != "default",
            text="{rope} rope: only the base of the rope is known to be converted",
            source="llama.cpp PR 22105: the keys of the architecture",
        ),
        Rule(
            name="tap_norms",
            level="lower_acceptance",
            when=lambda draft: draft.config.has_tap_norms,
            text="a norm per tap is loaded by some forks and applied by none",
            source="ROCmFPX issue 44",
        ),
        Rule(
            name="own_tensors",
            level="unknown",
            when=lambda draft: bool(draft.own),
            text="an embedding, head or mask vector of the file's own: no tensor name is known for them",
            source="llama.cpp PR 22105: the tensors of the architecture",
        ),
        Rule(
            name="sampling",
            level="note",
            when=lambda draft: True,
            text="greedy proposals at every temperature: exact, lower acceptance at T > 0",
            source="llama.cpp PR 27342",
        ),
        Rule(
            name="acceptance",
            level="note",
            when=lambda draft: draft.is_v2 and not draft.is_mla,
            text="one report of 3 tokens a step where vLLM gives 5.5 with the same file, not explained",
            source="z-lab/dflash issue 170",
        ),
    ),
)
