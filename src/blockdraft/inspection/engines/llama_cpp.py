"""llama.cpp: what its converter, its loader and its server do with a draft.

Rules say what is lost in the best way there: `blockdraft convert --to gguf`, or its own converter for DSpark, which
the former does not write. Where only its own converter loses something, that is a note.
"""

from __future__ import annotations

from blockdraft.config import GqaConfig
from blockdraft.inspection.engines.rules import EngineRules, Facts, Rule

_GRAPH = "build 11434: src/models/dflash.cpp"
_CONVERTER = "build 11434: conversion/qwen.py"
_SERVER = "build 11434: common/speculative.cpp"
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def _is_readable(draft: Facts) -> bool:
    """Its converter has a class for this file, or the file is GGUF already."""
    if draft.dialect == "speculators":
        return draft.family == "dspark"
    return draft.dialect in ("gguf", "z-lab", "deepspec", "transformers")


def _has_too_wide_lattice(draft: Facts) -> bool:
    selector = draft.config.selector
    return selector is not None and selector.top_k * (selector.top_k + 1) > draft.config.hidden_size


def _is_mixed(draft: Facts) -> bool:
    return len({layer.is_causal for layer in draft.config.layers}) > 1


def _is_silently_causal(draft: Facts) -> bool:
    """Every layer is causal, and the places that its converter reads do not say so."""
    nest = draft.raw.get("dflash_config") or {}
    is_said = draft.dialect == "gguf" or draft.raw.get("is_causal") is not None or nest.get("causal") is not None
    return bool(draft.raw) and draft.is_causal and not _is_mixed(draft) and not is_said


def _windows(draft: Facts) -> set[int]:
    return {layer.window for layer in draft.config.layers if layer.window is not None}


def _sees_past_window(draft: Facts) -> bool:
    return any(
        layer.window is not None and not layer.is_causal and layer.window < draft.config.block_size
        for layer in draft.config.layers
    )


def _has_lost_yarn(draft: Facts) -> bool:
    if draft.config.rope.kind != "yarn":
        return False
    numbers = draft.config.rope.numbers
    has_factors = any(name in numbers for name in ("attention_factor", "mscale", "mscale_all_dim"))
    has_betas = any(numbers[name] != fixed for name, fixed in _BETAS.items())
    return has_factors or has_betas or not numbers["original_max_position_embeddings"].is_integer()


def _has_scaled_markov(draft: Facts) -> bool:
    config = draft.config
    return config.markov is not None and (config.output_multiplier != 1.0 or config.final_logit_softcapping is not None)


def _is_dflash(draft: Facts) -> bool:
    return draft.family in ("dflash", "dflash2")


