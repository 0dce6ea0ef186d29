"""An evaluation serves as the engine does, explains each step as a loop by hand does, and leaves the trainer alone."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from blockdraft.draft import DraftModel
from blockdraft.errors import CheckpointError, ConfigError, PairError, RequestError
from blockdraft.stats import pooled_acceptance_length
from blockdraft.targets import HFTarget
from blockdraft.train.blocks import block_hidden
from blockdraft.train.evaluate import FORMULAS, EvalResult, Evaluator
from blockdraft.train.loop import STATE_FILE, read_state
from blockdraft.train.replay import ReplayedStep, ServedStep, position_counts, totals
from engine_kit import draft_config, plain_ids, random_draft, tiny_model
from train_kit import TAPS, blocks_at, head_of, make_corpus, make_recipe, make_trainer

PROMPTS = [[1, 2, 3], [7, 5, 9, 4], [11, 3], [20, 21, 22]]
WIDTH, NUM_NEW = 5, 24


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> DraftModel:
    """A draft that is right now and then, its selector made noisy, so that every kind of failure occurs."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = make_corpus(folder / "corpus", model, PROMPTS, NUM_NEW)
    recipe = make_recipe(optim={"num_steps": 40, "blocks_per_sequence": 20, "learning_rate": 1e-2})
    trainer = make_trainer(recipe, model, corpus, folder / "run")
    trainer.run()
    selector, generator = trainer.model.candidate_selector, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for book in (selector.predecessor_codebook, selector.successor_codebook):
            book.copy_(torch.randn(book.shape, generator=generator) * 0.6)
        selector.hidden_projection.weight.copy_(torch.randn(4, 32, generator=generator) * 0.3)
    return trainer.model


def evaluate(model, draft: DraftModel, **changes) -> EvalResult:
    settings = {"width": WIDTH, "max_new_tokens": NUM_NEW, **changes}
    target = HFTarget(model, draft.config.target_layer_ids)
    try:
        return Evaluator(target, draft.config, PROMPTS, **settings).run(draft)
    finally:
        target.close()


def by_hand(model, draft: DraftModel, prompt: list[int], width: int) -> list[tuple[int, list[int], list[bool]]]:
    """(anchor, ranks, picked) of each step: the whole text at once, no cache, no engine, the training forward.

    The text is the target's own, so a step accepts the leading run of proposals that stand in it.
    """
    target = HFTarget(model, TAPS)
    draft = DraftModel.from_checkpoint(_Copy(draft), dtype=torch.float64)
    text = prompt + plain_ids(model, prompt, NUM_NEW)
    row = target.new_row()
    [scored] = target.forward([torch.tensor(text)], [row])
    target.close()
    head, mask, steps = head_of(model), draft.config.mask_token_id, []
    anchor = len(prompt)
    while anchor < len(text) - 1:
        length = min(width, len(text) - 1 - anchor)  # the step's own token needs room too
        found = (anchor, [], [])
        if length > 1:
            blocks = blocks_at(text, [anchor], length)
            with torch.no_grad():
                hidden = block_hidden(draft, head.embed_VE.double(), scored.taps_TNE[None], blocks)[0]
                logits = hidden[1:] @ head.head_VE.double().T
                walk = draft.propose(hidden, text[anchor], logits, 0.0, None, exclude_ids=(mask,)).ids_G.tolist()
            logits[:, mask] = -torch.inf
            gold = text[anchor + 1 : anchor + length]
            ranks = [
                row.argsort(descending=True, stable=True).tolist().index(g) for row, g in zip(logits, gold, strict=True)
            ]
            found = (anchor, ranks, [a == b for a, b in zip(walk, gold, strict=True)])
        steps.append(found)
        anchor += sum(takewhile(bool, found[2])) + 1
    return steps


class _Copy:
    def __init__(self, draft: DraftModel) -> None:
        self.config = draft.config
        self.tensors = {name: tensor.clone() for name, tensor in draft.state_dict().items()}


