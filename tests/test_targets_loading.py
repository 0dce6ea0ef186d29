"""Loading real targets: GGUF files, hub ids, device maps, code of others, models with vision, number formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaForCausalLM

import kimi_k3_kit
from blockdraft import Engine, Request, load
from blockdraft.errors import BlockdraftError, CheckpointError, PairError, RequestError, UnavailableError
from blockdraft.inspection import read_target_facts
from blockdraft.targets import HFTarget, load_target
from blockdraft.targets.fused import FusedTarget
from blockdraft.targets.kimi_k3 import KimiK3Target, write
from blockdraft.targets.stored import find_target
from gguf_kit import write_llama_gguf
from tiny_pair import MASK_ID, TinyPair, changed_copy, run_cli
from tiny_targets import random_ids, tiny_model

REQUEST = Request(prompt_ids=[20, 30, 40], max_new_tokens=24)
TAPS = (0, 2)


def said(target: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and taps of one forward, then of the end again after it was taken back: the last ones."""
    row = target.new_row()
    target.forward([ids], [row])
    target.rollback([row], [len(ids) - 5])
    target.forward([ids[-5:]], [row])
    target.rollback([row], [0])
    [end] = target.forward([ids[-5:]], [row])
    target.free(row)
    row = target.new_row()
    [whole] = target.forward([ids], [row])
    target.free(row)
    assert torch.allclose(end.logits_TV, whole.logits_TV[-5:], atol=1e-5)
    assert torch.allclose(end.taps_TNE, whole.taps_TNE[-5:], atol=1e-5)
    return whole.logits_TV, whole.taps_TNE


