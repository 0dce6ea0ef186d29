"""What `inspect` says of engines: outcomes for published drafts, and every rule against a draft that it concerns."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from blockdraft.config import DraftConfig, LayerConfig, TargetFacts
from blockdraft.errors import ConfigError
from blockdraft.formats import gguf, zlab
from blockdraft.inspection import inspect_checkpoint, render_text
from blockdraft.inspection.engines import ENGINES, LEVELS, Facts, examine_engines
from drafts import (
    K3_FIVE_LAYERS,
    K3_SIX_LAYERS,
    K31,
    KIMI_V1,
    QWEN_V1,
    QWEN_V2,
    TINY_MLA,
    TINY_V1,
    TINY_V2,
    draft_configs,
    edited,
)
from tiny_pair import run_cli

TARGET = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "max_position_embeddings": 999}
OWN = ("embed_tokens.weight", "lm_head.weight", "mask_embedding")
SCALED = {"nest_input_embedding_scale": 2.0, "nest_output_multiplier": 0.5, "nest_final_logit_softcapping": 9.0}
SWA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPARK = {
    "architectures": ["DSparkDraftModel"],
    "nest_projector_type": "dspark",
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
SPINE = {
    "architectures": ["DSpineDraftModel"],
    "is_causal": True,
    "dspine_config": {"transfer_rank": 8, "message_size": 4, "top_k": 4},
}


def facts(raw: dict[str, Any], *, dialect: str = "z-lab", own: tuple[str, ...] = (), target: str = "") -> Facts:
    described = TargetFacts.from_config({**TARGET, "model_type": target}) if target else None
    return Facts(config=zlab.config_from_dict(raw), dialect=dialect, raw=raw, own=own, target=described)


def top_only(raw: dict[str, Any]) -> dict[str, Any]:
    """Every field of the draft at top level."""
    return {**{key: value for key, value in raw.items() if key != "dflash_config"}, **raw["dflash_config"]}


def of_windows(*windows: int) -> Facts:
    """A draft beyond what one z-lab file can say."""
    config = zlab.config_from_dict(TINY_V1)
    layers = tuple(LayerConfig(is_causal=True, window=window) for window in windows)
    return Facts(config=dataclasses.replace(config, layers=layers))


DRAFTS = [
    facts(QWEN_V2),
    facts(QWEN_V1),
    facts(KIMI_V1),
    facts(K31),
    facts(edited(K31, nest_aux_hidden_stream="prefix")),
    facts(K3_SIX_LAYERS),
    facts(K3_FIVE_LAYERS, own=OWN[:1]),
    facts(TINY_V1, own=OWN, target="llama"),
    facts(edited(TINY_V2, **SCALED), target="qwen3_next"),
    facts(edited(TINY_V2, nest_is_causal=True, attention_bias=True, nest_target_layer_ids=[1, 5])),
    facts(top_only(edited(TINY_V2, output_multiplier=0.5))),
    facts(edited(TINY_MLA, fc_norm=True, nest_aux_hidden_stream="attn_res")),
    facts(edited(TINY_MLA, nest_aux_hidden_stream="mean")),
    facts(edited(TINY_V2, fc_norm=True), dialect="speculators"),
    facts(edited(KIMI_V1, num_target_layers=93)),
    facts(edited(TINY_MLA, architectures=["DFlashDraftModel"], **dict.fromkeys(
        ("nest_conv_kernel_size", "nest_conv_group_size", "nest_selector_rank", "nest_selector_top_k"), ...
    ))),
    facts(edited(TINY_V1, **SPARK)),
    facts(edited(TINY_V1, **SPINE)),
    facts(TINY_V1, dialect="gguf"),
    facts(TINY_V1, dialect="torchspec"),
    facts(TINY_V1, dialect="transformers"),
    facts(edited(TINY_V1, **SWA, is_causal=False), dialect="transformers"),
    facts(edited(TINY_V1, target_hidden_size=24)),
    facts(edited(TINY_V2, nest_selector_top_k=6)),
    facts(edited(TINY_V1, **{**SWA, "sliding_window": 3}, is_causal=False)),
    facts(edited(TINY_V1, rope_parameters={**YARN, "beta_fast": 16.0})),
    facts(edited(TINY_V1, rope_parameters=LLAMA3)),
    facts(edited(TINY_V1, **{**SPARK, "nest_output_multiplier": 0.5, "confidence_head_with_markov": False})),
    facts(edited(TINY_V1, **{**SPARK, "markov_head_type": "gated"})),
    of_windows(2, 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "rule"), [(engine, rule) for engine in ENGINES for rule in engine.rules], ids=lambda part: part.name
)
def test_every_rule_concerns_some_drafts_and_not_all(engine: Any, rule: Any) -> None:
    spoken = [rule.when(draft) for draft in DRAFTS]
    assert any(spoken), f"{engine.name}: no draft of the test makes {rule.name} speak"
    assert not all(spoken) or rule.name == "sampling"
    concerned = DRAFTS[spoken.index(True)]
    found = next(found for found in engine.examine(concerned)["rules"] if found["name"] == rule.name)
    assert found["level"] in LEVELS and found["source"] and "{" not in found["text"]


def test_names_of_rules_are_unique_in_an_engine() -> None:
    for engine in ENGINES:
        names = [rule.name for rule in engine.rules]
        assert len(names) == len(set(names))


def outcomes(raw: dict[str, Any], **options: Any) -> dict[str, str]:
    return {found["engine"]: found["outcome"] for found in examine_engines(facts(raw, **options))}


def test_outcomes_of_published_drafts() -> None:
    assert outcomes(QWEN_V2) == {
        "SGLang": "runs_with_notes",
        "vLLM": "runs_with_notes",
        "TokenSpeed": "runs_with_notes",
        "llama.cpp": "runs_with_notes",
        "mistral.rs": "runs_with_notes",
    }
    assert outcomes(K31) == {
        "SGLang": "refused",
        "vLLM": "refused",
        "TokenSpeed": "lower_acceptance",
        "llama.cpp": "refused",
        "mistral.rs": "refused",
    }
    assert outcomes(K3_SIX_LAYERS)["TokenSpeed"] == "runs_with_notes"
    assert outcomes(KIMI_V1)["mistral.rs"] == "lower_acceptance"


def outcome_in_llama_cpp(draft: Facts) -> str:
    found = next(found for found in examine_engines(draft) if found["engine"] == "llama.cpp")
    return str(found["outcome"])


def is_written(config: DraftConfig) -> bool:
    try:
        gguf.config_to_dict(config)
    except ConfigError:
        return False
    return True


@given(draft_configs())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_rules_of_llama_cpp_agree_with_what_gguf_refuses(config: DraftConfig) -> None:
    runs = outcome_in_llama_cpp(Facts(config=config)) in ("runs", "runs_with_notes")
    assert is_written(config) == runs


def test_rules_of_llama_cpp_agree_on_named_drafts() -> None:
    plain = [draft for draft in DRAFTS if draft.family in ("dflash", "dflash2") and not draft.own]
    plain = [draft for draft in plain if draft.dialect in ("z-lab", "gguf")]
    runs = [outcome_in_llama_cpp(draft) in ("runs", "runs_with_notes") for draft in plain]
    # A Kimi K3 as the target is the one thing that no config of a draft says.
    written = [is_written(draft.config) and not draft.is_kimi_k3 for draft in plain]
    assert written == runs and True in runs and False in runs


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        (SPARK, "runs_with_notes"),
        ({**SPARK, "markov_head_type": "gated"}, "refused"),
        ({**SPARK, "confidence_head_with_markov": False}, "refused"),
        ({**SPARK, "is_causal": True}, "runs_with_notes"),
        ({**SPARK, "nest_is_causal": True}, "lower_acceptance"),  # not where its converter looks
        ({**SPARK, "nest_output_multiplier": 0.5}, "lower_acceptance"),
        ({"nest_is_causal": True}, "runs_with_notes"),  # written by `blockdraft convert`
        ({"rope_parameters": LLAMA3}, "runs_with_notes"),
        (SWA, "lower_acceptance"),
    ],
)
def test_outcomes_in_llama_cpp(changes: dict[str, Any], outcome: str) -> None:
    assert outcome_in_llama_cpp(facts(edited(TINY_V1, **changes))) == outcome


def test_own_tensors_in_llama_cpp() -> None:
    spark = edited(TINY_V1, **SPARK)
    for raw, own, outcome in (
        (TINY_V1, OWN[:2], "runs_with_notes"),
        (TINY_V1, OWN[:1], "lower_acceptance"),
        (TINY_V1, OWN, "runs_with_notes"),
        (spark, OWN[:2], "lower_acceptance"),
    ):
        assert outcome_in_llama_cpp(facts(raw, own=own)) == outcome


def test_flags_are_those_of_the_file() -> None:
    how = {found["engine"]: found["how"] for found in examine_engines(facts(QWEN_V2))}
    assert how["vLLM"] == '--speculative-config \'{"method": "dflash", "num_speculative_tokens": 7}\''
    assert how["TokenSpeed"] == "--speculative-num-steps 7 --speculative-num-draft-tokens 8"
    assert how["SGLang"] == "--speculative-algorithm DFLASH; takes the width, 8, from the file"
    how = {found["engine"]: found["how"] for found in examine_engines(facts(K3_SIX_LAYERS))}
    assert how["TokenSpeed"] == "--speculative-num-steps 7 --speculative-num-draft-tokens 8"
    assert how["vLLM"] is None


# ---- the report ------------------------------------------------------------------------------------------------------
def keys(value: Any, prefix: str = "") -> set[str]:
    """Every path to a value of a report, lists as `[]`; the numbers of a rope belong to its type."""
    if isinstance(value, dict):
        found: set[str] = set()
        for key, entry in value.items():
            if prefix != "rope." or key in ("theta", "rope_type"):
                found |= keys(entry, f"{prefix}{key}.")
        return found
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return set().union(*(keys(entry, f"{prefix.removesuffix('.')}[].") for entry in value))
    return {prefix.removesuffix(".")}


@pytest.mark.parametrize("changes", [{}, SPARK, SPINE], ids=["dflash", "dspark", "dspine"])
def test_the_schema_is_documented(tmp_path: Path, changes: dict[str, Any]) -> None:
    document = (Path(__file__).resolve().parents[1] / "docs" / "inspect.md").read_text()
    (tmp_path / "config.json").write_text(json.dumps(edited(TINY_V1, **changes)))
    (tmp_path / "target.json").write_text(json.dumps({**TARGET, "model_type": "llama"}))
    report = inspect_checkpoint(tmp_path / "config.json", tmp_path / "target.json")
    missing = sorted(key for key in keys(report) if f"`{key}`" not in document and f"`{key}[]." not in document)
    assert not missing
    assert report["schema"] == 1 and f"`schema` is {report['schema']}" in document


@pytest.mark.parametrize("raw", [QWEN_V2, K31, K3_SIX_LAYERS], ids=["qwen3.8", "k3.1", "k3"])
def test_the_text_is_one_screen(tmp_path: Path, raw: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    report = inspect_checkpoint(tmp_path / "config.json", name="owner/name")
    lines = render_text(report).splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 100
    coloured = render_text(report, has_colours=True)
    assert "\x1b[" in coloured and "\x1b[" not in "\n".join(lines)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == render_text(report)


def test_of_a_hub_id_only_the_configs_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(K31))
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    report = json.loads(run_cli("inspect", "owner/name", "--json").out)
    assert asked == [("owner/name", ["config.json", "generation_config.json"])]
    assert report["draft"] == "owner/name" and report["weights"] is None
    assert report["parameters"]["total"] == 2_784_811_008
