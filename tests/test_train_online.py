"""Taps computed inside the step are those that a corpus on disk holds, up to the rounding of the stored ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from blockdraft.errors import ConfigError
from blockdraft.targets import HFTarget
from blockdraft.train.corpus import Corpus
from blockdraft.train.online import OnlineCorpus
from engine_kit import tiny_model
from train_kit import TAPS, facts_of, make_corpus, make_recipe, write_shard, written_text

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture
def pair(model, tmp_path):
    """The same text with taps on disk, and without."""
    stored = make_corpus(tmp_path / "stored", model, PROMPTS, 9)
    (tmp_path / "text").mkdir()
    target = HFTarget(model, TAPS)
    facts_of(target, features_dtype="none", target_layer_ids=()).write(tmp_path / "text")
    texts = [(*written_text(target, prompt, 9), len(prompt)) for prompt in PROMPTS]
    write_shard(tmp_path / "text" / "a-0000.safetensors", texts)
    yield stored, OnlineCorpus(Corpus(tmp_path / "text", max_length=128), target, target_layer_ids=TAPS)
    target.close()


def test_batches_are_equal_up_to_the_stored_rounding(pair) -> None:
    stored, online = pair
    assert (len(online), online.num_answer_tokens) == (len(stored), stored.num_answer_tokens)
    assert torch.equal(online.token_ids(), stored.token_ids())
    for picked in ([2, 0], [1], [0, 1, 2]):
        kept, computed = stored.batch(picked), online.batch(picked)
        for name in ("ids_BS", "written_BS", "len_B"):
            assert torch.equal(getattr(kept, name), getattr(computed, name))
        assert torch.allclose(kept.taps_BSNE, computed.taps_BSNE, rtol=2**-8, atol=1e-5)
        assert not torch.equal(kept.taps_BSNE, computed.taps_BSNE)  # the stored ones are rounded
        assert not computed.taps_BSNE.requires_grad and not computed.taps_BSNE.is_inference()


def test_the_last_layer_is_given_where_it_is_asked_for(model, pair) -> None:
    _, online = pair
    last = OnlineCorpus(online.text, HFTarget(model, (0, 2)), target_layer_ids=(0,), last_layer_id=2).batch([1, 2])
    every = online.batch([1, 2]).taps_BSNE
    assert torch.allclose(last.last_BSE, every[:, :, 2], atol=1e-5) and last.taps_BSNE.shape[2] == 1


def test_a_target_with_other_taps_or_too_short_is_refused(model, pair) -> None:
    _, online = pair
    config = make_recipe().draft.config(online.target.facts)
    online.check_fits(config)
    with pytest.raises(ConfigError, match=r"taps \[0, 1, 2\], the draft reads \[0, 1\]"):
        online.check_fits(dataclasses.replace(config, target_layer_ids=(0, 1)))
    with pytest.raises(ConfigError, match=r"loaded with taps \[0, 1, 2\], this corpus asks for \[0, 2\]"):
        OnlineCorpus(online.text, online.target, target_layer_ids=(0, 2))
    text = Corpus(online.text.folder, max_length=600)
    with pytest.raises(ConfigError, match="max_length is 600, the target has 512 positions"):
        OnlineCorpus(text, online.target, target_layer_ids=TAPS)
