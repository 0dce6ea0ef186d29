"""What must hold before the first step: no look ahead, no look aside, and training is the forward pass of serving.

Owns the gates and the small copy of a draft's shape that they run on: same family, attention, windows, causality,
convolution and selector at small widths, so that all of them together take seconds. Numbers are float64 and weights
random, except where a fresh or a trained draft is the point.

Letters: B sequences, S positions, K blocks, L block length, N taps, E target width, D draft width, V vocabulary.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.config import AttentionConfig, DraftConfig, GqaConfig, LayerConfig, MlaConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import BlockdraftError, ConfigError
from blockdraft.train.blocks import Blocks, block_hidden
from blockdraft.train.evaluate import Evaluator
from blockdraft.train.initial import initialise_draft
from blockdraft.train.loop import Trainer
from blockdraft.train.parallel import Parallel
from blockdraft.train.recipe import Recipe
from blockdraft.train.toy_target import OneText, ToyTarget

__all__ = ["GateResult", "check_gates", "run_gates", "small_copy"]

WIDTH, VOCAB, MAX_LENGTH = 32, 48, 96
NUM_TEXT, NUM_PROMPT = 24, 3
TOLERANCE = 1e-9
OVERFIT_STEPS, SERVE_EVERY, NUM_BY_HEART = 240, 20, 25


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate and how it came out. `detail` says what was seen, and what to look at if it failed."""

    name: str
    passed: bool
    seconds: float
    detail: str


class _Failed(Exception):
    """A gate's condition does not hold."""


def check_gates(
    config: DraftConfig, *, recipe: Recipe, seed: int, on_gate: Callable[[GateResult], None] | None = None
) -> None:
    """Run every gate; a ConfigError names those that failed. `on_gate` gets each result as it comes."""
    failed = [result for result in _results(config, recipe, seed, on_gate) if not result.passed]
    if failed:
        what = "; ".join(f"{result.name}: {result.detail}" for result in failed)
        raise ConfigError(f"the trainer does not pass its gates, so no step was taken: {what}")


def run_gates(config: DraftConfig, *, recipe: Recipe, seed: int) -> list[GateResult]:
    """Every gate that concerns this draft, on a small copy of its shape, trained as the recipe says."""
    return list(_results(config, recipe, seed, None))


def _results(
    config: DraftConfig, recipe: Recipe, seed: int, on_gate: Callable[[GateResult], None] | None
) -> Iterator[GateResult]:
    bench = _Bench(small_copy(config), recipe, seed)
    for name, gate in _GATES.items():
        if gate is _fresh_selector_adds_nothing and config.family == "dflash":
            continue
        started = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            try:
                passed, detail = True, gate(bench)
            except (_Failed, BlockdraftError) as failure:
                passed, detail = False, str(failure)
        result = GateResult(name, passed, time.perf_counter() - started, detail)
        if on_gate is not None:
            on_gate(result)
        yield result


# ---- the small copy --------------------------------------------------------------------------------------------------
def small_copy(config: DraftConfig) -> DraftConfig:
    """The same draft with small widths: one layer of every kind (two where there is one kind), at most three taps."""
    num_taps = min(config.num_taps, 3)
    block_size = min(config.block_size, 5)
    conv, selector = config.conv, config.selector
    return replace(
        config,
        hidden_size=WIDTH,
        intermediate_size=48,
        vocab_size=VOCAB,
        max_position_embeddings=MAX_LENGTH,
        attention=_small_attention(config.attention),
        layers=_small_layers(config, block_size),
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=tuple(range(num_taps)),
        num_target_layers=num_taps,
        target_hidden_size=WIDTH,
        tap_stream=None,  # the toy target has one
        conv=None if conv is None else replace(conv, group_size=math.gcd(conv.group_size, 8)),
        selector=None
        if selector is None
        else replace(selector, rank=min(selector.rank, 8), top_k=min(selector.top_k, 4)),
    )


