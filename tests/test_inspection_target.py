"""What inspect and load know alike of a pair: undeclared streams, text parts that a file leaves to a class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import kimi_k3_kit
from blockdraft.engine.tap_stream import settle_stream
from blockdraft.errors import PairError
from blockdraft.formats import zlab
from blockdraft.formats.known_streams import KNOWN_STREAMS
from blockdraft.inspection import inspect_checkpoint, read_target_facts, render_text
from blockdraft.inspection.pair import CLASS_DEFAULTS
from blockdraft.targets.stored import find_target
from drafts import KIMI_V1


@pytest.fixture
def target(tmp_path: Path) -> Path:
    raw = {**kimi_k3_kit.published(), "eos_token_id": 163586}
    path = tmp_path / "target" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("name", [*sorted(KNOWN_STREAMS), "nobody/draft"])
def test_inspect_and_load_agree_on_a_stream_that_no_file_declares(tmp_path: Path, target: Path, name: str) -> None:
    draft = tmp_path / "config.json"
    draft.write_text(json.dumps(KIMI_V1))
    report = inspect_checkpoint(draft, target, name=name)
    [rule] = [rule for rule in report["pair"]["rules"] if rule["name"] == "tap_stream"]
    known = KNOWN_STREAMS.get(name)
    assert report["shape"]["tap_stream"] is None and not report["conventions"]["is_tap_stream_declared"]
    text = " ".join(render_text(report, columns=400).split())
    config = zlab.read_config(draft)
    if known is None or known.is_inferred:
        assert rule["verdict"] == "unknown" and "stream not declared" in text
        assert known is None or f"likely {known.stream}" in text
        with pytest.raises(PairError, match="name it with tap_stream"):
            settle_stream(config, read_target_facts(target), name, asked=None)
    else:
        assert rule["verdict"] == "pass" and f"stream {known.stream}, not declared but known" in text
        assert report["conventions"]["known_tap_stream"]["stream"] == known.stream
        assert settle_stream(config, read_target_facts(target), name, asked=None) == known.stream


@pytest.mark.parametrize("model_type", sorted(CLASS_DEFAULTS))
def test_what_a_text_part_leaves_out_is_what_its_class_fills_in(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    assert {name: getattr(config, name) for name in CLASS_DEFAULTS[model_type]} == dict(CLASS_DEFAULTS[model_type])


@pytest.mark.parametrize(
    "raw",
    [
        # As published: google/gemma-3-4b-it and llava-hf/llava-1.5-7b-hf, the parts that count.
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34},
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
            "vision_config": {"model_type": "clip_vision_model"},
        },
    ],
    ids=["gemma3", "llava"],
)
def test_models_with_vision_have_the_same_facts_in_both(tmp_path: Path, raw: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read, loaded = read_target_facts(tmp_path), find_target(tmp_path).facts
    assert set(read.eos_token_ids) == set(loaded.eos_token_ids)
    for name in ("model_type", "vocab_size", "hidden_size", "num_layers", "max_length", "is_recurrent", "pad_token_id"):
        assert getattr(read, name) == getattr(loaded, name)
