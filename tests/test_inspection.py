"""The report of `inspect`: counts against published ones, costs against the formulas, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockdraft.errors import BlockdraftError, CheckpointError
from blockdraft.formats import zlab
from blockdraft.inspection import cache_bytes, count_parameters, inspect_checkpoint, render_text, step_cost
from drafts import KIMI_V1, QWEN_V1, QWEN_V2, TINY_V2, checkpoint, edited

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def bare(folder: Path, raw: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize(
    ("raw", "num_parameters", "num_tensors"),
    [
        (QWEN_V2, 1_924_404_480, 81),
        (edited(QWEN_V1, nest_target_layer_ids=[5, 19, 33, 47, 61]), 1_730_213_120, 58),
        (KIMI_V1, None, 69),
    ],
)
def test_published_counts(raw: dict[str, Any], num_parameters: int | None, num_tensors: int) -> None:
    config = zlab.config_from_dict(raw)
    assert len(zlab.expected_tensors(config)) == num_tensors
    if num_parameters is not None:
        assert count_parameters(config)["total"] == num_parameters


def test_kimi_size() -> None:
    assert round(count_parameters(zlab.config_from_dict(KIMI_V1))["total"] / 1e9, 3) == 3.479


def test_parts_of_the_published_draft() -> None:
    parts = count_parameters(zlab.config_from_dict(QWEN_V2))
    assert parts["fuse"] == 131_072_000
    assert parts["convolutions"] == 5 * 13_148_160
    assert parts["selector"] == 2 * 248320 * 256 + 256 * 5120
    assert sum(count for name, count in parts.items() if name != "total") == parts["total"]
    assert parts["total"] - parts["fuse"] - parts["selector"] - 2 * 5120 == 5 * 332_974_336


def test_costs_of_the_published_draft() -> None:
    config = zlab.config_from_dict(QWEN_V2)
    cost = step_cost(config)
    assert cost["cache_bytes_per_token"] == 20_480
    assert cost["max_cache_bytes"] == cache_bytes(config, 10**6) == 20_480 * 2048
    assert cost["is_cache_bounded"]
    assert round(cost["weight_bytes_per_step"] / 1e9, 3) == 3.595
    assert round(cost["head_bytes_per_step"] / 1e9, 3) == 2.543
    assert round(cost["flops"]["inject_per_position"] / 1e6) == 367
    assert round(cost["flops"]["block"] / 1e9, 1) == 26.6
    assert cost["flops"]["attention"] == 4 * 8 * 5 * (2048 + 8) * 32 * 128
    assert cost["tap_bytes_per_token"] == 51_200


def test_bare_config(tmp_path: Path) -> None:
    report = inspect_checkpoint(bare(tmp_path, QWEN_V1))
    assert report["weights"] is None
    assert report["size_bytes"]["bf16"] == 2 * 1_730_213_120
    assert report["size_bytes"]["bf16"] > report["size_bytes"]["8_bit"] > report["size_bytes"]["4_bit"]
    assert [layer["is_causal"] for layer in report["layers"]] == [True] * 4 + [False]
    assert [layer["window"] for layer in report["layers"]] == [2048] * 4 + [None]
    assert json.loads(json.dumps(report)) == report
    text = render_text(report)
    assert "window 2048, causal" in text
    assert "full attention, bidirectional" in text
    assert "no weights here" in text
    assert "1,730,213,120" in text


def test_folder_with_weights_and_target(tmp_path: Path) -> None:
    zlab.write(tmp_path / "draft", checkpoint(TINY_V2, own=True))
    report = inspect_checkpoint(tmp_path / "draft", bare(tmp_path, TARGET))
    assert report["weights"]["own"] == ["embed_tokens.weight", "lm_head.weight", "mask_embedding"]
    assert report["weights"]["dtypes"] == ["BF16"]
    assert report["weights"]["num_tensors"] == report["num_tensors"] - 1  # the mask embedding has a file of its own
    assert report["parameters"]["embedding"] == 64 * 32 + 32
    assert report["parameters"]["head"] == 64 * 32
    assert report["pair"]["fits"]
    assert {rule["verdict"] for rule in report["pair"]["rules"]} == {"pass"}
    assert render_text(report).endswith("pair       fits\n")


def test_a_pair_that_does_not_fit_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    target = bare(tmp_path, {**TARGET, "num_hidden_layers": 9, "eos_token_id": None})
    report = inspect_checkpoint(bare(tmp_path / "draft", TINY_V2), target)
    assert not report["pair"]["fits"]
    text = render_text(report)
    assert "FAIL       num_target_layers: target layers: the draft is made for 6, the target has 9" in text
    assert "can't tell mask_token_role" in text
    assert "does not fit" in text


def test_end_ids_of_the_generation_config_count(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    bare(tmp_path / "target", TARGET)
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 60]}))
    report = inspect_checkpoint(bare(tmp_path, TINY_V2), tmp_path / "target")
    rules = {rule["name"]: rule["verdict"] for rule in report["pair"]["rules"]}
    assert rules["mask_token_role"] == "fail"
    report = inspect_checkpoint(tmp_path / "config.json", tmp_path / "target", allow_mask_is_eos=True)
    assert report["pair"]["fits"]


def test_header_is_checked(tmp_path: Path) -> None:
    made = checkpoint(TINY_V2)
    del made.tensors["norm.weight"]
    bare(tmp_path, TINY_V2)
    save_file(made.tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing \(norm\.weight\)"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("draft", "target", "message"),
    [
        ("nowhere", None, "nowhere does not exist"),
        ("z-lab/Qwen3-8B-DFlash", None, "a hub id is not fetched here"),
        ("config.json", "no/target", "the target no/target does not exist: a hub id"),
        ("notes.txt", None, "is not a config.json"),
        ("empty", None, "empty is empty"),
    ],
)
def test_paths_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str, target: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    bare(tmp_path, TINY_V2)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BlockdraftError, match=message):
        inspect_checkpoint(draft, target)


def test_inspect_imports_no_torch(tmp_path: Path) -> None:
    zlab.write(tmp_path / "draft", checkpoint(TINY_V2, dtype=torch.float32))
    bare(tmp_path, TARGET)
    code = (
        "import sys\n"
        "from blockdraft.inspection import inspect_checkpoint, render_text\n"
        "print(render_text(inspect_checkpoint(sys.argv[1], sys.argv[2])))\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "draft", tmp_path / "config.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pair       fits" in done.stdout
