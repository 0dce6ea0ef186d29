"""Speculation on Kimi-K3 targets: the text of plain decoding, whatever is accepted, for both streams of taps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft.config import DraftConfig, LayerConfig, TapStream, TargetFacts, pairing_rules
from blockdraft.engine import Engine, Request, load
from blockdraft.errors import PairError
from blockdraft.formats import zlab
from blockdraft.targets.kimi_k3 import KimiK3Target, write
from engine_kit import Continuation
from kimi_k3_kit import LAYERS, TINY, VOCAB, edited, tiny_model, tiny_target
from mla_kit import VOCAB as DRAFT_VOCAB
from mla_kit import make_config, make_model
from tiny_pair import _write_tokenizer

STREAMS: tuple[TapStream, ...] = ("prefix", "attn_res")
LAYER = LayerConfig(is_causal=False, window=None)
PROMPTS = [[5, 9, 11, 3, 30, 7], [40], [8, 8, 12, 13, 14, 15, 16, 17, 18, 19]]


def draft_config(stream: TapStream, **changes: object) -> DraftConfig:
    """A small draft on latent attention, as the published ones are, for the tiny target."""
    assert DRAFT_VOCAB == VOCAB
    config = make_config([LAYER, replace(LAYER, window=6)])
    fits = {"num_target_layers": LAYERS, "target_layer_ids": (2, 6), "tap_stream": stream}
    return replace(config, max_position_embeddings=256, **{**fits, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Prompts and what the target writes after them."""
    target = tiny_target()
    return [prompt + written(target, prompt, 110) for prompt in PROMPTS]


def written(target: KimiK3Target, prompt: list[int], count: int) -> list[int]:
    """The target's own greedy text, checked against one pass over the whole of it."""
    [completion] = Engine(target).run([Request(prompt_ids=prompt, max_new_tokens=count, stop_ids=())])
    ids = list(completion.token_ids)
    whole = torch.tensor(prompt + ids)
    [scored] = target.forward([whole[:-1]], [target.new_row()])
    assert scored.logits_TV[len(prompt) - 1 :].argmax(-1).tolist() == ids
    assert len(set(ids)) > 8  # no loop of a few tokens
    return ids


@pytest.mark.parametrize("stream", STREAMS)
def test_greedy_text_with_a_draft(stream: TapStream, texts: list[list[int]]) -> None:
    engine = Engine(tiny_target((2, 6), stream=stream), make_model(draft_config(stream)))
    requests = [Request(prompt_ids=prompt, max_new_tokens=110, stop_ids=(), speculate=True) for prompt in PROMPTS]
    for text, completion in zip(texts, engine.run(requests), strict=True):
        assert list(completion.token_ids) == text[-110:]


@pytest.mark.parametrize("stream", STREAMS)
def test_greedy_text_where_any_number_is_accepted(stream: TapStream, texts: list[list[int]]) -> None:
    """Known texts as proposals, wrong at random slots: every length of rollback, three rows at once."""
    target = tiny_target((2, 6), stream=stream)
    chance = random.Random(1)
    slots = [chance.choice([None, 0, 1, 2, 3, 4, 5, 6]) for _ in range(200)]
    draft = Continuation(draft_config(stream), texts, wrong=lambda step: slots[step])
    requests = [Request(prompt_ids=prompt, max_new_tokens=110, stop_ids=()) for prompt in PROMPTS]
    for text, completion in zip(texts, Engine(target, draft).run(requests), strict=True):  # type: ignore[arg-type]
        assert list(completion.token_ids) == text[-110:]
        assert completion.stats.num_accepted_draft_tokens > 40


def test_streams_must_agree() -> None:
    with pytest.raises(PairError, match="load the target with tap_stream='attn_res'"):
        Engine(tiny_target((2, 6)), make_model(draft_config("attn_res")))
    facts = TargetFacts.from_config(TINY)
    for stream in STREAMS:
        rules = {rule.name: rule.verdict for rule in pairing_rules(draft_config(stream), facts)}
        assert (rules["tap_stream"], rules["recurrent_state"]) == ("pass", "pass")


@pytest.mark.parametrize("stream", STREAMS)
def test_from_folders(tmp_path: Path, stream: TapStream) -> None:
    """Both halves on disk, in float32: the draft's file says which stream it reads."""
    (tmp_path / "words").mkdir()
    vocab = _write_tokenizer(tmp_path / "words")
    folder = tmp_path / "target"
    write(tiny_model(vocab_size=vocab, dtype=torch.float32), edited(vocab_size=vocab), folder)
    for file in (tmp_path / "words").iterdir():
        file.rename(folder / file.name)
    config = draft_config(stream, vocab_size=vocab, mask_token_id=3)
    draft = make_model(config, dtype=torch.float32)
    zlab.write(tmp_path / "draft", zlab.Checkpoint(config, dict(draft.state_dict())), dtype="float32")
    engine = load(tmp_path / "draft", folder)
    assert engine.target.tap_stream == stream
    request = Request(prompt_ids=[9, 30, 200, 7], max_new_tokens=40, stop_ids=())
    plain = load(None, folder, speculation="off")
    [first], [second] = engine.run([request]), plain.run([request])
    assert list(first.token_ids) == list(second.token_ids)
    with pytest.raises(PairError, match="and llama has prefix: is this the draft's target"):
        from blockdraft.targets import load_target

        load_target(_llama(tmp_path / "llama"), tap_stream="attn_res")


def _llama(folder: Path) -> Path:
    from tiny_targets import tiny_model as other

    other("llama").save_pretrained(folder)
    return folder
