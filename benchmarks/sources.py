"""Where should proposals come from, and where should a block end? Replayed on blocks at every position of greedy texts.

  python -m benchmarks.sources --data DIR       counters and a stated price list: may run on a busy machine

The target writes greedy text; the draft then proposes a whole block at every position of it, with the probability that
its selector gave each proposal. On these a renewal walk counts, for any rule, the steps and what they score and draft:
  fixed widths       2 to the trained one
  cut                all proposals are drafted; scored are those whose predicted survival (a logistic curve of the
                     draft's own probability and the position, fitted on the other half of the prompts) pays
  best cut           the same with the future known: no rule can do better
  lookup             where the text has ended like this before (engine/lookup.py), its continuation is scored and
                     nothing is drafted; elsewhere the best fixed width
  adaptive           the engine's policy (engine/adaptive.py), which is told these prices and learns the rest, one text
                     after the other; with what the draft's record says beforehand, and `without lookup`
Seconds are prices in plain steps: a pass of the draft, a proposal drafted, a position scored. Intervals: 95 %,
bootstrap over prompts of the ratio to the best fixed width of the same set and prices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import common, session
from benchmarks.adaptive import COPY
from blockdraft import stats as st
from blockdraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from blockdraft.engine import Engine

RESULT = "sources.json"
SETS = {"gsm8k": 12, "mtbench": 12, "copy": 8}
FIRST_GSM8K = 20  # rows before it are in other tables
NUM_DRAWS = 1000


@dataclass(frozen=True)
class Prices:
    """Seconds in plain steps."""

    name: str
    a_pass: float
    proposal: float
    position: float


# cpu: a fit to the step times of results/worth_it.json (float32, 2 threads, one row); flat: what an accelerator with
# room left asks, and dear: a batch that computes already.
PRICES = (
    Prices("cpu, one row", 0.085, 0.0125, 0.034),
    Prices("flat", 0.17, 0.001, 0.0025),
    Prices("dear", 0.05, 0.02, 0.15),
)


@dataclass(frozen=True)
class Text:
    """A greedy text: all ids, how many of them are the prompt's, and the block at every position but the last."""

    ids: list[int]
    num_prompt: int
    blocks: list[Block]


@dataclass(frozen=True)
class Block:
    """A block at one position of a text: how many proposals stand, and the draft's probability of each."""

    num_right: int
    probabilities: list[float]
    num_left: int
    """Ids of the text that follow."""
    match: list[int]
    """What followed the last time that the text ended like this."""
    num_matching: int
    """How many of `match` are right."""


@dataclass(frozen=True)
class Cost:
    tokens: float
    seconds: float


Rule = Callable[[Block], tuple[int, int, int]]
"""Block -> (positions scored beyond the anchor, proposals drafted or -1 for no pass, accepted)."""


def main() -> int:
    parser = session.parser(__doc__)
    parser.set_defaults(max_new_tokens=112)
    return measure(parser.parse_args())


def measure(options: argparse.Namespace) -> int:
    from blockdraft.engine.tune import known_acceptance

    settings = session.settings(options)
    work = common.Work.open(options.work / f"sources.{options.dtype}.jsonl", settings, session.run_facts(options))
    prompts = {name: _prompts(options, name) for name in SETS}
    todo = [p for members in prompts.values() for p in members if (p.id, "blocks") not in work.records]
    engine = session.load_engine(options) if todo else None
    for number, prompt in enumerate(todo, start=1):
        assert engine is not None
        work.append(prompt.id, "blocks", blocks_of(engine, prompt, options.max_new_tokens))
        session.note(f"{number} of {len(todo)} prompts")
    prior = known_acceptance(session.draft_folder(options))
    result = {
        "what": "rules for the proposals of a step, replayed on blocks at every position of greedy texts",
        "settings": settings,
        "runs": work.runs,
        "prompts_sha256": {name: common.prompts_digest(members) for name, members in prompts.items()},
        "prices": [vars(price) for price in PRICES],
        "sets": {
            name: _set_entry([_text(work.records[p.id, "blocks"]) for p in members], prior)
            for name, members in prompts.items()
        },
    }
    common.write_json(options.results / RESULT, result)
    return 0


