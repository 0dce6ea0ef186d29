"""The meaning of a config, the facts of a target, the rules of a pair."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from blockdraft.config import (
    PROVEN_RECURRENT_MODEL_TYPES,
    DraftConfig,
    RopeConfig,
    TargetFacts,
    check_pair,
    pairing_rules,
)
from blockdraft.errors import ConfigError, PairError
from blockdraft.formats.zlab import config_from_dict
from drafts import QWEN_V2, TINY_V1, TINY_V2, edited

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def draft(**changes: Any) -> DraftConfig:
    return config_from_dict(edited(TINY_V2, **changes))


def facts(**changes: Any) -> TargetFacts:
    return TargetFacts.from_config({**LLAMA, **changes})


def verdicts(config: DraftConfig, target: TargetFacts, **options: bool) -> dict[str, str]:
    return {rule.name: rule.verdict for rule in pairing_rules(config, target, **options)}


def test_derived_values() -> None:
    config = config_from_dict(QWEN_V2)
    assert (config.family, config.num_layers, config.num_taps, config.max_window) == ("dflash2", 5, 5, 2048)
    assert draft().max_window is None
    assert config_from_dict(TINY_V1).family == "dflash"


def test_config_is_frozen_and_hashable() -> None:
    config = draft()
    assert hash(config) == hash(draft())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 9  # type: ignore[misc]


def test_parts_come_together() -> None:
    with pytest.raises(ConfigError, match="DFlash 2 needs both"):
        dataclasses.replace(draft(), selector=None)


def test_rope_fills_in_what_yarn_fixes() -> None:
    numbers: Any = {"factor": 4, "original_max_position_embeddings": 2048}
    rope = RopeConfig(theta=10000, kind="yarn", params=numbers)
    assert rope.numbers == {**numbers, "beta_fast": 32.0, "beta_slow": 1.0}
    assert hash(rope) == hash(RopeConfig(theta=10000.0, kind="yarn", params=tuple(numbers.items())))


def test_config_imports_no_torch() -> None:
    code = "import sys, blockdraft.config, blockdraft.formats.zlab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "gpt_oss", "gemma2", "gemma3_text"])
def test_attention_targets(model_type: str) -> None:
    target = facts(model_type=model_type, layer_types=["sliding_attention", "full_attention"] * 3)
    assert target == dataclasses.replace(facts(), model_type=model_type)
    assert not target.is_recurrent


def test_ids_of_a_target() -> None:
    target = facts(eos_token_id=[3, 4], pad_token_id=5)
    assert (target.eos_token_ids, target.pad_token_id) == ((3, 4), 5)
    assert facts(eos_token_id=None, pad_token_id=-1).eos_token_ids == ()
    assert facts(pad_token_id=-1).pad_token_id is None


def test_nested_text_config() -> None:
    text = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    outer = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {**text, "model_type": "gemma3_text"},
    }
    target = TargetFacts.from_config(outer)
    assert (target.model_type, target.eos_token_ids, target.hidden_size) == ("gemma3_text", (1, 106), 32)


def test_other_spellings_of_sizes() -> None:
    raw = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 6, "n_positions": 256}
    target = TargetFacts.from_config(raw)
    assert (target.hidden_size, target.num_layers, target.max_length) == (32, 6, 256)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_next"},
        {"model_type": "falcon_h1"},
        {"model_type": "kimi_linear"},
        {"model_type": "novel", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "novel", "layer_types": ["conv", "full_attention"]},
        {"model_type": "novel", "layers_block_type": ["mamba", "attention"]},
        {"model_type": "novel", "layer_types": ["something_new"]},
        {"model_type": "novel", "hybrid_override_pattern": "M-M*"},
        {"model_type": "qwen3_5", "text_config": {**LLAMA, "model_type": "other"}},
    ],
)
def test_recurrent_targets_are_recognised(changes: dict[str, Any]) -> None:
    target = facts(**changes)
    assert target.is_recurrent
    [rule] = [rule for rule in pairing_rules(draft(), target) if rule.name == "recurrent_state"]
    assert rule.detail.startswith(f"{target.model_type} keeps recurrent state")
    assert rule.verdict == ("pass" if target.model_type in PROVEN_RECURRENT_MODEL_TYPES else "unknown")


def test_a_target_whose_state_is_out_of_reach_fits_no_draft() -> None:
    with pytest.raises(PairError, match="recurrent_state: rwkv keeps recurrent state that cannot"):
        check_pair(draft(), facts(model_type="rwkv"))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**LLAMA, "vocab_size": None}, "vocab_size is missing from the config of the target"),
        ({**LLAMA, "hidden_size": "32"}, "the target's hidden_size is '32'"),
        ({**LLAMA, "model_type": None}, "model_type is missing"),
        ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
        ({**LLAMA, "eos_token_id": "x"}, "eos_token_id is 'x'"),
        (TINY_V2, "describes a draft"),
        ([], "must be an object"),
    ],
)
def test_bad_targets(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetFacts.from_config(raw)


def test_a_pair_that_fits() -> None:
    assert set(verdicts(draft(), facts()).values()) == {"pass"}
    check_pair(draft(), facts())


@pytest.mark.parametrize(
    ("changes", "rule", "text"),
    [
        ({"vocab_size": 72}, "vocabulary_rows", "made for 64, the target has 72"),
        ({"vocab_size": 50}, "mask_token_row", "mask id 60 of 50"),
        ({"hidden_size": 64}, "hidden_size", "made for 32, the target has 64"),
        ({"hidden_size": 64}, "draft_width", "embedding and head"),
        ({"num_hidden_layers": 7}, "num_target_layers", "made for 6, the target has 7"),
        ({"num_hidden_layers": 4}, "target_layer_ids", r"taps \[4\] do not exist"),
        ({"eos_token_id": [1, 60]}, "mask_token_role", "end of text"),
        ({"pad_token_id": 60}, "mask_token_role", "padding"),
        ({"model_type": "jamba"}, "recurrent_state", "jamba"),
    ],
)
def test_a_pair_that_does_not_fit(changes: dict[str, Any], rule: str, text: str) -> None:
    target = facts(**changes)
    assert verdicts(draft(), target)[rule] == "fail"
    with pytest.raises(PairError, match=f"{rule}: .*{text}") as caught:
        check_pair(draft(), target)
    assert "\n" not in str(caught.value)


def test_every_failed_rule_is_listed() -> None:
    with pytest.raises(PairError) as caught:
        check_pair(draft(), facts(vocab_size=72, num_hidden_layers=4))
    for rule in ("vocabulary_rows", "num_target_layers", "target_layer_ids"):
        assert rule in str(caught.value)


def test_consent_to_a_mask_that_ends_the_text() -> None:
    target = facts(eos_token_id=60)
    check_pair(draft(), target, allow_mask_is_eos=True)
    assert verdicts(draft(), target, allow_mask_is_eos=True)["mask_token_role"] == "pass"


def test_what_a_config_cannot_tell() -> None:
    assert verdicts(draft(), facts(eos_token_id=None))["mask_token_role"] == "unknown"
    longer = facts(max_position_embeddings=512)
    assert verdicts(draft(), longer)["max_length"] == "unknown"
    check_pair(draft(), longer)


def test_a_head_of_its_own_leaves_the_vocabulary_open_for_v1_only() -> None:
    other = facts(vocab_size=72)
    v1 = config_from_dict(TINY_V1)
    assert verdicts(v1, other)["vocabulary_rows"] == "fail"
    assert verdicts(v1, other, has_own_head=True)["vocabulary_rows"] == "unknown"
    assert verdicts(draft(), other, has_own_head=True)["vocabulary_rows"] == "fail"


def test_a_narrow_draft_needs_its_own_embedding_and_head() -> None:
    narrow = dataclasses.replace(draft(), target_hidden_size=64)
    wide = facts(hidden_size=64)
    assert verdicts(narrow, wide)["draft_width"] == "fail"
    assert verdicts(narrow, wide, has_own_embedding=True, has_own_head=True)["draft_width"] == "pass"
    assert verdicts(narrow, wide)["hidden_size"] == "pass"
