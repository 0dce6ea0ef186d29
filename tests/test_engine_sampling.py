"""The law of sampled text with speculation is the target's own, end to end (cases S10, S11).

A target whose next-token law depends on the last token only lets the exact law be written down; the drafters range from
the target itself to its adversary. The same check refuses engines that are broken in the ways spec'd as invisible to
acceptance: those variants are built here and seen to fail.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import blockdraft.engine.decide as decide_module
from blockdraft.accept import SamplingParams, Sparse, target_distribution
from blockdraft.draft import BlockRows, CandidateLists, Proposal
from blockdraft.engine import Engine, Request
from engine_kit import draft_config, hf_target, random_draft, run_one, tiny_model
from exactness import pooled_chi_square_ok

VOCAB = 8
ALPHA = 1e-5
NO_STOP = frozenset()


def table_model(seed: int = 0):
    """A target whose logits are a random table of the last token."""
    model = tiny_model(vocab=VOCAB, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, 32, dtype=torch.float64))
        table = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64) * 1.5
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :VOCAB] = table.T / 32**0.5
    return model


def raw_table(model) -> Tensor:
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([[token]])).logits[0, -1] for token in range(VOCAB)])


class TableDraft:
    """A stand-in drafter that walks a table of next-token laws from the anchor; kinds as in the grid below."""

    def __init__(self, config, law_VV: Tensor, *, is_argmax: bool = False, claims_law: bool = False) -> None:
        self.config, self.law_VV, self.is_argmax = config, law_VV, is_argmax
        self.claims_law = claims_law or not is_argmax
        self.max_length, self.own_embedding, self.own_head = config.max_position_embeddings, None, None

    def new_cache(self):
        return type("Count", (), {"num_positions": 0})()

    def inject_rows(self, taps, caches) -> None:
        for taps_CNE, cache in zip(taps, caches, strict=True):
            cache.num_positions += len(taps_CNE)

    def noise(self, anchor_ids, length, embed) -> Tensor:
        return torch.zeros(len(anchor_ids), length, self.config.hidden_size, dtype=torch.float64)

    def __call__(self, noise_BLD, caches) -> Tensor:
        return noise_BLD

    def propose_rows(self, blocks, logits_KV, **options) -> list[Proposal]:
        return [self._proposal(block) for block in blocks]

    def _proposal(self, block: BlockRows) -> Proposal:
        ids, laws, last = [], [], block.anchor_id
        for _ in range(block.hidden_LD.shape[0] - 1):
            law_V = self.law_VV[last]
            last = (
                int(law_V.argmax()) if self.is_argmax else int(torch.multinomial(law_V, 1, generator=block.generator))
            )
            ids.append(last)
            laws.append(law_V)
        everything = torch.arange(VOCAB).expand(len(ids), VOCAB)
        q = CandidateLists(everything, torch.stack(laws)) if self.claims_law else None
        return Proposal(ids_G=torch.tensor(ids), q=q)


def make_draft(kind: str, config, raw_VV: Tensor, temperature: float):
    own = torch.softmax(raw_VV / temperature, -1)
    if kind == "self":
        return TableDraft(config, own)
    if kind == "adversary":
        return TableDraft(config, torch.softmax(-2 * raw_VV / temperature, -1))
    if kind == "argmax":
        return TableDraft(config, own, is_argmax=True)
    if kind == "argmax that claims to be sampled":
        return TableDraft(config, own, is_argmax=True, claims_law=True)
    generator = torch.Generator().manual_seed(9)
    noise = torch.rand(VOCAB, VOCAB, generator=generator, dtype=torch.float64) ** 3
    return TableDraft(config, noise / noise.sum(-1, keepdim=True))


def law_is_kept(model, kind: str, params: SamplingParams, width: int, *, runs: int = 220, length: int = 9) -> bool:
    """Whether the transitions of `runs` texts follow the target's law; the first token, from the prefill, included."""
    raw_VV = raw_table(model)
    law_VV = target_distribution_table(raw_VV, params)
    target = hf_target(model)
    config = draft_config(target.facts, block_size=8, selector=None, conv=None)
    engine = Engine(target, make_draft(kind, config, raw_VV, params.temperature))
    counts: list[Counter[int]] = [Counter() for _ in range(VOCAB)]
    requests = [
        Request(
            prompt_ids=[i % VOCAB],
            max_new_tokens=length,
            stop_ids=NO_STOP,
            sampling=params,
            width=width,
            seed=i,
        )
        for i in range(runs)
    ]
    for request, done in zip(requests, engine.run(requests), strict=True):
        previous = request.prompt_ids[-1]
        for token in done.token_ids:
            counts[previous][token] += 1
            previous = token
    laws = [{i: float(p) for i, p in enumerate(row)} for row in law_VV]
    return pooled_chi_square_ok(list(zip(counts, laws, strict=True)), alpha=ALPHA)


