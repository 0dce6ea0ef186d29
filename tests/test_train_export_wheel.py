"""What `export_draft` writes is read by the upstream wheel, and proposes the same there: tokens, steps and lengths.

The wheel is an oracle only; it loads the exported folder by its own `from_pretrained`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.draft import DraftModel
from blockdraft.engine import Engine, Request
from blockdraft.engine.load import builtin_draft
from blockdraft.errors import UnavailableError
from blockdraft.formats import zlab
from blockdraft.targets import HFTarget, ensure_target
from blockdraft.targets.loading import load_model
from blockdraft.text import load_tokenizer
from blockdraft.train.export import export_draft
from tiny_targets import VOCAB, tiny_model
from train_kit import TAPS, make_corpus, make_recipe, make_trainer, written_text

LIMIT = 2e-4
QUESTION = "A farmer has 3 fields of 12 rows with 8 plants each. How many plants are there? Please reason step by step."


@pytest.fixture(scope="module")
def wheel() -> ModuleType:
    pytest.importorskip("dflash", reason="the upstream wheel is a development dependency: dflash==0.1.0")
    module: ModuleType = pytest.importorskip("dflash.model")
    return module


@dataclass(frozen=True)
class Case:
    """An exported drafter with the target it was made for, a prompt and how much to write."""

    folder: Path
    model: Any
    target: HFTarget
    draft: DraftModel
    prompt: list[int]
    num_new: int


def exported(folder: Path, model: Any, taps: Sequence[int], prompt: list[int], num_new: int) -> Case:
    draft = DraftModel.from_checkpoint(zlab.read(folder), dtype=torch.float32)
    return Case(folder, model, HFTarget(model, taps), draft, prompt, num_new)


def tiny(root: Path, *, is_v2: bool) -> Case:
    """A drafter that was trained on two texts of a tiny target, and knows them well. Its last tap is not the target's
    last layer: there the wheel reads what the final norm puts out."""
    model = tiny_model("llama", dtype=torch.float32)
    zeros = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0)
    recipe = make_recipe(
        draft={"mask_token_id": VOCAB - 1, **({} if is_v2 else zeros)},
        optim={"num_steps": 60},
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    trainer = make_trainer(recipe, model, make_corpus(root / "corpus", model, prompts, 48), root / "run")
    trainer.run()
    export_draft(trainer, root / "draft", {"steps": trainer.step})
    return exported(root / "draft", model, TAPS, prompts[0], 40)


def builtin() -> Case:
    try:
        folder = ensure_target()
    except UnavailableError as error:
        pytest.skip(f"the built-in target is not here: {error}")
    taps = zlab.read(builtin_draft()).config.target_layer_ids
    prompt = load_tokenizer(folder).chat_ids([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    return exported(builtin_draft(), load_model(str(folder), taps, dtype=torch.float32), taps, prompt, 24)


@pytest.fixture(scope="module", params=["trained DFlash 2", "trained DFlash", "built-in"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "built-in":
        return builtin()
    return tiny(tmp_path_factory.mktemp("tiny"), is_v2=request.param == "trained DFlash 2")


def test_the_wheel_s_own_loop_writes_the_same_text_in_the_same_steps(
    wheel: ModuleType, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    [ours] = Engine(case.target, case.draft).run(
        [Request(prompt_ids=case.prompt, max_new_tokens=case.num_new, speculate=True)]
    )
    monkeypatch.setattr(wheel, "_cuda_time", time.perf_counter)  # its loop counts steps only with a CUDA clock
    theirs = wheel.dflash_generate(
        twin_of(wheel, case),
        case.model,
        torch.tensor([case.prompt]),
        case.num_new,
        list(case.target.facts.eos_token_ids),
        return_stats=True,
    )
    assert list(ours.token_ids) == theirs.output_ids[0, len(case.prompt) :].tolist()
    steps = [event.step for event in ours.events[1:]]
    assert [steps.count(step) for step in dict.fromkeys(steps)] == theirs.acceptance_lengths
    assert ours.stats.num_accepted_draft_tokens > 0


@torch.no_grad()
def test_the_wheel_proposes_the_same_in_every_round(wheel: ModuleType, case: Case) -> None:
    """Rounds along a text that the target wrote: 1 to a whole block of committed tokens between two proposals."""
    length = case.draft.config.block_size
    ids, taps_SNE = written_text(case.target, case.prompt, case.num_new)
    twin, cache = twin_of(wheel, case), case.draft.new_cache()
    theirs = wheel._make_cache(twin.config)
    head = case.model.get_output_embeddings()
    start, num_right = 0, 0
    for round_, num_new in enumerate([len(case.prompt), 1, 3, length, 2, length - 1, 1]):
        taps_CNE = taps_SNE[start : start + num_new]
        start += num_new
        anchor = ids[start]
        block = [anchor, *[case.draft.config.mask_token_id] * (length - 1)]
        want_1LD = twin(
            target_hidden=taps_CNE.flatten(1)[None],
            noise_embedding=case.model.get_input_embeddings()(torch.tensor([block])),
            position_ids=torch.arange(start - num_new, start + length)[None],
            past_key_values=theirs,
            use_cache=True,
        )
        wheel._crop_to(theirs, start)
        case.draft.inject(taps_CNE, cache)
        got_1LD = case.draft(case.draft.noise([anchor], length, case.target.embed), [cache])
        torch.testing.assert_close(got_1LD, want_1LD, atol=LIMIT, rtol=LIMIT)
        proposal = case.draft.propose(got_1LD[0], anchor, head(got_1LD[0, 1:]), 0.0, None)
        expected = wheel_ids(twin, want_1LD[:, 1:], anchor, head)
        assert proposal.ids_G.tolist() == expected, f"round {round_}"
        num_right += sum(a == b for a, b in zip(expected, ids[start + 1 : start + length], strict=False))
    assert num_right > 0, "none of these proposals is the target's token: the comparison would show little"


# ---- the wheel's side ------------------------------------------------------------------------------------------------
def twin_of(wheel: ModuleType, case: Case) -> Any:
    """The wheel's model of the exported folder, loaded by the wheel."""
    kind = wheel.DFlashDraftModel if case.draft.config.selector is None else wheel.DFlash2DraftModel
    twin, info = kind.from_pretrained(case.folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (twin.block_size, twin.mask_token_id) == (case.draft.config.block_size, case.draft.config.mask_token_id)
    assert list(twin.target_layer_ids) == list(case.draft.config.target_layer_ids)
    return twin.eval()


def wheel_ids(twin: Any, hidden_1GD: Tensor, anchor: int, head: Any) -> list[int]:
    if hasattr(twin, "candidate_selector"):
        ids, *_ = twin.propose(hidden_1GD, torch.tensor([anchor]), head, 0.0)
    else:
        ids = twin.compute_logits(hidden_1GD, head).argmax(-1)
    return ids[0].tolist()
