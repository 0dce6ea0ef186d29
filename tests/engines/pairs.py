"""Published pairs as they would be launched: drafts from the table of published ones, targets by their public sizes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published import PUBLISHED

from blockdraft.engines import Launch, Wish, prepare

DRAFTS = {entry.name: entry for entry in PUBLISHED if entry.config is not None}
FP8 = {"quantization_config": {"quant_method": "fp8"}}


@dataclass(frozen=True)
class Pair:
    """`draft` is a key of the published ones; `hub_id` the draft's own, where that differs."""

    draft: str
    target: str
    model_type: str
    words: dict[str, Any] = field(default_factory=dict)
    target_extra: dict[str, Any] = field(default_factory=dict)
    hub_id: str | None = None

    @property
    def draft_id(self) -> str:
        return self.hub_id or self.draft

    def draft_raw(self) -> dict[str, Any]:
        config = DRAFTS[self.draft].config
        assert config is not None
        return dict(config)

    def target_raw(self) -> dict[str, Any]:
        config = DRAFTS[self.draft].read()
        return {
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.target_hidden_size,
            "num_hidden_layers": config.num_target_layers,
            "max_position_embeddings": config.max_position_embeddings,
            "eos_token_id": 0,
            **self.target_extra,
        }


PAIRS: dict[str, Pair] = {
    "qwen3.8-27b-dflash2": Pair(
        "z-lab/Qwen3.8-27B-DFlash2", "Qwen/Qwen3.8-27B", "qwen3_5", {"gpus": "2xH100", "context": 65536}
    ),
    "muse-glimmer-30b-dflash2": Pair(
        "z-lab/Muse-Glimmer-30B-DFlash2", "meta-models/Muse-Glimmer-30B", "muse_glimmer", {"gpus": "2xH100"}
    ),
    "glm-5.3-flash-dflash2": Pair(
        "z-lab/GLM-5.3-Flash-DFlash2", "zai-org/GLM-5.3-Flash", "glm5_next", {"gpus": "4xH200"}
    ),
    "kimi-k3-dflash2": Pair(
        "lightseekorg/kimi-k3-dflash2, 5 layers",
        "moonshotai/Kimi-K3",
        "kimi_k3",
        {"gpus": "8xB300", "context": 65536, "concurrency": 16},
        FP8,
        hub_id="lightseekorg/kimi-k3-dflash2",
    ),
    "kimi-k3.1-dflash2-preview": Pair(
        "RadixArk/Kimi-K3.1-Dflash2-Preview",
        "moonshotai/Kimi-K3.1-Pro",
        "kimi_k3",
        {"gpus": "8xB300", "tap_stream": "attn_res"},
        FP8,
    ),
    "qwen3.6-27b-dflash": Pair("z-lab/Qwen3.6-27B-DFlash", "Qwen/Qwen3.6-27B", "qwen3_5", {"gpus": "1xH200"}),
    "qwen3-8b-dflash": Pair("z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", "qwen3"),
    "gemma-4-31b-dflash": Pair("z-lab/Gemma-4-31B-DFlash", "google/gemma-4-31B-it", "gemma4", {"gpus": "2xH100"}),
    "gpt-oss-20b-dflash": Pair("z-lab/gpt-oss-20b-DFlash", "openai/gpt-oss-20b", "gpt_oss", {"gpus": "1xH100"}, FP8),
    "kimi-k2.5-dflash": Pair(
        "z-lab/Kimi-K2.5-DFlash",
        "moonshotai/Kimi-K2.5",
        "kimi_k25",
        {"gpus": "8xH200", "context": 131072, "concurrency": 32},
        {"auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}},
    ),
    "kimi-k3-dflash": Pair("modal-labs/Kimi-K3-DFlash", "moonshotai/Kimi-K3", "kimi_k3", {"gpus": "8xB300"}, FP8),
    "dspark-qwen3-8b": Pair("deepseek-ai/dspark_qwen3_8b_block7", "Qwen/Qwen3-8B", "qwen3"),
}


def write_pair(pair: Pair, folder: Path) -> dict[str, Path]:
    """Both config.json under `folder`: hub id -> folder."""
    places = {pair.draft_id: folder / "draft", pair.target: folder / "target"}
    for place, raw in zip(places.values(), (pair.draft_raw(), pair.target_raw()), strict=True):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(raw))
    return places


def serve_hub(monkeypatch: pytest.MonkeyPatch, places: dict[str, Path]) -> None:
    """Hub ids answer with these folders, everything else as ever."""
    monkeypatch.setattr("blockdraft.engines.assemble.locate", lambda name, **_: places.get(str(name), Path(name)))


def prepared(engine: str, pair: Pair, **changes: Any) -> Launch:
    words = {"engine": engine, "draft": pair.draft_id, "target": pair.target, "engine_version": READ.get(engine)}
    return prepare(Wish(**{**words, **pair.words, **changes}), is_started=False)


READ = {"sglang": "0.5.23", "vllm": "0.32.0", "tokenspeed": "0.1.0"}
