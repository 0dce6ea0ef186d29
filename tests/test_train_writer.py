"""A corpus is the target's own text with the taps that serving reads, and its writing can be interrupted."""

from __future__ import annotations

import pytest
import torch
from engine_kit import hf_target, plain_ids, tiny_model

from blockdraft.errors import ConfigError, RequestError
from blockdraft.targets.writing import BatchWriter
from blockdraft.train.corpus import Corpus
from blockdraft.train.writer import write_corpus

PROMPTS = [[3, 4], [(5 * i) % 31 for i in range(17)], [9], [1, 2, 3, 4, 5, 6], [8, 8, 8]]
TAPS = (0, 2)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def write_all(folder, model, prompts=PROMPTS, **changes):
    writer = BatchWriter(model, TAPS)
    try:
        settings = {"target_name": "tiny", "max_new_tokens": 20, "max_length": 64, "batch_size": 2, "seed": 0}
        return write_corpus(folder, prompts, writer, **{**settings, **changes})
    finally:
        writer.close()


def test_text_and_taps_are_those_of_one_row_at_a_time(model, tmp_path):
    manifest = write_all(tmp_path, model)
    assert (manifest.given, manifest.success, manifest.skipped) == (5, 5, 0)
    corpus = Corpus(tmp_path, max_length=64)
    assert corpus.num_answer_tokens == manifest.answer_tokens
    stop = frozenset({31})
    seen = set()
    for index in range(len(corpus)):
        batch = corpus.batch([index])
        num_prompt, length = int(batch.prompt_len_B[0]), int(batch.len_B[0])
        ids = batch.ids_BS[0, :length].tolist()
        seen.add(tuple(ids[:num_prompt]))
        assert ids[num_prompt:] == plain_ids(model, ids[:num_prompt], 20, stop=stop)
        target = hf_target(model, TAPS)
        [scored] = target.forward([torch.tensor(ids[:-1])], [target.new_row()])
        target.close()
        assert torch.allclose(batch.taps_BSNE[0, : length - 1].double(), scored.taps_TNE, rtol=1e-2, atol=1e-2)
    assert seen == {tuple(prompt) for prompt in PROMPTS}


def test_an_interrupted_corpus_goes_on_where_it_stopped(model, tmp_path):
    write_all(tmp_path / "whole", model)
    class Stop(Exception):
        pass

    def stop_after_one(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        write_all(tmp_path / "torn", model, on_shard=stop_after_one)
    (tmp_path / "torn" / "shard-00001.tmp").write_bytes(b"half")
    write_all(tmp_path / "torn", model)
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "torn" / path.name).read_bytes()


def test_long_prompts_are_counted_and_another_target_is_refused(model, tmp_path):
    manifest = write_all(tmp_path, model, prompts=[*PROMPTS, [1] * 60])
    assert (manifest.given, manifest.success, manifest.skipped) == (6, 5, 1)
    with pytest.raises(ConfigError, match="another target"):
        write_all(tmp_path, model, target_name="other")
    with pytest.raises(RequestError, match="none of 1 prompts"):
        write_all(tmp_path / "new", model, prompts=[[1] * 60])
