"""The loss of a step against plain loops over its blocks and slots, in float64; what each setting switches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from blockdraft.errors import ConfigError
from blockdraft.targets import HFTarget
from blockdraft.train.blocks import Blocks, block_hidden
from blockdraft.train.head import FrozenHead, HeadRows
from blockdraft.train.losses import dpace_weights
from blockdraft.train.objective import Objective
from blockdraft.train.parallel import Parallel
from engine_kit import random_draft, tiny_model
from train_kit import TAPS, blocks_at, make_recipe, written_text

NONE = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0)
ANCHORS, BLOCK, STEP = [3, 5, 9, 18, 21], 5, 7


@pytest.fixture(scope="module")
def scene():
    """(target model, its text, taps of it, the logits it gave at every position)."""
    model = tiny_model()
    target = HFTarget(model, TAPS)
    ids, taps = written_text(target, [1, 2, 3], 20)
    row = target.new_row()
    [scored] = target.forward([torch.tensor(ids[:-1])], [row], num_logits=len(ids) - 1)
    return model, ids, taps[None].double(), scored.logits_TV


def objective_of(scene, **changes) -> Objective:
    model, _, _, _ = scene
    recipe = make_recipe(**changes)
    target = HFTarget(model)
    draft = random_draft(recipe.draft.config(target.facts)).requires_grad_(True)
    rows = (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight)
    head = FrozenHead(*(row.detach() for row in rows), final_norm_eps=model.config.rms_norm_eps)
    objective = Objective(recipe, draft, head, dtype=torch.float64)
    objective.use_rows(HeadRows.draw(torch.arange(20), 32, 6, torch.Generator().manual_seed(0)))
    return objective


def loss_of(objective: Objective, scene, blocks: Blocks, step: int = STEP):
    taps_BSNE = scene[2]
    sums = objective.sums(taps_BSNE, blocks, step, taps_BSNE[:, :, -1])
    return objective.total(sums, step, Parallel.single())


def plain_logits(objective: Objective, scene, blocks: Blocks):
    """(hidden, logits over the drawn rows) of all proposals, by the whole head at once."""
    hidden = block_hidden(objective.model, objective._embed_VE, scene[2], blocks)[:, 1:]
    logits = objective.model.scale_logits(hidden @ scene[0].lm_head.weight.detach().T)
    return hidden, logits[..., objective.rows.ids_V]


def gradients(loss, model) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, materialize_grads=True)
    return dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


def labelled(scene, objective: Objective):
    """(blocks, places of the labels among the rows, weights): one label has no row, and is not trained."""
    blocks = blocks_at(scene[1], ANCHORS, BLOCK)
    places = objective.rows.index_of[blocks.ids_BKL[0, :, 1:]]
    return blocks, places, blocks.weights_BKL[0, :, 1:] * (places >= 0)


@pytest.mark.parametrize("weighting", ["dpace", "decay", "none"])
@pytest.mark.parametrize(("kind", "temperature"), [("ce", 1.0), ("kl", 1.0), ("kl", 2.0)])
def test_loss_and_gradients_are_a_loop_over_slots(scene, weighting: str, kind: str, temperature: float) -> None:
    """The teacher's row of the label at position p is the target's own logits at p - 1."""
    loss = {"weighting": weighting, "kind": kind, **({"kl_temperature": temperature} if kind == "kl" else {})}
    objective = objective_of(scene, draft=NONE, loss={**loss, "head_chunk_blocks": 2})
    blocks, places, weights = labelled(scene, objective)
    _, logits = plain_logits(objective, scene, blocks)
    log_weight, rows, teacher_logits = objective.rows.log_weight_V, objective.rows.ids_V, scene[3]
    nll = torch.stack(
        [
            F.cross_entropy(row + log_weight, place.clamp_min(0), reduction="none")
            for row, place in zip(logits, places, strict=True)
        ]
    )
    slot_weights = {
        "dpace": dpace_weights(nll, weights, 0.5),
        "decay": weights * torch.tensor([math.exp(-k / 4.0) for k in range(BLOCK - 1)]),
        "none": weights,
    }[weighting]
    total = torch.zeros((), dtype=torch.float64)
    for x, anchor in enumerate(ANCHORS):
        for g in range(BLOCK - 1):
            if not weights[x, g]:
                continue
            value = nll[x, g]
            if kind == "kl":
                of_teacher = teacher_logits[anchor + g, rows] / temperature + log_weight
                log_p, log_q = of_teacher.log_softmax(-1), (logits[x, g] / temperature + log_weight).log_softmax(-1)
                value = (log_p.exp() * (log_p - log_q)).sum() * temperature**2
            total = total + slot_weights[x, g] * value
    expected = total / slot_weights.sum()
    got, metrics = loss_of(objective, scene, blocks)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)  # slot weights are float32
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
    mine, plain = gradients(got, objective.model), gradients(expected, objective.model)
    for name in mine:
        torch.testing.assert_close(mine[name], plain[name], rtol=1e-5, atol=1e-8)
    if kind == "kl":
        right = [int(teacher_logits[a + g, rows].argmax()) == int(places[x, g]) for x, a in enumerate(ANCHORS)
                 for g in range(BLOCK - 1) if weights[x, g]]  # fmt: skip
        assert metrics["teacher_agrees"] == pytest.approx(sum(right) / len(right))
        assert metrics["nll"] == pytest.approx(float((nll.detach() * weights).sum() / weights.sum()), rel=1e-6)
        assert sum(right) / len(right) > 0.7  # the text is the target's first choice wherever that has a row


def test_the_selectors_loss_is_a_loop_over_candidates(scene) -> None:
    loss = {"selector_start_step": STEP, "weighting": "none", "selector_weight": 0.7}
    objective = objective_of(scene, draft={"selector_top_k": 10}, loss=loss)
    blocks, _, weights = labelled(scene, objective)
    hidden, logits = plain_logits(objective, scene, blocks)
    selector, ids = objective.model.candidate_selector, blocks.ids_BKL[0]
    total, count, path, oracle = 0.0, 0, 0, 0
    for x in range(len(ANCHORS)):
        alive = alive_oracle = True
        for g in range(BLOCK - 1):
            values, slots = logits[x, g].topk(10)
            candidates = objective.rows.ids_V[slots]
            left = selector.predecessor_codebook[ids[x, g]] * (selector.hidden_projection.weight @ hidden[x, g])
            scores = values + selector.successor_codebook[candidates] @ left
            hit = (candidates == ids[x, g + 1]).nonzero()[:, 0]
            if weights[x, g] and len(hit):
                total = total + F.cross_entropy(scores[None], hit)
                count += 1
            alive = alive and bool(weights[x, g]) and int(candidates[scores.argmax()]) == int(ids[x, g + 1])
            alive_oracle = alive_oracle and bool(weights[x, g]) and len(hit) > 0
            path, oracle = path + alive, oracle + alive_oracle
    assert 0 < count < weights.sum()
    base, _ = loss_of(objective, scene, blocks, step=STEP - 1)
    both, metrics = loss_of(objective, scene, blocks)
    torch.testing.assert_close(both - base, 0.7 * total / count, rtol=1e-6, atol=0)
    assert metrics["recall"] == pytest.approx(count / float(weights.sum()))
    assert metrics["selector_prefix"] == pytest.approx(1 + path / len(ANCHORS), abs=1e-4)
    assert metrics["oracle_prefix"] == pytest.approx(1 + oracle / len(ANCHORS), abs=1e-4)
    mine = gradients(both - base, objective.model)
    plain = gradients(0.7 * total / count, objective.model)
    for name in mine:
        torch.testing.assert_close(mine[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_detached_selector_leaves_the_backbone_alone(scene, is_detached: bool) -> None:
    loss = {"selector_start_step": STEP, "selector_detached": is_detached}
    objective = objective_of(scene, draft={"selector_top_k": 10}, loss=loss)
    blocks, _, _ = labelled(scene, objective)
    alone = gradients(loss_of(objective, scene, blocks, step=STEP - 1)[0], objective.model)
    joint = gradients(loss_of(objective, scene, blocks)[0], objective.model)
    for name in alone:
        is_same = torch.allclose(alone[name], joint[name], rtol=1e-12, atol=0)
        if name.startswith("candidate_selector."):
            assert not alone[name].any() and joint[name].any()
        else:
            assert is_same == is_detached, name


def test_sums_of_two_halves_are_those_of_the_whole(scene) -> None:
    """What makes the loss independent of how blocks are dealt out: no part is a mean."""
    objective = objective_of(scene, loss={"selector_start_step": STEP})
    blocks, _, _ = labelled(scene, objective)
    halves = [Blocks(*(t[:, part] for t in (blocks.anchors_BK, blocks.ids_BKL, blocks.weights_BKL)))
              for part in (slice(0, 2), slice(2, None))]  # fmt: skip
    whole, one, other = (objective.sums(scene[2], part, STEP) for part in (blocks, *halves))
    for name in whole.parts:
        torch.testing.assert_close(whole.parts[name], one.parts[name] + other.parts[name], rtol=1e-6, atol=0)
    for name in whole.counts:
        torch.testing.assert_close(whole.counts[name], one.counts[name] + other.counts[name], rtol=1e-6, atol=0)


def test_a_slot_without_a_label_is_not_trained(scene) -> None:
    objective = objective_of(scene, draft=NONE)
    blocks, _, _ = labelled(scene, objective)
    before, _ = loss_of(objective, scene, blocks)
    ids = blocks.ids_BKL.clone()
    ids[0, -1, 3:] = torch.tensor([11, 12])  # behind the end of the text
    after, _ = loss_of(objective, scene, replace(blocks, ids_BKL=ids))
    assert torch.equal(before, after)
    nothing, metrics = loss_of(objective, scene, replace(blocks, weights_BKL=torch.zeros_like(blocks.weights_BKL)))
    assert float(nothing.detach()) == 0 and metrics["prefix"] == 1


def test_a_teacher_needs_the_last_layer_and_the_final_norm(scene) -> None:
    objective = objective_of(scene, loss={"kind": "kl"})
    blocks, _, _ = labelled(scene, objective)
    with pytest.raises(ConfigError, match="corpus does not keep the target's last layer"):
        objective.sums(scene[2], blocks, STEP)
    head = replace(objective._head, final_norm_eps=None)
    with pytest.raises(ConfigError, match=r"the target's final norm, and it was not found; set loss\.kind=ce"):
        Objective(objective.recipe, objective.model, head, dtype=torch.float64)