LLAMA_CPP = EngineRules(
    name="llama.cpp",
    read="build 11434; GGUF architecture dflash",
    how="as GGUF (`blockdraft convert --to gguf`); --spec-type draft-dflash --spec-draft-n-max {proposals}",
    how_dspark="its own converter; --spec-type draft-dspark --spec-draft-n-max {proposals}",
    rules=(
        # What it does not have.
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
            when=lambda draft: not _is_readable(draft),
            text="its converter does not read these {dialect} files: `blockdraft convert` first",
            source="build 11434: conversion/__init__.py",
        ),
        Rule(
            name="mla",
            level="refused",
            when=lambda draft: draft.is_mla,
            text="its dflash architecture has keys for grouped-query attention only",
            source=_GRAPH,
        ),
        Rule(
            name="bias",
            level="refused",
            when=lambda draft: isinstance(draft.config.attention, GqaConfig) and draft.config.attention.has_bias,
            text="no tensors for biases in attention: a file with them is not loaded",
            source=_GRAPH,
        ),
        Rule(
            name="tap_norms",
            level="refused",
            when=lambda draft: draft.config.has_tap_norms,
            text="no tensor for a norm of each tap: a file with them is not converted",
            source="build 11434: gguf-py/gguf/tensor_mapping.py",
        ),
        Rule(
            name="tap_width",
            level="refused",
            when=lambda draft: draft.config.target_hidden_size != draft.config.hidden_size,
            text="fc is taken to be as wide as taps of the draft's own width: taps of another are not loaded",
            source=_GRAPH,
        ),
        Rule(
            name="tap_stream",
            level="refused",
            when=lambda draft: draft.config.tap_stream in ("attn_res", "mean"),
            text="no key for the stream of the taps: it reads the inputs of layers",
            source=_SERVER,
        ),
        Rule(
            name="kimi_k3",
            level="refused",
            when=lambda draft: draft.is_kimi_k3,
            text="its Kimi K3 does not give the inputs of layers: the server stops",
            source="build 11434: src/models/kimi-k3.cpp, src/llama-graph.cpp",
        ),
        Rule(
            name="last_tap",
            level="refused",
            when=lambda draft: draft.config.target_layer_ids[-1] == draft.config.num_target_layers - 1,
            text="a tap is the input of the next layer: for the last one Llama and Qwen targets have none and it stops",
            source="build 11434: src/models/llama.cpp, qwen3.cpp; deepseek4, mimo2 and nemotron-h have one",
        ),
        Rule(
            name="lattice",
            level="refused",
            when=_has_too_wide_lattice,
            text="selector_top_k * (selector_top_k + 1) must not exceed hidden_size: the file is not loaded",
            source=_GRAPH,
        ),
        Rule(
            name="markov",
            level="refused",
            when=lambda draft: draft.config.markov is not None and draft.config.markov.kind != "vanilla",
            text="only vanilla Markov heads are converted",
            source=_CONVERTER,
        ),
        Rule(
            name="confidence",
            level="refused",
            when=lambda draft: (
                draft.config.confidence is not None
                and (draft.config.markov is None or not draft.config.confidence.reads_token)
            ),
            text="a confidence head must stand beside a Markov head and read the token before: else it is not loaded",
            source=_GRAPH,
        ),
        # What it computes differently.
        Rule(
            name="causality",
            level="lower_acceptance",
            when=lambda draft: _is_mixed(draft) or (draft.family == "dspark" and _is_silently_causal(draft)),
            text="one causality for all layers, bidirectional if is_causal is silent: causal layers run bidirectional",
            source=f"{_SERVER}; conversion/qwen.py",
        ),
        Rule(
            name="windows",
            level="lower_acceptance",
            when=lambda draft: len(_windows(draft)) > 1,
            text="one window for all sliding layers",
            source=_GRAPH,
        ),
        Rule(
            name="window_ahead",
            level="lower_acceptance",
            when=_sees_past_window,
            text="a window narrower than a bidirectional block does not end ahead: a row sees all rows after it",
            source="build 11434: src/llama-hparams.h",
        ),
        Rule(
            name="yarn",
            level="lower_acceptance",
            when=_has_lost_yarn,
            text="of YaRN only factor and original length get through: betas are 32 and 1, the magnitude follows",
            source=f"{_GRAPH}, src/llama-context.cpp",
        ),
        Rule(
            name="markov_scale",
            level="lower_acceptance",
            when=_has_scaled_markov,
            text="multiplier and soft cap are not applied before the Markov head adds to the logits",
            source=_GRAPH,
        ),
        Rule(
            name="own_embedding",
            level="lower_acceptance",
            when=lambda draft: (
                "embed_tokens.weight" in draft.own and ("lm_head.weight" not in draft.own or draft.family == "dspark")
            ),
            text="an embedding of the file's own without a head in GGUF (of DSpark it is dropped) is the head too",
            source=f"{_GRAPH}; conversion/qwen.py",
        ),
        Rule(
            name="assistant_window",
            level="lower_acceptance",
            when=lambda draft: draft.dialect == "transformers" and draft.has_windows,
            text="its own converter makes an assistant's windows one position narrower: `blockdraft convert` first",
            source="build 11434: conversion/muse_glimmer.py, src/llama-hparams.h",
        ),
        # What only its own converter loses.
        Rule(
            name="theta_place",
            level="note",
            when=lambda draft: draft.dialect != "gguf" and bool(draft.raw) and draft.raw.get("rope_theta") is None,
            text="its own converter wants rope_theta at top level of both configs: copy it there first",
            source="build 11434, measured",
        ),
        Rule(
            name="causality_place",
            level="note",
            when=lambda draft: _is_dflash(draft) and _is_silently_causal(draft),
            text="its own converter makes a draft bidirectional unless is_causal stands at top level",
            source=_CONVERTER,
        ),
        Rule(
            name="nesting",
            level="note",
            when=lambda draft: _is_dflash(draft) and draft.only_top("mask_token_id", "conv_kernel_size"),
            text="its own converter reads the mask id and the parts of DFlash 2 in dflash_config only",
            source=_CONVERTER,
        ),
        Rule(
            name="llama3",
            level="note",
            when=lambda draft: draft.config.rope.kind == "llama3" and draft.dialect != "gguf",
            text="its own converter drops a llama3 rope: only `blockdraft convert` writes the table rope_freqs",
            source=f"{_CONVERTER}; src/models/dflash.cpp",
        ),
        Rule(
            name="mask_vector",
            level="note",
            when=lambda draft: "mask_embedding" in draft.own,
            text="a mask vector has a place only in an embedding of the draft's own: its own converter writes one",
            source=_CONVERTER,
        ),
        # What it does with every file.
        Rule(
            name="sampling",
            level="note",
            when=lambda draft: True,
            text="greedy proposals at every temperature: exact, lower acceptance at T > 0",
            source=_SERVER,
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