# ---- what is served, and why a step ended ----------------------------------------------------------------------------
@pytest.mark.parametrize("width", [WIDTH, 3])
def test_steps_and_their_failures_are_those_of_a_loop_by_hand(model, trained, width: int) -> None:
    result = evaluate(model, trained, width=width, max_rows=3)
    for prompt, text in zip(PROMPTS, result.texts, strict=True):
        assert list(text.token_ids) == plain_ids(model, prompt, NUM_NEW, stop=frozenset({31}))
        last = len(prompt) + len(text.token_ids) - 1
        expected = [step for step in by_hand(model, trained, prompt, width) if step[0] < last]
        assert [(s.served.anchor, list(s.ranks), list(s.picked)) for s in text.steps] == expected
    assert {text.finish_reason for text in result.texts} == {"length", "stop"}
    kinds = [sum(getattr(c, name) for c in result.positions) for name in ("picked", "missed", "misranked")]
    assert min(kinds) > 0
    assert len({step.walk_accepted for text in result.texts for step in text.steps}) > 2


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_the_replayed_walk_accepts_what_the_engine_counted(model, trained, v2: bool, rows: int) -> None:
    draft = trained if v2 else without_selector(trained)
    result = evaluate(model, draft, max_rows=rows)
    check_replay(result)
    assert result.num_steps_replayed_otherwise == 0
    assert result.list_size == (4 if v2 else 16)
    if not v2:
        assert result.selector_gain.estimate == 0


def check_replay(result: EvalResult) -> None:
    for text in result.texts:
        text.stats.check()
        assert len(text.steps) == text.stats.num_steps
        for step in text.steps:
            assert step.walk_accepted == step.served.num_accepted
            assert len(step.ranks) == step.served.num_draft
        assert sum(s.served.num_emitted for s in text.steps) + 1 == len(text.token_ids)
    walk, _, _ = totals([s for text in result.texts for s in text.steps], result.list_size)
    num_steps = sum(len(text.steps) for text in result.texts)
    assert result.acceptance_length == 1 + walk / num_steps == pooled_acceptance_length(result.stats)


def without_selector(draft: DraftModel) -> DraftModel:
    config = replace(draft.config, conv=None, selector=None)
    plain = DraftModel(config)
    plain.load_state_dict({name: t for name, t in draft.state_dict().items() if name in plain.state_dict()})
    return plain


def test_a_text_that_ends_inside_a_block_is_replayed_past_its_end(trained) -> None:
    """The engine counts proposals beyond an end id that the target would have written; so does the replay."""
    num_clipped = 0
    for end in plain_ids(tiny_model(), PROMPTS[0], NUM_NEW)[4:8]:
        model = tiny_model()
        model.config.eos_token_id = model.generation_config.eos_token_id = end
        result = evaluate(model, trained)
        check_replay(result)
        num_clipped += sum(stats.num_clipped_tokens for stats in result.stats)
    assert num_clipped > 0


def test_plain_steps_past_the_drafts_length_count_as_steps(model, trained) -> None:
    short = DraftModel(replace(trained.config, max_position_embeddings=16))
    short.load_state_dict(trained.state_dict())
    result = evaluate(model, short)
    check_replay(result)
    assert sum(stats.num_plain_steps for stats in result.stats) > 8
    assert sum(not step.ranks for text in result.texts for step in text.steps) > 8