def _small_attention(attention: AttentionConfig) -> AttentionConfig:
    if isinstance(attention, GqaConfig):
        num_kv_heads = min(attention.num_kv_heads, 2)
        groups = min(attention.num_heads // attention.num_kv_heads, 2)
        return replace(attention, num_heads=num_kv_heads * groups, num_kv_heads=num_kv_heads, head_dim=8)
    assert isinstance(attention, MlaConfig)
    return replace(
        attention,
        num_heads=min(attention.num_heads, 4),
        q_lora_rank=None if attention.q_lora_rank is None else 12,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )


def _small_layers(config: DraftConfig, block_size: int) -> tuple[LayerConfig, ...]:
    """Every kind of layer once, in order; windows in their order, but small enough to hide part of a short text."""
    windows = sorted({layer.window for layer in config.layers if layer.window is not None})
    small = {
        window: min(window, block_size - 1) if window < config.block_size else block_size + 2 + 3 * rank
        for rank, window in enumerate(windows)
    }
    kinds = [
        layer if layer.window is None else replace(layer, window=small[layer.window])
        for layer in dict.fromkeys(config.layers)
    ]
    return tuple(kinds * 2 if len(kinds) == 1 and config.num_layers > 1 else kinds)


class _Bench:
    """A small draft with random weights, its target, and two texts with their taps; the same for every gate."""

    def __init__(self, config: DraftConfig, recipe: Recipe, seed: int) -> None:
        self.config, self.recipe, self.seed = config, recipe, seed
        self.target = ToyTarget(config, seed=seed)
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            self.model = DraftModel(config, has_mask_embedding=recipe.draft.learned_mask_embedding)
        self.model = self.model.double().requires_grad_(False)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.2 * self.normal(*parameter.shape))
        self.ids = [torch.randint(1, VOCAB, (NUM_TEXT,), generator=self.generator).tolist() for _ in range(2)]
        self.taps = [self.normal(NUM_TEXT, config.num_taps, WIDTH) for _ in range(2)]
        self.anchors = (1, 3, 4, 4, 8, 14, 17, NUM_TEXT - 2)  # close, repeated, and one whose block crosses the end

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def hidden(
        self,
        ids: Sequence[int] | None = None,
        taps_SNE: Tensor | None = None,
        anchors: Sequence[int] | None = None,
        *,
        model: DraftModel | None = None,
        length: int | None = None,
    ) -> Tensor:
        """[K, L, D] of blocks of one text by the training forward; the first text at all anchors by default."""
        taps_SNE = self.taps[0] if taps_SNE is None else taps_SNE
        blocks = self.blocks(self.ids[0] if ids is None else ids, anchors or self.anchors, length)
        with torch.no_grad():
            return block_hidden(model or self.model, self.target.embed_VE, taps_SNE[None], blocks)

    def blocks(self, ids: Sequence[int], anchors: Sequence[int], length: int | None = None) -> Blocks:
        anchors_1K = torch.tensor([list(anchors)])
        positions_1KL = anchors_1K[..., None] + torch.arange(length or self.config.block_size)
        exists_1KL = positions_1KL < len(ids)
        ids_1KL = torch.tensor(list(ids))[positions_1KL.clamp_max(len(ids) - 1)].where(exists_1KL, 0)
        weights_1KL = exists_1KL.float()
        weights_1KL[..., 0] = 0
        return Blocks(anchors_1K, ids_1KL, weights_1KL)

    def noise(self, anchor_ids: Sequence[int], length: int) -> Tensor:
        return self.model.noise(anchor_ids, length, self.target.embed)


# ---- the gates -------------------------------------------------------------------------------------------------------
def _no_look_ahead(bench: _Bench) -> str:
    """Other taps from the anchor on, and other ids behind it, change nothing; what stands before it does."""
    before = bench.hidden()
    for block, anchor in enumerate(bench.anchors):
        taps, ids = bench.taps[0].clone(), list(bench.ids[0])
        taps[anchor:] = 5 * bench.normal(NUM_TEXT - anchor, *taps.shape[1:])
        ids[anchor + 1 :] = [_other(token) for token in ids[anchor + 1 :]]
        if not torch.equal(bench.hidden(ids, taps)[block], before[block]):
            raise _Failed(
                f"the block at position {anchor} changes with the text from its anchor on, which is not known when it "
                "is served; look at the context mask (train/blocks.py: block_masks) and at what the noise is made of"
            )
        taps, ids = bench.taps[0].clone(), list(bench.ids[0])
        taps[anchor - 1] += 1.0
        ids[anchor] = _other(ids[anchor])
        for what, other in (("taps right before it", bench.hidden(taps_SNE=taps)), ("anchor", bench.hidden(ids))):
            if (other[block] - before[block]).abs().max() < TOLERANCE:
                raise _Failed(
                    f"the block at position {anchor} does not see the {what}; look at the context mask "
                    "(train/blocks.py: block_masks) and at the windows of the layers"
                )
    return f"{len(bench.anchors)} blocks see all that is before their anchor, and nothing later"


