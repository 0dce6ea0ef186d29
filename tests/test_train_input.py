"""Corpora that cannot be meant, or cannot be read: one line that says what, what is allowed, what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.errors import BlockdraftError, CheckpointError
from blockdraft.train.corpus import Corpus
from engine_kit import tiny_model
from train_kit import make_corpus


@pytest.fixture
def folder(tmp_path) -> Path:
    make_corpus(tmp_path / "corpus", tiny_model(dtype=torch.float32), [[1, 2, 3], [4, 5]], 8)
    return tmp_path / "corpus"


def open_corpus(folder: Path, max_length: int = 64) -> Corpus:
    return Corpus(folder, max_length=max_length)


def test_a_batch_is_the_shards_content_padded(folder: Path) -> None:
    corpus = open_corpus(folder)
    shard = load_file(folder / "a-0000.safetensors")
    assert (len(corpus), corpus.num_answer_tokens) == (2, 16)
    batch = corpus.batch([1, 0])
    assert batch.len_B.tolist() == [10, 11]
    assert batch.prompt_len_B.tolist() == [2, 3]
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
        (lambda raw: [], "must hold target, target_layer_ids"),
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


def edit(shard, **changes):
    return {**shard, **changes}


BROKEN = [
    (lambda s: {k: v for k, v in s.items() if k != "taps"}, "a shard holds ids, taps, prompt_len, len"),
    (lambda s: edit(s, more=torch.ones(1)), "a shard holds"),
    (lambda s: edit(s, taps=s["taps"][:-1].clone()), "taps have shape [20, 3, 32]"),
    (lambda s: edit(s, taps=s["taps"][:, :2].clone()), "taps have shape [21, 2, 32]"),
    (lambda s: edit(s, len=torch.tensor([11, 11])), "do not add up"),
    (lambda s: edit(s, len=torch.tensor([11])), "do not add up"),
    (lambda s: edit(s, prompt_len=torch.tensor([3, 12])), "do not add up"),
    (lambda s: edit(s, prompt_len=torch.tensor([-1, 2])), "do not add up"),
    (lambda s: edit(s, ids=s["ids"] - 40), "ids run from"),
    (lambda s: edit(s, ids=s["ids"] + 30), "the target has 0 to 31"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_a_shard_that_contradicts_itself_is_named(folder: Path, change, words: str) -> None:
    path = folder / "a-0000.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=r"a-0000\.safetensors") as caught:
        open_corpus(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_a_torn_shard_is_named(folder: Path, share: float) -> None:
    corpus = open_corpus(folder)
    content = (folder / "a-0000.safetensors").read_bytes()
    (folder / "b-0000.safetensors").write_bytes(content[: int(len(content) * share)])
    for attempt in (lambda: open_corpus(folder), corpus.rescan):
        with pytest.raises(BlockdraftError, match=r"b-0000\.safetensors: the shard is damaged") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert len(corpus) == 2
