"""Tool calls through the engine: markers that are special tokens reach the parser, forced calls are calls."""

from __future__ import annotations

import itertools

import pytest

from blockdraft.accept import SamplingParams
from blockdraft.engine import Engine
from blockdraft.text.sections import REPLY_FORMATS, ReplyParser, tool_grammar
from engine_kit import Continuation, bigram_model, draft_config, hf_target, random_draft, run_one, tiny_model
from sections_kit import TOOLS, byte_tokenizer, joined

NONE = frozenset[int]()
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": EMPTY}}


def read(name: str, texts: list[str], tokenizer, prompt: str = ""):
    parser = ReplyParser(REPLY_FORMATS[name], tokenizer, has_tools=True, prompt_text=prompt, tools=TOOLS)
    return joined([delta for text in texts for delta in parser.feed(text)] + parser.finish())


@pytest.mark.parametrize("has_draft", [False, True])
def test_markers_that_are_special_tokens_reach_the_parser(has_draft: bool) -> None:
    """A target that always writes the same call; its other special tokens stay out of the text."""
    visible = REPLY_FORMATS["mistral-args"].visible_tokens
    tokenizer = byte_tokenizer(special=[*visible, "<pad>"])
    ids = tokenizer.encode("[TOOL_CALLS]now<pad>[ARGS]{}", add_special_tokens=False)
    assert len(set(ids)) == len(ids)  # every id has one follower
    follow = dict(itertools.pairwise([*ids, ids[0]]))
    target = hf_target(bigram_model(lambda token: follow.get(token, token), vocab=tokenizer.vocab_size))
    draft = Continuation(draft_config(target.facts), [[ids[-1], *ids]]) if has_draft else None
    engine = Engine(target, draft, tokenizer=tokenizer)
    fields = {"prompt_ids": [ids[-1]], "max_new_tokens": len(ids), "stop_ids": NONE}
    done = run_one(engine, visible_special_tokens=visible, **fields)
    assert done.text == "[TOOL_CALLS]now[ARGS]{}"
    assert read("mistral-args", [event.text or "" for event in done.events], tokenizer).calls == [("now", {})]
    assert run_one(engine, **fields).text == "now{}"


@pytest.mark.parametrize("name", ["qwen3", "kimi-k2"])
def test_a_forced_call_of_a_target_that_knows_nothing_is_a_call(name: str) -> None:
    """Random weights, greedy and sampled, with a draft and without: the same ids when greedy, always one call."""
    item = REPLY_FORMATS[name]
    tokenizer = byte_tokenizer(special=[*item.visible_tokens, "<eos>"])
    prompt = f"Hi{item.reasoning[1] if item.reasoning else ''}"
    grammar = tool_grammar(item, [NOW], "now", tokenizer=tokenizer, parallel=False, prompt_text=prompt)
    model = tiny_model(vocab=tokenizer.vocab_size)
    target = hf_target(model)
    draft = random_draft(draft_config(target.facts))
    greedy = []
    for engine in (Engine(target, None, tokenizer=tokenizer), Engine(target, draft, tokenizer=tokenizer)):
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
            done = run_one(
                engine,
                prompt_ids=tokenizer.encode(prompt, False),
                max_new_tokens=250,
                sampling=sampling,
                seed=5,
                stop_ids=frozenset([tokenizer.special_id_of["<eos>"]]),
                grammar=grammar,
                visible_special_tokens=item.visible_tokens,
            )
            assert done.finish_reason == "stop"  # all that may be free in this call is bounded
            parsed = read(name, [event.text or "" for event in done.events], tokenizer, prompt)
            assert (parsed.content, parsed.calls) == ("", [("now", {})])
            if sampling.is_greedy:
                greedy.append(done.token_ids)
    assert greedy[0] == greedy[1]
