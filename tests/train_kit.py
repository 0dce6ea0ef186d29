"""Small corpora, recipes and drafts for tests of training. Text and taps come from a real (tiny) target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.config import RopeConfig
from blockdraft.targets import HFTarget
from blockdraft.train import corpus
from blockdraft.train.blocks import Blocks
from blockdraft.train.corpus import Corpus, CorpusFacts, TextSequence, seal_shard
from blockdraft.train.loop import FrozenHead, Trainer
from blockdraft.train.recipe import (
    DraftRecipe,
    EvaluationRecipe,
    GqaRecipe,
    LossRecipe,
    OptimRecipe,
    PromptsRecipe,
    Recipe,
    TargetRecipe,
    TextRecipe,
)

TAPS = (0, 1, 2)


def make_recipe(*, draft=None, loss=None, optim=None, prompts=None, text=None, evaluation=None, **changes) -> Recipe:
    """A DFlash 2 recipe for `engine_kit.tiny_model`; dictionaries replace fields of the sections.

    A weighting, a kind of loss or a draft without selector brings the numbers that then have no effect to 0.
    """
    draft, loss = dict(draft or {}), dict(loss or {})
    if draft.get("selector_rank") == 0:
        loss = {"selector_weight": 0.0, **loss}
    if loss.get("selector_weight") == 0:
        loss = {"selector_start_step": 0, **loss}
    loss = {**WEIGHTINGS[loss.get("weighting", "dpace")], **loss}
    if loss.get("kind") == "kl":
        loss = {"kl_temperature": 1.0, **loss}
    if "num_layers" in draft:
        draft = {"windows": (0,) * draft["num_layers"], **draft}
    optim = dict(optim or {})
    if optim.get("num_steps", 40) <= 2:
        loss = {"selector_start_step": 0, **loss}
    recipe = Recipe(
        seed=3,
        max_length=128,
        save_every_steps=1000,
        target=TargetRecipe(name="tiny"),
        prompts=PromptsRecipe(
            files=(), self_written=0, openings=(), temperature=0.0, top_p=1.0, max_tokens=0, held_out=0
        ),
        text=TextRecipe(
            max_new_tokens=16,
            batch_size=4,
            temperature=0.0,
            top_p=1.0,
            every_turn=False,
            dtype="float32",
            features="disk",
            features_dtype="bfloat16",
            num_processes=1,
        ),
        draft=tiny_draft(),
        loss=LossRecipe(
            kind="ce",
            kl_temperature=0.0,
            weighting="dpace",
            dpace_smoothing=0.5,
            decay_gamma=0.0,
            selector_weight=1.0,
            selector_start_step=2,
            selector_detached=False,
            num_random_head_rows=6,
            full_head_from=1.0,
            head_chunk_blocks=0,
        ),
        optim=tiny_optim(),
        evaluation=EvaluationRecipe(every_steps=0, num_prompts=0, max_new_tokens=0, width=0),
    )
    sections = {
        "draft": draft, "loss": loss, "optim": optim, "prompts": prompts, "text": text, "evaluation": evaluation,
    }  # fmt: skip
    parts = {name: replace(getattr(recipe, name), **(given or {})) for name, given in sections.items()}
    return replace(recipe, **parts, **changes)


WEIGHTINGS = {
    "dpace": {"dpace_smoothing": 0.5, "decay_gamma": 0.0},
    "decay": {"dpace_smoothing": 0.0, "decay_gamma": 4.0},
    "none": {"dpace_smoothing": 0.0, "decay_gamma": 0.0},
}


def tiny_draft() -> DraftRecipe:
    return DraftRecipe(
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        block_size=5,
        mask_token_id=0,
        learned_mask_embedding=False,
        target_layer_ids=TAPS,
        tap_stream="plain",
        is_causal=False,
        windows=(0, 0),
        conv_kernel_size=2,
        conv_group_size=8,
        selector_rank=4,
        selector_top_k=4,
        initial="random",
        initial_layers=(),
        initial_draft="",
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=0.0,
        rope=RopeConfig(theta=10000.0),
        gqa=GqaRecipe(num_kv_heads=2, head_dim=8),
    )


def tiny_optim() -> OptimRecipe:
    return OptimRecipe(
        kind="adamw",
        num_steps=40,
        sequences_per_step=2,
        blocks_per_sequence=8,
        learning_rate=3e-3,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        schedule="wsd",
        warmup_fraction=0.1,
        decay_fraction=0.25,
        final_lr_fraction=0.05,
        taps_noise=0.0,
        autocast="none",
        device="cpu",
        sharding="none",
    )


def written_text(target: HFTarget, prompt: Sequence[int], num_new: int) -> tuple[list[int], Tensor]:
    """(prompt and greedy continuation, taps of every position; zeros at the last, which was never fed)."""
    row, ids, taps = target.new_row(), list(prompt), []
    fed = 0
    while len(ids) < len(prompt) + num_new:
        [scored] = target.forward([torch.tensor(ids[fed:])], [row])
        fed = len(ids)
        taps.append(scored.taps_TNE)
        ids.append(int(scored.logits_TV[-1].argmax()))
    target.free(row)
    taps.append(torch.zeros_like(taps[-1][:1]))
    return ids, torch.cat(taps)


def write_shard(path: Path, texts: Sequence[tuple[Sequence[int], Tensor, int]]) -> None:
    """One finished shard of (ids, taps, prompt length) in a folder that has a corpus.json."""
    sequences = [
        TextSequence(list(ids), [at >= num_prompt for at in range(len(ids))], taps, number)
        for number, (ids, taps, num_prompt) in enumerate(texts)
    ]
    seal_shard(path, corpus.write_shard(path, sequences, facts=CorpusFacts.read(path.parent)))


def facts_of(target: HFTarget, **changes) -> CorpusFacts:
    if changes.get("features_dtype") == "none":
        changes = {"tap_stream": "none", **changes}
    facts = CorpusFacts(
        target="tiny",
        weights_sha256="",
        tokenizer_sha256="",
        chat_template_sha256="",
        target_layer_ids=target.tap_layer_ids,
        tap_stream="plain",
        last_layer_id=None,
        features_dtype="bfloat16",
        target_hidden_size=target.facts.hidden_size,
        vocab_size=target.facts.vocab_size,
    )
    return replace(facts, **changes)


def make_corpus(
    folder: Path, model, prompts: Sequence[Sequence[int]], num_new: int, *, max_length: int = 128
) -> Corpus:
    """A corpus of one shard: what the target writes after each prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    target = HFTarget(model, TAPS)
    facts_of(target).write(folder)
    texts = [(*written_text(target, prompt, num_new), len(prompt)) for prompt in prompts]
    write_shard(folder / "a-0000.safetensors", texts)
    target.close()
    return Corpus(folder, max_length=max_length)


def head_of(model) -> FrozenHead:
    weights = (model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight)
    return FrozenHead(*(weight.detach().float() for weight in weights))


def make_trainer(recipe: Recipe, model, corpus: Corpus, folder: Path) -> Trainer:
    target = HFTarget(model)
    config = recipe.draft.config(target.facts)
    target.close()
    return Trainer(recipe, config, head_of(model), corpus, folder)


def blocks_at(ids_S: Sequence[int], anchors: Sequence[int], length: int) -> Blocks:
    """Blocks of one sequence at chosen anchors, all rows labelled where the sequence has a token."""
    anchors_1K = torch.tensor([list(anchors)])
    positions = anchors_1K[..., None] + torch.arange(length)
    exists = positions < len(ids_S)
    ids = torch.tensor(list(ids_S))[positions.clamp_max(len(ids_S) - 1)].where(exists, 0)
    weights = exists.float()
    weights[..., 0] = 0
    return Blocks(anchors_1K, ids, weights)
