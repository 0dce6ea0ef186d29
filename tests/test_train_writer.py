"""A corpus is the target's own text with the taps that serving reads, and its writing can be interrupted."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.errors import ConfigError, RequestError
from blockdraft.targets.writing import BatchWriter
from blockdraft.train.corpus import Corpus
from blockdraft.train.writer import write_corpus
from engine_kit import hf_target, plain_ids, tiny_model

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


def test_an_answer_ends_where_serving_ends_it():
    own = tiny_model()
    end = plain_ids(own, PROMPTS[0], 20)[4]
    own.generation_config.eos_token_id = [31, end]
    writer = BatchWriter(own, TAPS)
    target = hf_target(own, TAPS)
    assert writer.facts.eos_token_ids == target.facts.eos_token_ids == (31, end)
    writer.close()


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


def test_the_target_writes_its_own_prompts_and_a_corpus_trains_a_draft(tiny_pair, tmp_path):
    """`blockdraft corpus` and `blockdraft train` as a new user would: no prompts at hand, a tiny target."""
    from tiny_pair import run_cli

    target = tmp_path / "target"  # one that ends its turns: a flat law over few tokens names the end often enough
    shutil.copytree(tiny_pair.target, target)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] *= 0.01
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    words = ("corpus", tmp_path / "corpus", "--taps", "0,1", "--target", target, "--self-prompts", "64")
    bounds = ("--max-new-tokens", "12", "--max-length", "120", "--batch-size", "16", "--dtype", "float32")
    ran = run_cli(*words, *bounds)
    assert ran.code == 0, ran.err
    again = run_cli(*words, *bounds)
    assert again.out == ran.out
    assert len(Corpus(tmp_path / "corpus", max_length=120)) > 0


def test_corpus_refuses_what_it_cannot_do(tiny_pair, tmp_path):
    from tiny_pair import run_cli

    for words, says in (
        ((), "no prompts"),
        (("--self-prompts", "2", "--dtype", "int8"), "float32 or bfloat16"),
        (("--self-prompts", "2", "--batch-size", "0"), "batch_size is 0"),
        (("--prompts", str(tmp_path / "none.jsonl")), "name a JSONL file"),
    ):
        ran = run_cli("corpus", tmp_path / "c", "--taps", "0,1", "--target", tiny_pair.target, *words)
        assert ran.code == 2 and says in ran.err and ran.err.count("\n") == 1
    ran = run_cli("corpus", tmp_path / "c", "--taps", "a", "--target", tiny_pair.target, "--self-prompts", "2")
    assert ran.code == 2 and "layer numbers" in ran.err
    ran = run_cli("corpus", tmp_path / "c", "--taps", "99", "--target", tiny_pair.target, "--self-prompts", "2")
    assert ran.code == 2 and "taps [99]" in ran.err


def test_long_prompts_are_counted_and_another_target_is_refused(model, tmp_path):
    manifest = write_all(tmp_path, model, prompts=[*PROMPTS, [1] * 60])
    assert (manifest.given, manifest.success, manifest.skipped) == (6, 5, 1)
    with pytest.raises(ConfigError, match="another target"):
        write_all(tmp_path, model, target_name="other")
    with pytest.raises(RequestError, match="none of 1 prompts"):
        write_all(tmp_path / "new", model, prompts=[[1] * 60])