def target_distribution_table(raw_VV: Tensor, params: SamplingParams) -> Tensor:
    rows = [target_distribution(raw[None], params, history=[0], num_prompt=1, proposals=[]) for raw in raw_VV]
    return torch.cat(rows)


GRID = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.7, top_k=5),
]


@pytest.fixture(scope="module")
def model():
    return table_model()


@pytest.mark.parametrize("params", GRID, ids=["t1", "t.6-p.9", "t1.3-k4", "t1-p.7-k5"])
@pytest.mark.parametrize(
    ("kind", "width"), [("self", 8), ("adversary", 3), ("argmax", 5), ("random", 2), ("random", 8)]
)
def test_sampled_text_follows_the_targets_law(model, params, kind, width):
    assert law_is_kept(model, kind, params, width)


def _accept_variant(name: str):
    real = decide_module.accept

    def shared_noise(ids, q, p, generator):
        return real(ids, q, p, torch.Generator().manual_seed(1))

    def argmax_verify(ids, q, p, generator):
        greedy = p.argmax(-1).tolist()
        return decide_module.accept_greedy(ids, greedy)

    def flattened_q(ids, q, p, generator):
        if isinstance(q, Sparse):
            root = q.probs_GM**0.5
            q = Sparse(q.ids_GM, root / root.sum(-1, keepdim=True))
        return real(ids, q, p, generator)

    def threshold(ids, q, p, generator):
        count = 0
        while count < len(ids) and float(p[count, ids[count]]) > 0.15:
            count += 1
        return real([], q, p[count : count + 1], generator)[0] + count, real([], q, p[count : count + 1], generator)[1]

    return {
        "noise that is the same in every step": shared_noise,
        "argmax verification at T=1": argmax_verify,
        "q not the law that was sampled": flattened_q,
        "acceptance above a threshold": threshold,
    }[name]


@pytest.mark.parametrize(
    "variant",
    [
        "noise that is the same in every step",
        "argmax verification at T=1",
        "q not the law that was sampled",
        "acceptance above a threshold",
    ],
)
def test_the_same_check_refuses_a_broken_engine(model, variant, monkeypatch):
    monkeypatch.setattr(decide_module, "accept", _accept_variant(variant))
    assert not law_is_kept(model, "random", SamplingParams(temperature=1.0), 5)


def test_the_same_check_refuses_an_argmax_draft_that_claims_to_be_sampled(model):
    assert not law_is_kept(model, "argmax that claims to be sampled", SamplingParams(temperature=1.0), 5)


def test_the_same_check_refuses_cuts_left_out_of_p(model, monkeypatch):
    def uncut(logits_TV, params, **rest):
        return target_distribution(logits_TV, SamplingParams(temperature=params.temperature), **rest)

    monkeypatch.setattr(decide_module, "target_distribution", uncut)
    assert not law_is_kept(model, "self", SamplingParams(temperature=1.0, top_p=0.7), 5)