def _text(record: Mapping[str, Any]) -> Text:
    return Text(record["ids"], record["num_prompt"], [Block(**block) for block in record["blocks"]])


def _prompts(options: argparse.Namespace, name: str) -> list[common.Prompt]:
    count = min(SETS[name], options.limit or SETS[name])
    if name == "mtbench":
        return common.load_prompts(options.data, name, count)
    rows = common.load_prompts(options.data, "gsm8k", FIRST_GSM8K + count)[FIRST_GSM8K:]
    if name == "gsm8k":
        return rows
    return [common.Prompt(f"copy-{i}", COPY.format(p.text.removesuffix(common.BOXED))) for i, p in enumerate(rows)]


# ---- blocks ----------------------------------------------------------------------------------------------------------
def blocks_of(engine: Engine, prompt: common.Prompt, max_new_tokens: int) -> dict[str, Any]:
    """The text of one prompt, and a block of the draft at every position of it."""
    import torch

    from blockdraft.engine.lookup import TextIndex

    target, draft = engine.target, engine.draft
    assert draft is not None
    if draft.candidate_selector is None or draft.config.predicts_from_anchor:
        raise ConfigError("the probabilities of a DFlash 2 selector are looked at; name such a draft")
    width = draft.config.max_width
    run = common.generate(engine, prompt, width, max_new_tokens)
    ids, first = [*run["prompt_ids"], *run["ids"]], len(run["prompt_ids"])
    found, index = [], TextIndex()
    with torch.inference_mode():
        row = target.new_row()
        [scored] = target.forward([torch.tensor(ids)], [row], num_logits=0)
        taps_TNE = scored.taps_TNE.clone()
        target.free(row)
        cache = draft.new_cache()
        draft.inject(taps_TNE[:first], cache)
        for at in range(first, len(ids) - 1):
            hidden_BLD = draft(draft.noise([ids[at]], width, target.embed), [cache])
            logits_BGV = target.logits(hidden_BLD[:, 1:].to(target.dtype))
            proposed, probabilities = _walked(draft, hidden_BLD[0], ids[at], logits_BGV[0])
            rest = ids[at + 1 :]
            _, match = index.find(ids[: at + 1], width - 1)
            block = Block(_same(proposed, rest), probabilities, len(rest), match, _same(match, rest))
            found.append(vars(block))
            draft.inject(taps_TNE[at : at + 1], cache)
    return {"ids": ids, "num_prompt": first, "blocks": found}


def _walked(draft: Any, hidden_LD: Any, anchor_id: int, logits_GV: Any) -> tuple[list[int], list[float]]:
    """The greedy walk's ids, and the selector's probability of each among its candidates at temperature 1."""
    import torch

    from blockdraft.draft.heads import top_candidates

    banned = (draft.config.mask_token_id,)
    ids_G = draft.propose(hidden_LD, anchor_id, logits_GV, 0.0, None, exclude_ids=banned).ids_G
    selector = draft.candidate_selector
    values_GM, ids_GM = top_candidates(logits_GV.float(), selector.top_k, banned)
    before_G1 = torch.cat((ids_G.new_tensor([anchor_id]), ids_G[:-1]))[:, None]
    scores_GM = draft.scale_logits(values_GM) + selector.edges(hidden_LD[1:], before_G1, ids_GM)[:, 0]
    probs_G = (scores_GM.softmax(dim=-1) * (ids_GM == ids_G[:, None])).sum(dim=-1)
    return ids_G.tolist(), [round(x, 4) for x in probs_G.tolist()]


def _same(guess: Sequence[int], truth: Sequence[int]) -> int:
    count = 0
    for a, b in zip(guess, truth, strict=False):
        if a != b:
            break
        count += 1
    return count


# ---- rules -----------------------------------------------------------------------------------------------------------
def walk(text: Sequence[Block], rule: Rule, prices: Prices) -> Cost:
    """Tokens and seconds of a text under a rule."""
    at, seconds = 0, 0.0
    while at < len(text):
        scored, drafted, accepted = rule(text[at])
        seconds += 1.0 + prices.position * scored
        seconds += prices.a_pass + prices.proposal * drafted if drafted >= 0 else 0.0
        at += accepted + 1
    return Cost(float(at), seconds)