def test_a_gold_mask_id_is_never_in_a_list(trained) -> None:
    """The mask id is not proposed, hence a target that writes it is missed, whatever the logits say."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[[0, 9]] = model.lm_head.weight[[9, 0]]
        model.lm_head.weight[0] *= 3
    result = evaluate(model, trained)
    check_replay(result)
    at_mask = 0
    for prompt, text in zip(PROMPTS, result.texts, strict=True):
        ids = prompt + plain_ids(model, prompt, NUM_NEW)
        for step in text.steps:
            for index, rank in enumerate(step.ranks):
                if ids[step.served.anchor + 1 + index] == 0:
                    at_mask += 1
                    assert rank == 31
    assert at_mask > 5


# ---- numbers ---------------------------------------------------------------------------------------------------------
def step_of(ranks: list[int], picked: list[bool]) -> ReplayedStep:
    accepted = sum(takewhile(bool, picked))
    return ReplayedStep(ServedStep(0, len(ranks), accepted, accepted + 1), tuple(ranks), tuple(picked))


def test_counts_by_position_of_a_worked_example() -> None:
    steps = [
        step_of([0, 0, 5], [True, True, False]),  # missed at 3
        step_of([1, 0, 0], [True, False, True]),  # the selector won position 1, misranked at 2
        step_of([0, 2], [False, True]),  # misranked at 1
        step_of([0, 0, 0], [True, True, True]),
        step_of([], []),
    ]
    assert totals(steps, 4) == (2 + 1 + 0 + 3, 2 + 0 + 1 + 3, 2 + 3 + 2 + 3)
    one, two, three = position_counts(steps, 4)
    assert (one.proposed, two.proposed, three.proposed) == (4, 4, 3)
    assert [(c.reached, c.picked, c.missed, c.misranked) for c in (one, two, three)] == [
        (4, 3, 0, 1), (3, 2, 0, 1), (2, 1, 1, 0),
    ]  # fmt: skip
    assert [(c.base_reached, c.base_right) for c in (one, two, three)] == [(4, 3), (3, 2), (2, 1)]
    assert (one.in_top, two.in_top, three.in_top) == ({1: 3, 4: 4, 16: 4}, {1: 3, 4: 4, 16: 4}, {1: 2, 4: 2, 16: 3})


def test_the_summary_is_its_formulas(model, trained) -> None:
    result = evaluate(model, trained)
    summary, steps = result.summary(), [s for text in result.texts for s in text.steps]
    assert set(FORMULAS) <= set(summary)
    length = summary["acceptance_length"]
    assert length["low"] < length["estimate"] == 1 + sum(s.walk_accepted for s in steps) / len(steps) < length["high"]
    walk, base, oracle = totals(steps, 4)
    assert base < oracle and walk < oracle
    assert summary["base_acceptance_length"] == 1 + base / len(steps)
    assert summary["oracle_acceptance_length"] == 1 + oracle / len(steps)
    assert summary["selector_gain"]["estimate"] == pytest.approx((walk - base) / len(steps))
    ranks = [rank for step in steps for rank in step.ranks]
    assert summary["recall"] == {str(m): sum(r < m for r in ranks) / len(ranks) for m in (1, 4, 16)}
    assert summary["miss_rate"] + summary["misrank_rate"] + summary["full_rate"] == pytest.approx(1)
    full = sum(all(step.picked) for step in steps if step.ranks)
    assert summary["full_rate"] == pytest.approx(full / sum(1 for s in steps if s.ranks))
    by_position = [c.picked / c.reached for c in result.positions]
    assert summary["conditional_acceptance"] == pytest.approx(by_position)
    assert all(c.reached == c.picked + c.missed + c.misranked for c in result.positions)
    assert summary["serve_s"] > 0 and summary["replay_s"] > 0


def test_json_holds_everything_and_reads_back(model, trained) -> None:
    result = evaluate(model, trained)
    raw = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert raw["formulas"] == FORMULAS
    assert {key: raw[key] for key in result.summary()} == json.loads(json.dumps(result.summary()))
    assert [tuple(prompt["token_ids"]) for prompt in raw["prompts"]] == [text.token_ids for text in result.texts]
    assert sum(prompt["walk_accepted"] for prompt in raw["prompts"]) == sum(c["picked"] for c in raw["positions"])
    assert raw["positions"][0]["in_top"].keys() == {"1", "4", "16"}


def test_texts_without_a_step_have_no_numbers(model, trained) -> None:
    target = HFTarget(model, TAPS)
    result = Evaluator(target, trained.config, [[1, 2]], width=2, max_new_tokens=1).run(trained)
    target.close()
    assert result.acceptance_length is None
    summary = json.loads(json.dumps(result.summary(), allow_nan=False))
    assert summary["base_acceptance_length"] is summary["selector_gain"] is summary["recall"]["4"] is None


# ---- the trainer is left alone ---------------------------------------------------------------------------------------
def test_a_run_is_the_same_bit_for_bit_with_and_without_evaluations(tmp_path) -> None:
    model = tiny_model(dtype=torch.float32)
    recipe = make_recipe(
        optim={"num_steps": 12},
        prompts={"files": ("prompts.jsonl",), "held_out": 2},
        evaluation={"every_steps": 4, "num_prompts": 2, "max_new_tokens": 8, "width": 4},
    )
    corpus = make_corpus(tmp_path / "corpus", model, PROMPTS, 20)
    lengths, runs = [], []
    for name in ("quiet", "judged"):
        torch.manual_seed(5)
        trainer = make_trainer(recipe, model, corpus, tmp_path / name)
        target = HFTarget(model, TAPS)
        evaluator = Evaluator(target, trainer.config, PROMPTS[:2], width=4, max_new_tokens=8)

        def judge(judged, evaluator=evaluator) -> float:
            before = [(p.requires_grad, p.dtype, p.grad is None) for p in judged.model.parameters()]
            lengths.append(evaluator.run(judged.served).acceptance_length)
            assert [(p.requires_grad, p.dtype, p.grad is None) for p in judged.model.parameters()] == before
            return lengths[-1]

        trainer.run(on_evaluate=judge if name == "judged" else None)
        target.close()
        runs.append((read_state(trainer.folder / STATE_FILE), torch.random.get_rng_state()))
    assert len(lengths) == 3 and min(lengths) >= 1
    (quiet, quiet_random), (judged, judged_random) = runs
    assert torch.equal(quiet_random, judged_random)
    assert torch.equal(quiet["generator"], judged["generator"])
    assert quiet["order"] == judged["order"]
    for part in ("model", "optimiser"):
        assert_same(quiet[part], judged[part])


def assert_same(one, other) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


def test_weights_in_float32_are_served_in_the_targets_precision(model, trained) -> None:
    assert trained.dtype == torch.float32
    wide = evaluate(model, trained)
    narrow = evaluate(tiny_model(dtype=torch.float32), trained)
    assert wide.num_steps_replayed_otherwise == narrow.num_steps_replayed_otherwise == 0
    assert [text.token_ids for text in narrow.texts] == [text.token_ids for text in wide.texts]


# ---- settings that cannot work, before anything runs -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "kind", "named"),
    [
        ({"prompts": []}, ConfigError, "no prompt to evaluate on"),
        ({"prompts": [[1] * 500]}, RequestError, "prompt of 500 tokens"),
        ({"prompts": [[1, 99]]}, RequestError, "holds 99"),
        ({"width": 9}, RequestError, "trained for at most 8"),
        ({"max_new_tokens": 0}, RequestError, "max_new_tokens is 0"),
        ({"taps": (0, 2)}, PairError, r"taps layers \[0, 2\], the draft reads \[0, 1, 2\]"),
    ],
)
def test_wrong_settings_are_refused_at_once(model, changes, kind, named: str) -> None:
    settings = {"prompts": PROMPTS, "width": 4, "max_new_tokens": 16, "taps": TAPS, **changes}
    target = HFTarget(model, settings.pop("taps"))
    with pytest.raises(kind, match=named):
        Evaluator(target, draft_config(target.facts), settings.pop("prompts"), **settings)
    target.close()


def test_weights_that_are_not_numbers_are_refused(model) -> None:
    target = HFTarget(model, TAPS)
    draft = random_draft(draft_config(target.facts))
    draft.fc.weight[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="logits are not finite at position 3"):
        Evaluator(target, draft.config, PROMPTS, width=4, max_new_tokens=8).run(draft)
    target.close()