@pytest.mark.parametrize("width", [2, 8])
def test_a_real_selector_draft_on_a_real_attention_target_keeps_the_law(width):
    """Three tokens of a full random model: every prefix has a law of its own, so the test pools over prefixes."""
    model = tiny_model(vocab=VOCAB, scale=0.25)
    params = SamplingParams(temperature=1.2, top_p=0.9, top_k=6)
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts, selector=_selector(), mask_token_id=0)))
    requests = [
        Request(prompt_ids=[3, 5, 1], max_new_tokens=3, stop_ids=NO_STOP, sampling=params, width=width, seed=i)
        for i in range(900)
    ]
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for done in engine.run(requests):
        for cut in range(3):
            counts.setdefault(done.token_ids[:cut], Counter())[done.token_ids[cut]] += 1
    tables = []
    for prefix, seen in counts.items():
        with torch.inference_mode():
            logits_1V = model(torch.tensor([[3, 5, 1, *prefix]])).logits[0, -1:]
        law = target_distribution(logits_1V, params, history=[3, 5, 1, *prefix], num_prompt=3, proposals=[])[0]
        tables.append((seen, {i: float(p) for i, p in enumerate(law)}))
    assert pooled_chi_square_ok(tables, alpha=ALPHA)


def _selector():
    from blockdraft.config import SelectorConfig

    return SelectorConfig(rank=4, top_k=4)


def test_s11_seeds(model):
    target = hf_target(tiny_model())
    draft = random_draft(draft_config(target.facts))
    params = SamplingParams(temperature=1.0)

    def request(seed, **more) -> Request:
        return Request(prompt_ids=[3, 1, 4], max_new_tokens=24, stop_ids=NO_STOP, sampling=params, seed=seed, **more)

    alone = run_one(Engine(target, draft), **_fields(request(7)))
    engine = Engine(target, draft)
    crowd = engine.run([request(1), request(7), request(2), request(None)])
    for i in range(5):
        engine.run([request(i)])
    later = engine.run([request(7)])[0]
    assert alone.token_ids == crowd[1].token_ids == later.token_ids
    assert alone.stats.accepted_histogram == crowd[1].stats.accepted_histogram
    unseeded = {engine.run([request(None)])[0].token_ids for _ in range(5)}
    assert len(unseeded) == 5
    assert len({engine.run([request(i)])[0].token_ids for i in range(5)}) == 5
    greedy = [
        run_one(Engine(target, draft), prompt_ids=[3, 1, 4], max_new_tokens=24, stop_ids=NO_STOP, seed=i).token_ids
        for i in (1, 2)
    ]
    assert greedy[0] == greedy[1]


def _fields(request: Request) -> dict:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


@pytest.mark.parametrize("params", [
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(frequency_penalty=0.7, presence_penalty=0.4),
    SamplingParams(logit_bias={3: 2.0, 7: -100.0}),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=-0.5, logit_bias={1: 1.0}),
])  # fmt: skip
@pytest.mark.parametrize("width", [2, 5, 8])
def test_penalties_and_bias_are_exact_under_speculation(params, width):
    """Greedy with history-dependent logits: rows inside a block must see the proposals before them."""
    model = tiny_model()
    target = hf_target(model)
    plain = run_one(Engine(target), prompt_ids=[3, 1, 4], max_new_tokens=40, stop_ids=NO_STOP, sampling=params)
    text = [3, 1, 4, *plain.token_ids]
    from engine_kit import Continuation

    for draft in (
        random_draft(draft_config(target.facts)),
        Continuation(draft_config(target.facts), [text], wrong=lambda step: (3, None, 0)[step % 3]),
    ):
        engine = Engine(target if isinstance(draft, torch.nn.Module) else hf_target(model), draft)
        done = run_one(engine, prompt_ids=[3, 1, 4], max_new_tokens=40, stop_ids=NO_STOP, sampling=params, width=width)
        assert done.token_ids == plain.token_ids
    slow, ids = _slow_penalised(model, params, 40), list(plain.token_ids)
    assert slow == ids


def _slow_penalised(model, params: SamplingParams, count: int) -> list[int]:
    """One token at a time from a full forward pass, penalties written out by hand."""
    ids, made = [3, 1, 4], []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].clone()
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        for token in set(ids):
            value = logits[token]
            logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        for token in set(made):
            logits[token] -= params.frequency_penalty * made.count(token) + params.presence_penalty
        ids.append(int(logits.argmax()))
        made.append(ids[-1])
    return made