def fixed(width: int, block: Block) -> tuple[int, int, int]:
    if width == 1:
        return 0, -1, 0
    return width - 1, width - 1, min(block.num_right, width - 1)


def cut(curve: Sequence[float], price: float, block: Block) -> tuple[int, int, int]:
    """Score the proposals whose predicted survival is worth a position."""
    survival, count = 1.0, 0
    for k, probability in enumerate(block.probabilities):
        survival *= _predicted(curve, k, probability)
        if survival < price:
            break
        count += 1
    return count, len(block.probabilities), min(block.num_right, count)


def best_cut(block: Block) -> tuple[int, int, int]:
    return block.num_right, len(block.probabilities), block.num_right


def lookup(otherwise: Rule, block: Block) -> tuple[int, int, int]:
    if block.match:
        return len(block.match), -1, block.num_matching
    return otherwise(block)


def _predicted(curve: Sequence[float], position: int, probability: float) -> float:
    share = min(max(probability, 1e-4), 1.0 - 1e-4)
    z = curve[0] + curve[1] * math.log(share / (1.0 - share)) + curve[2] * position
    return 1.0 / (1.0 + math.exp(-min(max(z, -30.0), 30.0)))


def fit_curve(texts: Sequence[Sequence[Block]], num_rounds: int = 200) -> list[float]:
    """Constant, weight of the log-odds of the draft's probability, weight of the position: steepest ascent of the
    log-likelihood of what stood, scaled by curvature."""
    trials = [
        (k, block.probabilities[k], float(k < block.num_right))
        for text in texts
        for block in text
        for k in range(min(block.num_right + 1, len(block.probabilities), block.num_left))
    ]
    curve = [0.0, 1.0, 0.0]
    for _ in range(num_rounds):
        slopes, curvatures = [0.0] * 3, [1e-9] * 3
        for k, probability, stood in trials:
            share = min(max(probability, 1e-4), 1.0 - 1e-4)
            features = (1.0, math.log(share / (1.0 - share)), float(k))
            p = _predicted(curve, k, probability)
            for i, feature in enumerate(features):
                slopes[i] += (stood - p) * feature
                curvatures[i] += p * (1.0 - p) * feature * feature
        curve = [c + 0.4 * s / h for c, s, h in zip(curve, slopes, curvatures, strict=True)]
    return curve


# ---- the engine's policy ---------------------------------------------------------------------------------------------
class _Row:
    """What the policy reads of a running row."""

    has_fixed_width = False

    def __init__(self, text: Text) -> None:
        self.ids, self.num_pending = text.ids[: text.num_prompt + 1], 0
        self.stats = st.RequestStats()


def serve(texts: Sequence[Text], prices: Prices, prior: list[float] | None, *, looks_up: bool) -> list[Cost]:
    """Tokens and seconds of each text under the adaptive policy, which goes through them in order."""
    from blockdraft.engine.adaptive import AdaptiveWidth
    from blockdraft.engine.costs import CostModel, StepCosts
    from blockdraft.engine.times import StepTimes

    most_width = len(texts[0].blocks[0].probabilities) + 1
    model = CostModel(
        knots=((1, 1.0), (most_width, 1.0 + prices.position * (most_width - 1))),
        score_row_s=0.0,
        context_s=0.0,
        other_s=0.0,
        other_row_s=0.0,
        other_position_s=0.0,
        draft_pass_s=prices.a_pass,
        draft_row_s=0.0,
        draft_position_s=prices.proposal,
        inject_s=0.0,
        inject_position_s=0.0,
    )
    policy: Any = AdaptiveWidth(StepCosts(model), num_positions=most_width - 1, prior=prior)
    costs = []
    for text in texts:
        row, at, seconds = _Row(text), 0, 0.0
        while at < len(text.blocks):
            if not looks_up:
                row.ids = list(range(len(row.ids)))  # a text in which nothing occurs twice
            block = text.blocks[at]
            [width] = policy.choose([row], [max(1, min(most_width, block.num_left))])
            [offer] = policy.offers([row], [width])
            right = 0 if width == 1 else block.num_right
            if offer is not None:
                right = _same(offer, text.ids[len(row.ids) :])
            accepted = min(right, width - 1)
            times = StepTimes(score_s=1.0 + prices.position * (width - 1), num_rows=1, num_scored=width)
            if width > 1 and offer is None:
                times.propose_s = prices.a_pass + prices.proposal * (width - 1)
            seconds += times.total_s
            at += accepted + 1
            row.ids = text.ids[: text.num_prompt + 1 + at]
            row.stats.add_step(num_draft=width - 1, num_accepted=accepted, num_emitted=accepted + 1)
            policy.record([row], [width], [accepted], times)
        costs.append(Cost(float(at), seconds))
    return costs