def _other(token_id: int) -> int:
    return 1 + token_id % (VOCAB - 1)


def _no_look_aside(bench: _Bench) -> str:
    """Many blocks over one text are each of them alone."""
    together = bench.hidden()
    for block, anchor in enumerate(bench.anchors):
        alone = bench.hidden(anchors=[anchor])
        _require_equal(
            together[block],
            alone[0],
            f"the block at position {anchor} is another one beside other blocks than alone; "
            "look for what crosses blocks: the mask between blocks, the convolution, sums over all rows",
        )
    return f"{len(bench.anchors)} blocks together are each of them alone"


def _padding_is_not_seen(bench: _Bench) -> str:
    """Texts of unequal length in one batch are each of them alone."""
    lengths = (NUM_TEXT, 13)
    anchors = [(2, 9, 20), (1, 7, 11)]
    ids = [bench.ids[row][:length] for row, length in enumerate(lengths)]
    taps_BSNE = torch.zeros(len(lengths), NUM_TEXT, *bench.taps[0].shape[1:], dtype=torch.float64)
    for row, length in enumerate(lengths):
        taps_BSNE[row, :length] = bench.taps[row][:length]
    each = [bench.blocks(ids[row], anchors[row]) for row in range(len(lengths))]
    parts = [(b.anchors_BK, b.ids_BKL, b.weights_BKL) for b in each]
    with torch.no_grad():
        batch = Blocks(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        together = block_hidden(bench.model, bench.target.embed_VE, taps_BSNE, batch)
    together = together.unflatten(0, (len(lengths), -1))
    for row, length in enumerate(lengths):
        alone = bench.hidden(ids[row], bench.taps[row][:length], anchors[row])
        _require_equal(
            together[row],
            alone,
            f"text {row + 1} of a padded batch gives other blocks than alone; "
            "look at what reads past a text's end or across texts (train/blocks.py, the fused context)",
        )
    return f"{len(lengths)} texts of unequal length in a batch are each of them alone"


def _fresh_selector_adds_nothing(bench: _Bench) -> str:
    """A fresh DFlash 2 draft is the DFlash draft of the same linear weights, to the last bit."""
    second = _fresh(bench).double()
    has_mask = second.mask_embedding is not None
    first = DraftModel(replace(bench.config, conv=None, selector=None), has_mask_embedding=has_mask).double()
    first.load_state_dict({name: second.state_dict()[name] for name in first.state_dict()})
    hidden = [bench.hidden(model=model) for model in (first, second)]
    advice = "look at the initial values of base_kernel, kernel_projection and successor_codebook"
    if not torch.equal(*hidden):
        raise _Failed(f"a fresh DFlash 2 draft does not start as the DFlash draft of its weights; {advice}")
    for block, anchor in enumerate(bench.anchors):
        ids = []
        for model, rows in zip((first, second), hidden, strict=True):
            logits_GV = bench.target.logits(rows[block, 1:])
            ids.append(model.propose(rows[block], bench.ids[0][anchor], logits_GV, 0.0, None).ids_G)
        if not torch.equal(*ids):
            raise _Failed(f"a fresh selector changes what the draft proposes; {advice}")
    return f"{len(bench.anchors)} blocks of a fresh DFlash 2 draft are those of a DFlash draft"


def _fresh(bench: _Bench) -> DraftModel:
    head, has_mask = bench.target.head(torch.float32), bench.recipe.draft.learned_mask_embedding
    return initialise_draft(bench.config, head, seed=bench.seed, has_mask_embedding=has_mask)


def _training_is_serving(bench: _Bench) -> str:
    """The training forward is the cached serving forward, in rounds that commit unequal numbers of positions."""
    block = bench.config.block_size
    commits = [(4, 1, block, 2, block), (1, block, 2, 1, 1)]
    caches = [bench.model.new_cache() for _ in commits]
    for turn in range(len(commits[0])):
        length = block if turn % 2 == 0 or block == 2 else block - 1
        anchors = [sum(commit[: turn + 1]) for commit in commits]
        for row, (cache, anchor) in enumerate(zip(caches, anchors, strict=True)):
            bench.model.inject(bench.taps[row][cache.num_positions : anchor], cache)
        served = bench.model(bench.noise([bench.ids[r][a] for r, a in enumerate(anchors)], length), caches)
        for row, anchor in enumerate(anchors):
            trained = bench.hidden(bench.ids[row], bench.taps[row], [anchor], length=length)
            _require_equal(
                served[row],
                trained[0],
                f"in round {turn + 1} the block of {length} at position {anchor} is another one in training than when "
                "it is served; look at positions and windows (train/blocks.py), at the cache and at the scale",
            )
    return f"{len(commits[0])} rounds of two texts: the training forward is the served one"


def _learns_and_serves(bench: _Bench) -> str:
    """The trainer learns one text by heart, and the engine then accepts every proposal of it."""
    prompt = bench.ids[0][:NUM_PROMPT]
    ids = bench.target.write(prompt, NUM_BY_HEART)
    corpus = OneText(bench.target, ids, NUM_PROMPT)
    recipe = _overfit_recipe(bench.recipe, bench.config, num_blocks=NUM_BY_HEART - 1)
    evaluator = Evaluator(
        bench.target, bench.config, [prompt], width=bench.config.block_size, max_new_tokens=NUM_BY_HEART
    )
    with tempfile.TemporaryDirectory() as folder:
        head = bench.target.head(torch.float32)
        trainer = Trainer(recipe, bench.config, head, corpus, Path(folder), Parallel.single())
        for step in range(1, OVERFIT_STEPS + 1):
            metrics = trainer.train_step()
            if step % SERVE_EVERY and step < OVERFIT_STEPS:
                continue
            [text] = evaluator.run(trainer.model).texts
            stats = text.stats
            if stats.num_accepted_draft_tokens == stats.num_draft_tokens:
                return f"a text learnt in {step} steps is accepted whole, {stats.num_draft_tokens} proposals"
    raise _Failed(
        f"after {OVERFIT_STEPS} steps on one text {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} "
        f"proposals are accepted when it is served, while training counts a prefix of {metrics['prefix']:g}; "
        "if that is high, look at labels and positions (train/blocks.py), if it is low, at the loss and the optimiser"
    )


def _overfit_recipe(recipe: Recipe, config: DraftConfig, *, num_blocks: int) -> Recipe:
    """The recipe's own loss on one text, every block of it in every step, on the CPU in float32."""
    loss, optim = recipe.loss, recipe.optim
    return replace(
        recipe,
        target=replace(recipe.target, facts=None),
        draft=replace(
            recipe.draft, block_size=config.block_size, initial="random", initial_layers=(), initial_draft=""
        ),
        loss=replace(loss, selector_start_step=min(loss.selector_start_step, SERVE_EVERY)),
        optim=replace(
            optim,
            num_steps=OVERFIT_STEPS,
            sequences_per_step=1,
            blocks_per_sequence=num_blocks,
            learning_rate=1e-2,
            weight_decay=0.0,
            max_grad_norm=1.0,
            schedule="wsd",
            warmup_fraction=0.03,
            decay_fraction=0.5,
            final_lr_fraction=0.1,
            taps_noise=0.0,
            autocast="none",
            device="cpu",
            sharding="none",
        ),
        evaluation=replace(recipe.evaluation, every_steps=0, num_prompts=0, max_new_tokens=0, width=0),
    )


def _require_equal(one: Tensor, other: Tensor, message: str) -> None:
    if not (one - other).abs().max() <= TOLERANCE:
        raise _Failed(message)


_GATES: dict[str, Callable[[_Bench], str]] = {
    "no look ahead": _no_look_ahead,
    "no look aside": _no_look_aside,
    "padding is not seen": _padding_is_not_seen,
    "fresh DFlash 2 is DFlash": _fresh_selector_adds_nothing,
    "training is serving": _training_is_serving,
    "learns a text and serves it": _learns_and_serves,
}
