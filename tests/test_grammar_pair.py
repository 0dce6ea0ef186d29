"""Grammars on the real pair, in float32: valid text, and the same with the draft as without it.

A cut of ``benchmarks.grammar``, whose whole run is in ``results/grammar.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from blockdraft import Engine, Request, UnavailableError, load
from blockdraft.accept import SamplingParams
from blockdraft.targets import ensure_target
from blockdraft.text import Grammar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import grammar
from benchmarks.grammar_cases import cases

NUM_CASES = 24


@pytest.fixture(scope="module")
def engine() -> Engine:
    try:
        ensure_target()
    except UnavailableError as error:
        pytest.skip(f"the built-in target is not here: {error}")
    return load(max_rows=NUM_CASES, prefix_cache_bytes=grammar.PREFIX_BYTES)


def test_random_grammars_are_kept_to_and_the_draft_changes_nothing(engine: Engine) -> None:
    asked = list(cases(NUM_CASES, seed=7))
    pairs = grammar.both_ways(engine, asked, max_new_tokens=12)
    found = grammar.report(asked, pairs)
    assert found["wrong"] == []
    ended = sum(kind["ended"] for kind in found["kinds"].values())
    assert ended == sum(kind["valid"] for kind in found["kinds"].values()) and ended > NUM_CASES // 3
    assert sum(drafted.stats.num_accepted_draft_tokens for _, drafted in pairs) > 0


def test_a_sampled_answer_is_one_of_the_choices(engine: Engine) -> None:
    assert engine.tokenizer is not None
    texts = ["yes", "no", "peut-être", "多分"]
    ids = engine.tokenizer.chat_ids([{"role": "user", "content": "Is it going to rain?"}])
    hot = SamplingParams(temperature=3.0)
    requests = [
        Request(prompt_ids=ids, max_new_tokens=20, grammar=Grammar.choice(texts), sampling=hot, seed=seed)
        for seed in range(8)
    ]
    answers = [completion.text for completion in engine.run(requests)]
    assert set(answers) <= set(texts) and len(set(answers)) > 1


def test_the_compiler_takes_the_pair_s_tokens_for_the_bytes_that_they_are(engine: Engine) -> None:
    from blockdraft.text import compile_grammar, token_bytes

    tokenizer = engine.tokenizer
    assert tokenizer is not None
    vocabulary = compile_grammar(Grammar.regex("a"), tokenizer).vocabulary
    for token_id in sorted(set(range(vocabulary.num_ids)) - tokenizer.special_ids):
        wanted = token_bytes(tokenizer, token_id)
        assert vocabulary.token_bytes([token_id]) == (b"" if wanted == b"\xff" else wanted), token_id
