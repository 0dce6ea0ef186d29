"""Corpora that cannot be meant, or cannot be read: one line that says what, what is allowed, what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError
from blockdraft.targets import HFTarget
from blockdraft.train.corpus import Corpus, seal_shard
from blockdraft.train.files import file_sha256
from engine_kit import tiny_model
from train_kit import facts_of, make_corpus, write_shard, written_text


@pytest.fixture
def folder(tmp_path) -> Path:
    make_corpus(tmp_path / "corpus", tiny_model(dtype=torch.float32), [[1, 2, 3], [4, 5]], 8)
    return tmp_path / "corpus"


def open_corpus(folder: Path, max_length: int = 64) -> Corpus:
    return Corpus(folder, max_length=max_length)


def test_a_batch_is_the_shards_content_padded(folder: Path) -> None:
    corpus = open_corpus(folder)
    shard = load_file(folder / "a-0000.safetensors")
    assert (folder / "a-0000.safetensors").stat().st_mode == (folder / "a-0000.json").stat().st_mode
    assert (len(corpus), corpus.num_answer_tokens) == (2, 16)
    batch = corpus.batch([1, 0])
    assert batch.len_B.tolist() == [10, 11]
    assert batch.written_BS.tolist() == [[False] * 2 + [True] * 8 + [False], [False] * 3 + [True] * 8]
    assert batch.last_BSE is None
    assert torch.equal(batch.ids_BS[1].int(), shard["ids"][:11])
    assert torch.equal(batch.ids_BS[0, :10].int(), shard["ids"][11:])
    assert torch.equal(batch.taps_BSNE[0, :10], shard["taps"][11:].float())
    assert batch.ids_BS[0, 10] == 0
    assert not batch.taps_BSNE[0, 10].any()
    assert torch.equal(corpus.token_ids(), shard["ids"].long().unique())


def test_sequences_too_long_or_too_short_are_left_out(folder: Path) -> None:
    assert len(open_corpus(folder, max_length=10)) == 1
    with pytest.raises(CheckpointError, match=r"no usable sequence \(1 shards; usable are .* max_length 9"):
        open_corpus(folder, max_length=9)


def test_an_empty_corpus_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a corpus, it has no corpus\.json"):
        open_corpus(tmp_path)
    (folder / "a-0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no usable sequence"):
        open_corpus(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: "{", "cannot be read as JSON"),
        (lambda raw: [], "must hold target, weights_sha256"),
        (lambda raw: {**raw, "more": 1}, "must hold"),
        (lambda raw: {k: v for k, v in raw.items() if k != "vocab_size"}, "must hold"),
        (lambda raw: {**raw, "vocab_size": "32"}, "vocab_size is '32'"),
        (lambda raw: {**raw, "vocab_size": 0}, "vocab_size is 0"),
        (lambda raw: {**raw, "target_layer_ids": 3}, "target_layer_ids is 3"),
        (lambda raw: {**raw, "target_layer_ids": [True]}, "target_layer_ids is True"),
        (lambda raw: {**raw, "target": None}, "target is None"),
        (lambda raw: {**raw, "target_layer_ids": [0, 1]}, r"taps have shape"),
        (lambda raw: {**raw, "vocab_size": 8}, "the target has 0 to 7"),
    ],
)
def test_bad_facts_are_named(folder: Path, change, words: str) -> None:
    path = folder / "corpus.json"
    raw = change(json.loads(path.read_text()))
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        open_corpus(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_last_layer_is_kept_apart_from_the_taps(tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    target = HFTarget(model, (0, 2))
    ids, taps = written_text(target, [1, 2], 5)
    target.close()
    batches = []
    for name, layers, last in (("apart", (0,), 2), ("a tap too", (0, 2), 2)):
        (tmp_path / name).mkdir()
        facts_of(target, target_layer_ids=layers, last_layer_id=last).write(tmp_path / name)
        write_shard(tmp_path / name / "a.safetensors", [(ids, taps, 2)])
        batches.append(Corpus(tmp_path / name, max_length=64).batch([0]))
    assert [batch.taps_BSNE.shape[2] for batch in batches] == [1, 2]
    for batch in batches:
        assert torch.equal(batch.last_BSE[0, :-1], taps[:-1, 1].bfloat16().float())
        assert torch.equal(batch.taps_BSNE[0, :-1, 0], taps[:-1, 0].bfloat16().float())


def test_a_tap_that_float16_cannot_hold_is_named(tmp_path: Path) -> None:
    target = HFTarget(tiny_model(dtype=torch.float32), (0,))
    facts_of(target, features_dtype="float16").write(tmp_path)
    taps = torch.zeros(4, 1, 32)
    taps[1, 0, 5] = 70000.0
    with pytest.raises(CheckpointError, match=r'not a finite float16 number; set text.features_dtype to "bfloat16"'):
        write_shard(tmp_path / "a.safetensors", [([1, 2, 3, 4], taps, 1)])
    taps[1, 0, 5], taps[3] = 6e4, float("inf")  # the last position was never fed, so nothing there counts
    write_shard(tmp_path / "a.safetensors", [([1, 2, 3, 4], taps, 1)])
    assert Corpus(tmp_path, max_length=8).batch([0]).taps_BSNE[0, 3].abs().max() == 0


def test_text_without_taps_says_so(tmp_path: Path) -> None:
    target = HFTarget(tiny_model(dtype=torch.float32), ())
    facts_of(target, features_dtype="none").write(tmp_path)
    write_shard(tmp_path / "a.safetensors", [([1, 2, 3, 4], torch.zeros(4, 0, 32), 1)])
    with pytest.raises(ConfigError, match=r'text without taps; set text.features to "online"'):
        Corpus(tmp_path, max_length=8).batch([0])


def edit(shard, **changes):
    return {**shard, **changes}


BROKEN = [
    (
        lambda s: {k: v for k, v in s.items() if k != "taps"},
        "a shard of this corpus holds ids, len, prompt, taps, written",
    ),
    (lambda s: edit(s, more=torch.ones(1)), "a shard of this corpus holds"),
    (lambda s: edit(s, taps=s["taps"][:-1].clone()), "taps have shape [20, 3, 32]"),
    (lambda s: edit(s, taps=s["taps"][:, :2].clone()), "taps have shape [21, 2, 32]"),
    (lambda s: edit(s, len=torch.tensor([11, 11])), "do not add up"),
    (lambda s: edit(s, len=torch.tensor([11])), "do not add up"),
    (lambda s: edit(s, len=torch.tensor([22, -1])), "do not add up"),
    (lambda s: edit(s, prompt=torch.tensor([3])), "do not add up"),
    (lambda s: edit(s, written=s["written"][:-1].clone()), "do not add up"),
    (lambda s: edit(s, written=s["written"].to(torch.uint8)), "do not add up"),
    (lambda s: edit(s, ids=s["ids"] - 40), "ids run from"),
    (lambda s: edit(s, ids=s["ids"] + 30), "the target has 0 to 31"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_a_shard_that_contradicts_itself_is_named(folder: Path, change, words: str) -> None:
    path = folder / "a-0000.safetensors"
    save_file(change(load_file(path)), path)
    seal_shard(path, {"sha256": file_sha256(path)})
    with pytest.raises(CheckpointError, match=r"a-0000\.safetensors") as caught:
        open_corpus(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_a_torn_shard_is_named(folder: Path, share: float) -> None:
    corpus = open_corpus(folder)
    content = (folder / "a-0000.safetensors").read_bytes()
    (folder / "b-0000.safetensors").write_bytes(content[: int(len(content) * share)])
    assert corpus.rescan() == 0  # no seal: a writer may still be at it
    shutil.copy(folder / "a-0000.json", folder / "b-0000.json")
    for attempt in (lambda: open_corpus(folder), corpus.rescan):
        with pytest.raises(BlockdraftError, match=r"b-0000\.safetensors: the shard is damaged") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert len(corpus) == 2


def test_one_flipped_bit_is_noticed(folder: Path) -> None:
    path = folder / "a-0000.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 4  # inside the taps: a number like any other
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256 is not the one in its seal; delete it"):
        open_corpus(folder)
    (folder / "a-0000.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not the seal of a shard"):
        open_corpus(folder)
