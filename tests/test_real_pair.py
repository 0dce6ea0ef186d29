"""The real pair: SmolLM2-135M-Instruct and the drafter that the package carries for it, in float32 on the CPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from blockdraft import Engine, Request, UnavailableError, load
from blockdraft.engine.load import builtin_draft
from blockdraft.stats import pooled_acceptance_length
from blockdraft.targets import ensure_target

NUM_TOKENS = 40
MATHS = "Natalia sold clips to 48 friends in April and half as many in May. How many clips did she sell altogether?"
PROMPTS = [MATHS, "Write a Python function that reverses a list.", "Tell me a short story about a lighthouse."]


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    draft = builtin_draft()
    if not draft.is_dir():
        draft = request.getfixturevalue("shared_dir") / "prototypes" / "rough-draft"
    target = _target()
    started = time.process_time()
    engine = load(draft, target)
    print(f"the pair was loaded in {time.process_time() - started:.1f} CPU seconds")
    return engine


def _target() -> Path:
    try:
        return ensure_target()
    except UnavailableError as error:
        pytest.skip(f"the built-in target is not here: {error}")


@pytest.fixture(scope="module")
def plain_ids(engine: Engine) -> dict[str, tuple[int, ...]]:
    return {text: _run(engine, text, speculate=False).token_ids for text in PROMPTS}


def _run(engine: Engine, text: str, **fields):
    assert engine.tokenizer is not None
    ids = engine.tokenizer.chat_ids([{"role": "user", "content": text}])
    [completion] = engine.run([Request(prompt_ids=ids, max_new_tokens=NUM_TOKENS, **fields)])
    completion.stats.check()
    return completion


@pytest.mark.parametrize("width", [3, 5, 8])
@pytest.mark.parametrize("text", PROMPTS)
def test_the_text_is_the_target_s_at_every_width(
    engine: Engine, plain_ids: dict[str, tuple[int, ...]], text: str, width: int
) -> None:
    completion = _run(engine, text, width=width)
    assert completion.token_ids == plain_ids[text]
    assert completion.speculation.width == width and completion.stats.num_draft_tokens > 0


def test_proposals_are_accepted(engine: Engine) -> None:
    completion = _run(engine, MATHS)
    length = pooled_acceptance_length([completion.stats])
    print(f"acceptance length {length:.2f}; {completion.text!r}")
    assert length is not None and length > 1.2
    assert completion.stats.num_steps < NUM_TOKENS - 1
