"""Speculation over targets with recurrent or convolution state: the text is the one that the target writes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockdraft.config import pairing_rules
from blockdraft.engine import Engine, Request
from blockdraft.errors import PairError
from blockdraft.targets import HFTarget
from engine_kit import Continuation, draft_config, hf_target, plain_ids, random_draft, run_one
from tiny_hybrids import tiny_hybrid

NO_STOP: frozenset[int] = frozenset()
PROMPT = [3, 7, 1, 12, 5]
COUNT = 40


@pytest.fixture(scope="module", params=["qwen3_next", "kimi_linear", "lfm2"])
def written(request: pytest.FixtureRequest) -> tuple[Any, list[int]]:
    """A model whose text is not the same token again and again, and that text."""
    model = tiny_hybrid(request.param, std=0.2)
    text = plain_ids(model, PROMPT, COUNT)
    assert len(set(text)) > 5
    return model, text


@pytest.mark.parametrize("width", [3, 8])
def test_a_random_draft_changes_nothing(written: tuple[Any, list[int]], width: int) -> None:
    model, text = written
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts, mask_token_id=60)))
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=COUNT, stop_ids=NO_STOP, width=width)
    assert list(done.token_ids) == text
    assert done.stats.num_draft_tokens > 0
    target.close()


def test_parallel_streams_whose_mean_the_draft_names() -> None:
    model = tiny_hybrid("qwen4_exp_text", std=0.2)
    text = plain_ids(model, PROMPT, COUNT)
    target = HFTarget(model, (1, 3), tap_stream="mean")
    fits = {"target_layer_ids": (1, 3), "mask_token_id": 60}
    draft = random_draft(draft_config(target.facts, tap_stream="mean", **fits))
    done = run_one(Engine(target, draft), prompt_ids=PROMPT, max_new_tokens=COUNT, stop_ids=NO_STOP, width=8)
    assert list(done.token_ids) == text and done.stats.num_draft_tokens > 0
    silent = random_draft(draft_config(target.facts, **fits))
    with pytest.raises(PairError, match=r"does not say which stream of qwen4_exp_text it reads; name it .*: 'mean'$"):
        Engine(target, silent)
    verdicts = [
        next(rule.verdict for rule in pairing_rules(one.config, target.facts) if rule.name == "tap_stream")
        for one in (draft, silent)
    ]
    assert verdicts == ["pass", "unknown"]
    target.close()


def test_every_acceptance_length_changes_nothing(written: tuple[Any, list[int]]) -> None:
    model, text = written
    script = torch.randint(0, 8, (80,), generator=torch.Generator().manual_seed(3)).tolist()
    target = hf_target(model)
    draft: Any = Continuation(
        draft_config(target.facts, mask_token_id=60), [[*PROMPT, *text]], wrong=lambda step: script[step]
    )
    done = run_one(Engine(target, draft), prompt_ids=PROMPT, max_new_tokens=COUNT, stop_ids=NO_STOP, width=8)
    assert list(done.token_ids) == text
    assert sum(count > 0 for count in done.stats.accepted_histogram) >= 4
    target.close()


def test_beside_other_requests(written: tuple[Any, list[int]]) -> None:
    model, text = written
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts, mask_token_id=60)))
    requests = [
        Request(prompt_ids=PROMPT[: len(PROMPT) - n % 2], max_new_tokens=COUNT - n, stop_ids=NO_STOP, width=width)
        for n, width in enumerate((8, 3))
    ]
    shorter = plain_ids(model, PROMPT[:-1], COUNT)
    for n, done in enumerate(engine.run(requests)):
        assert list(done.token_ids) == (shorter if n % 2 else text)[: COUNT - n]
    target.close()