# ---- results ---------------------------------------------------------------------------------------------------------
def _set_entry(texts: Sequence[Text], prior: list[float] | None) -> dict[str, Any]:
    blocks = [text.blocks for text in texts]
    curves = [fit_curve(blocks[1::2]), fit_curve(blocks[0::2])]
    return {
        "num_prompts": len(texts),
        "num_blocks": sum(map(len, blocks)),
        "share_with_match": sum(bool(b.match) for t in blocks for b in t) / sum(map(len, blocks)),
        "calibration": _calibration(blocks),
        "curves": curves,
        "by_prices": {prices.name: _priced(texts, curves, prices, prior) for prices in PRICES},
    }


def _priced(
    texts: Sequence[Text], curves: Sequence[Sequence[float]], prices: Prices, prior: list[float] | None
) -> dict[str, Any]:
    blocks = [text.blocks for text in texts]
    most = len(blocks[0][0].probabilities) + 1
    costs = {f"w{w}": [walk(t, partial(fixed, w), prices) for t in blocks] for w in range(1, most + 1)}
    best = max(costs, key=lambda name: _rate(costs[name]))
    plain, width = _rate(costs["w1"]), int(best[1:])
    price = prices.position * _rate(costs[best])
    rules = {
        "cut": [walk(t, partial(cut, curves[i % 2], price), prices) for i, t in enumerate(blocks)],
        "best cut": [walk(t, best_cut, prices) for t in blocks],
        "lookup": [walk(t, partial(lookup, partial(fixed, width)), prices) for t in blocks],
        "lookup alone": [walk(t, partial(lookup, partial(fixed, 1)), prices) for t in blocks],
        "adaptive": serve(texts, prices, prior, looks_up=True),
        "adaptive without lookup": serve(texts, prices, prior, looks_up=False),
    }
    return {
        "best_fixed": best,
        "to_plain": {name: _rate(found) / plain for name, found in (costs | rules).items()},
        "to_best_fixed": {
            name: {"estimate": _rate(found) / _rate(costs[best]), **_interval(found, costs[best])}
            for name, found in rules.items()
        },
    }


def _rate(costs: Sequence[Cost]) -> float:
    return sum(c.tokens for c in costs) / sum(c.seconds for c in costs)


def _interval(costs: Sequence[Cost], base: Sequence[Cost]) -> dict[str, float]:
    source = random.Random(0)
    draws = []
    for _ in range(NUM_DRAWS):
        picked = source.choices(range(len(costs)), k=len(costs))
        draws.append(_rate([costs[i] for i in picked]) / _rate([base[i] for i in picked]))
    draws.sort()
    return {"low": draws[int(0.025 * NUM_DRAWS)], "high": draws[int(0.975 * NUM_DRAWS) - 1]}


def _calibration(texts: Sequence[Sequence[Block]]) -> list[dict[str, float]]:
    """By fifths of the draft's probability: its mean, and how often the proposal stood when it was reached."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(5)]
    for text in texts:
        for block in text:
            for k in range(min(block.num_right + 1, len(block.probabilities), block.num_left)):
                probability = block.probabilities[k]
                bins[min(int(5 * probability), 4)].append((probability, k < block.num_right))
    return [
        {
            "probability": sum(p for p, _ in found) / len(found),
            "stood": sum(stood for _, stood in found) / len(found),
            "num_proposals": len(found),
        }
        for found in bins
        if found
    ]


if __name__ == "__main__":
    session.finish(main)