def texts(engine: Engine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same greedy request with the draft and without."""
    plain = Request(prompt_ids=REQUEST.prompt_ids, max_new_tokens=REQUEST.max_new_tokens, speculate=False)
    [drafted] = engine.run([REQUEST])
    assert drafted.stats.num_draft_tokens > 0
    return drafted.token_ids, engine.run([plain])[0].token_ids


# ---- GGUF ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gguf_target(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    return file, write_llama_gguf(tiny_pair.target, file, gguf.GGMLQuantizationType.Q8_0)


def test_a_gguf_is_the_model_of_its_unpacked_blocks(
    tiny_pair: TinyPair, gguf_target: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    file, weights = gguf_target
    reference = LlamaForCausalLM.from_pretrained(tiny_pair.target)
    exact = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(weights)
    assert max(float((exact[name] - weights[name]).abs().max()) for name in exact) > 1e-3  # it was quantised
    target = load_target(file, tap_layer_ids=TAPS, dtype=torch.float32)
    assert isinstance(target, FusedTarget) and target.facts == find_target(file).facts
    ids = random_ids(30)
    with torch.no_grad():
        expected = reference(ids[None], output_hidden_states=True)
    logits, taps = said(target, ids)
    assert torch.allclose(logits, expected.logits[0], atol=1e-4)
    assert torch.allclose(taps[:, 0], expected.hidden_states[1][0], atol=1e-4)
    assert torch.equal(target.embed(ids), weights["model.embed_tokens.weight"][ids])


def test_a_pair_with_a_gguf_target_runs_from_a_file_and_from_its_folder(
    tiny_pair: TinyPair, gguf_target: tuple[Path, Any]
) -> None:
    file, _ = gguf_target
    engine = load(tiny_pair.draft, file)
    drafted, plain = texts(engine)
    assert drafted == plain
    text = "the quick brown fox 日本"
    folder = load(tiny_pair.draft, tiny_pair.target)
    assert engine.tokenizer is not None and folder.tokenizer is not None
    ids = engine.tokenizer.chat_ids([{"role": "user", "content": text}], add_generation_prompt=True)
    assert ids == folder.tokenizer.chat_ids([{"role": "user", "content": text}], add_generation_prompt=True)
    ran = run_cli("generate", tiny_pair.draft, "--target", file.parent, "the fox", "--max-new-tokens", "6", "--json")
    assert len(ran.json_lines[0]["token_ids"]) <= 6 and ran.err == ""


def test_what_inspect_reads_of_a_gguf_is_what_is_loaded(gguf_target: tuple[Path, Any]) -> None:
    file, _ = gguf_target
    read, loaded = read_target_facts(file), find_target(file).facts
    assert read == loaded


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a.gguf", "b.gguf"], r"holds 2 GGUF files \(a.gguf, b.gguf\): give the path of one"),
        (["m-00001-of-00002.gguf"], "one part of a split GGUF"),
        (["mmproj-model.gguf"], "no config.json"),
        (["a.gguf"], "cannot be loaded"),
    ],
)
def test_a_folder_of_ggufs_that_is_no_target(tmp_path: Path, names: list[str], says: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF, but no more")
    with pytest.raises(CheckpointError, match=says) as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)


# ---- hub ids ---------------------------------------------------------------------------------------------------------
def test_a_hub_id_is_fetched_with_code_on_consent_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, "*.py" in allow_patterns))
        return str(tmp_path / name.partition("/")[2])

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    tiny_model("qwen2", dtype=torch.float32).save_pretrained(tmp_path / "plain")
    assert load_target("owner/plain").facts.model_type == "qwen2"
    assert find_target("owner/plain", trust_remote_code=True).path == tmp_path / "plain"
    assert asked == [("owner/plain", False), ("owner/plain", True)]


def test_kimi_k3_is_known_by_its_hub_id_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(kimi_k3_kit.tiny_model(), kimi_k3_kit.TINY, tmp_path / "k3")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _name, allow_patterns: str(tmp_path / "k3"))
    loaded = load_target("moonshotai/Kimi-K3", tap_layer_ids=(1, 8), tap_stream="attn_res")
    assert isinstance(loaded, KimiK3Target) and loaded.tap_stream == "attn_res"


def test_one_gguf_of_a_hub_id_is_fetched_alone(
    gguf_target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file: str(gguf_target[0].parent / file))
    assert find_target(f"owner/name/{gguf_target[0].name}").path == gguf_target[0]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_target("no/such/folder")


# ---- device maps -----------------------------------------------------------------------------------------------------
MAP = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def test_a_target_partly_on_disk_says_what_it_says_in_memory(tiny_pair: TinyPair) -> None:
    whole = load_target(tiny_pair.target, tap_layer_ids=TAPS, pack=False, fused=False)
    spread = load_target(tiny_pair.target, tap_layer_ids=TAPS, device_map=MAP)
    assert isinstance(spread, HFTarget) and isinstance(whole, HFTarget)
    assert {p.device.type for p in spread._model.parameters()} == {"cpu", "meta"}
    ids = random_ids(20)
    for found, expected in zip(said(spread, ids), said(whole, ids), strict=True):
        assert torch.equal(found, expected)
    hidden = torch.randn(2, 3, 32)
    assert torch.equal(spread.logits(hidden), whole.logits(hidden))
    engine = load(tiny_pair.draft, tiny_pair.target, device_map=MAP)
    drafted, plain = texts(engine)
    assert drafted == plain == texts(load(tiny_pair.draft, tiny_pair.target))[0]


def test_a_hybrid_partly_on_disk_is_taken_back(tmp_path: Path) -> None:
    from tiny_hybrids import tiny_hybrid

    places = {**MAP, "model.layers.3": "disk"}
    tiny_hybrid("qwen3_next", dtype=torch.float32).save_pretrained(tmp_path / "experts")
    with pytest.raises(UnavailableError, match="most experts"):
        load_target(tmp_path / "experts", device_map=places)
    tiny_hybrid("qwen3_5_text", dtype=torch.float32).save_pretrained(tmp_path / "dense")
    spread = load_target(tmp_path / "dense", tap_layer_ids=TAPS, device_map=places)
    whole = load_target(tmp_path / "dense", tap_layer_ids=TAPS, pack=False)
    for found, expected in zip(said(spread, random_ids(20)), said(whole, random_ids(20)), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_a_map_by_name_on_one_device_is_that_device(tiny_pair: TinyPair) -> None:
    target = load_target(tiny_pair.target, tap_layer_ids=TAPS, device_map="auto")
    assert target.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    words = ["generate", *tiny_pair.arguments, "the fox", "--max-new-tokens", "4", "--json"]
    [ran] = run_cli(*words, "--device-map", json.dumps(MAP)).json_lines
    assert ran["token_ids"] == run_cli(*words).json_lines[0]["token_ids"]
    assert "is not JSON" in run_cli(*words, "--device-map", "{").refusal


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"device_map": "all"}, RequestError, "allowed are auto, balanced"),
        ({"device_map": {}}, RequestError, "a name or an object"),
        ({"device_map": {"": "meta"}}, RequestError, "'' on 'meta'; allowed are"),
        ({"device_map": {"": 99}}, UnavailableError, "'' on 99, and this machine has"),
        ({"device_map": {**MAP, "model.embed_tokens": "disk"}}, UnavailableError, "embedding of target .* place it"),
        ({"device_map": "auto", "fused": True}, UnavailableError, "no fused form"),
        ({"device_map": "auto", "pack": True}, UnavailableError, "pack=True needs an unquantised target"),
        ({"quantize": "int3"}, RequestError, "quantize is 'int3'; allowed are int8, nf4"),
    ],
)
def test_places_that_cannot_be_had(tiny_pair: TinyPair, asked: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        load_target(tiny_pair.target, **asked)
    assert "\n" not in str(caught.value)


# ---- number formats --------------------------------------------------------------------------------------------------
def test_the_draft_has_a_number_format_of_its_own(tiny_pair: TinyPair, tmp_path: Path) -> None:
    engine = load(tiny_pair.draft, tiny_pair.target, dtype="float64", draft_dtype="bfloat16")
    assert engine.draft is not None
    assert (engine.target.dtype, engine.draft.dtype) == (torch.float64, torch.bfloat16)
    drafted, plain = texts(engine)
    assert drafted == plain
    tiny = LlamaForCausalLM.from_pretrained(tiny_pair.target, dtype=torch.bfloat16)
    shutil.copytree(tiny_pair.target, tmp_path / "half")
    tiny.save_pretrained(tmp_path / "half")
    engine = load(tiny_pair.draft, tmp_path / "half", dtype="auto")
    assert engine.draft is not None
    assert (engine.target.dtype, engine.draft.dtype) == (torch.bfloat16, torch.float32)
    words = ["generate", *tiny_pair.arguments, "fox", "--max-new-tokens", "4"]
    assert "draft_dtype is 'int8'; allowed are" in run_cli(*words, "--draft-dtype", "int8").refusal
    with pytest.raises(RequestError, match="draft_dtype is 'bfloat16' and speculation is off"):
        load(target=tiny_pair.target, speculation="off", draft_dtype="bfloat16")


# ---- code of others --------------------------------------------------------------------------------------------------
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_a_target_brings_runs_on_consent_only(tiny_pair: TinyPair, tmp_path: Path) -> None:
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    folder = changed_copy(tiny_pair.target, tmp_path / "own", model_type="own_llama", auto_map=classes)
    (folder / "modeling_own.py").write_text("raise SystemExit('it ran')\n" + CODE)
    words = ["generate", str(tiny_pair.draft), "--target", str(folder), "fox", "--max-new-tokens", "4", "--json"]
    refusal = run_cli(*words).refusal
    assert f"target {folder} (own_llama)" in refusal and "pass --trust-remote-code" in refusal
    elsewhere = {name: f"somebody/else--{value}" for name, value in classes.items()}
    other = changed_copy(folder, tmp_path / "other", auto_map=elsewhere)
    with pytest.raises(CheckpointError, match="code from somebody/else, which runs only if you agree"):
        load_target(other)
    (folder / "modeling_own.py").write_text(CODE)
    [agreed] = run_cli(*words, "--trust-remote-code").json_lines
    words[3] = str(tiny_pair.target)
    assert agreed["token_ids"] == run_cli(*words).json_lines[0]["token_ids"]


def test_code_beside_a_family_of_transformers_is_not_run_and_not_needed(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = changed_copy(tiny_pair.target, tmp_path / "own", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('it ran')\n")
    assert load_target(folder).facts.model_type == "llama"


def test_a_model_that_is_no_language_model_is_refused(tiny_pair: TinyPair, tmp_path: Path) -> None:
    folder = changed_copy(tiny_pair.target, tmp_path / "audio", model_type="wav2vec2")
    with pytest.raises(BlockdraftError, match="wav2vec2"):
        load_target(folder)


def test_kimi_k3_has_one_form_on_one_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(kimi_k3_kit.TINY))
    for asked in ({"device_map": "auto"}, {"quantize": "int8"}, {"fused": True}):
        with pytest.raises(UnavailableError, match="Kimi K3 has one form"):
            load_target(tmp_path, **asked)


def test_the_mask_of_a_draft_is_checked_with_every_end_that_load_knows(tiny_pair: TinyPair, tmp_path: Path) -> None:
    """An end of text that stands in the generation config alone."""
    folder = changed_copy(tiny_pair.target, tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, MASK_ID]}))
    assert find_target(folder).facts.eos_token_ids == (2, MASK_ID)
    with pytest.raises(PairError, match=f"mask id {MASK_ID} is the target's end of text id"):
        load(tiny_pair.draft, folder)
