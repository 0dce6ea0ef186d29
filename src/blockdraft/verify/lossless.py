"""The losslessness exam: sampled text with the draft has the target's own law.

Layers, from the inside of a step outwards: proposals against the q that acceptance is told; each acceptance against
min(1, p/q); replacements against (p - q)+; bonuses against p; acceptance by position against sum min(p, q); tokens at
fixed contexts and over free texts against p; the balance of surprise and entropy; whole texts against plain ones.
A layer that fails names the mistake that looks like it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from blockdraft.accept import SamplingParams
from blockdraft.engine import Request
from blockdraft.verify.chance import (
    Fit,
    Sight,
    bernoulli_root,
    binomial_tail,
    chi_square_sf,
    either,
    g_fit,
    tilted_root,
    two_sided,
    uniform_fit,
)
from blockdraft.verify.evidence import TILTS, Draws, Evidence
from blockdraft.verify.law import sampling_law
from blockdraft.verify.report import Trial
from blockdraft.verify.system import System, Trace

__all__ = ["SampledBudget", "examine_sampling"]

OUTSIDE = "tokens that top_k, top_p or min_p leave no room for: the cuts do not act on p"
ARGMAX = "every token is the target's most likely one: proposals are verified by argmax although the request samples"
NOT_THE_LAW = "the proposals are not draws from the q that acceptance is told"
SHARED_NOISE = (
    "whether a proposal stands depends on which random number drew it: drafting and acceptance share their noise"
)
NOT_THE_RATIO = "proposals do not stand with probability min(1, p/q)"
RESIDUAL = "after a rejection the next token is drawn from p, not from what p has above q: rejected tokens come back"
NOT_THE_RESIDUAL = "after a rejection the next token does not follow (p - q)+"
STALE = "the bonus is drawn from the row before its own: a stale row"
NOT_P = "the bonus does not follow p of its own row"
RATE = "acceptance by position is not sum min(p, q)"
TOKENS = "the tokens do not follow the target's law"
SURPRISE = "the tokens are likelier, or less likely, than draws from the target's law"
FIRST = "the first token, which the prefill decides, does not follow the target's law"
PLAIN = "plain text of the same system does not follow the target's law either: the sampler, not speculation"
NO_NOISE = "this draft proposes without noise, so there is no law to compare with"
SEQUENCES = "texts with the draft differ as a whole from plain ones"

_NARROW, _NARROW_EVERY = 2, 4  # every so many rounds of the prompts have narrow blocks: wide ones are rarely whole
_MIN_COUNT = 40  # occurrences of a prefix from which the tokens after it are tested
_NUM_PERMUTATIONS = 40_000
_ENOUGH_LARGER = 20  # a difference that so many permutations reach is an everyday one; no need to go on


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBudget:
    """Sizes of the exam of one way to sample. `num_texts` are written with the draft, and as many without."""

    num_texts: int
    text_tokens: int
    num_contexts: int
    num_per_context: int
    rows_at_once: int = 16


@dataclass(slots=True)
class _Texts:
    """Features of whole texts by prompt: with the draft, and plain."""

    drafted: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    plain: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)


def examine_sampling(
    system: System,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    budget: SampledBudget,
    *,
    seed: int,
    slack: float,
    on_progress: Callable[[float], None] = lambda share: None,
) -> list[Trial]:
    """The trials of one way to sample. `slack`: how far rounding may move a probability."""
    source = random.Random(seed)
    drafted = Evidence(sampling, slack, random.Random(source.getrandbits(63)))
    plain = Evidence(sampling, slack, random.Random(source.getrandbits(63)))
    texts = _Texts()
    which = [n % len(prompts) for n in range(budget.num_texts)]
    total = 2 * budget.num_texts + budget.num_contexts * budget.num_per_context
    num_done = 0

    def width_of(place: int) -> int:
        return _NARROW if place // len(prompts) % _NARROW_EVERY == 0 else system.max_width

    def requests(numbers: Sequence[int], speculate: bool) -> list[Request]:
        return [
            Request(
                prompt_ids=prompts[n],
                max_new_tokens=budget.text_tokens,
                sampling=sampling,
                seed=source.getrandbits(62),
                speculate=speculate,
                width=width_of(place) if speculate else None,
            )
            for place, n in enumerate(numbers, start=num_done // 2)
        ]

    for numbers in _batches(which, budget.rows_at_once):
        for number, trace in zip(numbers, system.trace(requests(numbers, True)), strict=True):
            logs = drafted.add(trace, system.logits)
            ids = _emitted(trace, frozenset(system.facts.eos_token_ids))
            texts.drafted.append((number, _features(ids, logs)))
        asked = requests(numbers, False)
        for number, request, done in zip(numbers, asked, system.run(asked), strict=True):
            ids = [*request.prompt_ids, *done.token_ids]
            logs = plain.add_plain(ids, len(request.prompt_ids), system.logits)
            texts.plain.append((number, _features(list(done.token_ids), logs)))
        num_done += 2 * len(numbers)
        on_progress(num_done / total)
    contexts = []
    for index in range(budget.num_contexts):
        name = f"tokens after fixed context {index + 1}"
        prompt = prompts[index % len(prompts)]
        contexts.append(_examine_context(name, system, prompt, sampling, budget, source, slack))
        num_done += budget.num_per_context
        on_progress(num_done / total)
    trials = [*_step_trials(drafted), *contexts, *_text_trials(drafted), _sequences(texts, source)]
    if cause := _one_cause(drafted):
        trials = [replace(trial, reason=cause) for trial in trials]
    return [
        _fit_trial("proposals follow q", drafted.proposals, slack, "proposals", NOT_THE_LAW)
        if drafted.proposals.num
        else Trial(name="proposals follow q", p_value=None, finding=NO_NOISE, reason=NOT_THE_LAW),
        *trials,
        _fit_trial("first tokens follow p", drafted.first, slack, "first tokens", FIRST),
        _fit_trial("plain texts follow p", plain.tokens, slack, "tokens", PLAIN),
    ]


def _one_cause(found: Evidence) -> str | None:
    """The mistake that would explain every layer at once, if the tokens look like one."""
    if found.num_judged and found.num_most_likely == found.num_judged:
        return ARGMAX if found.mass_most_likely < 0.9 * found.num_judged else None
    has_outside = binomial_tail(found.num_outside_cuts, max(1, found.tokens.num), found.slack) < 1e-9
    return OUTSIDE if has_outside else None


def _batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _emitted(trace: Trace, stop_ids: frozenset[int]) -> list[int]:
    """The text of a trace as its request should cut it: at the length limit, after the first stop."""
    ids = trace.ids[len(trace.request.prompt_ids) :][: trace.request.max_new_tokens]
    for index, token in enumerate(ids):
        if token in stop_ids:
            return ids[: index + 1]
    return ids


# ---- inside a step ---------------------------------------------------------------------------------------------------
def _fit_trial(name: str, draws: Draws, slack: float, what: str, reason: str) -> Trial:
    """Places against the uniform law, and tokens off the law against what rounding may do."""
    fit = uniform_fit(draws.places)
    if fit.degrees == 0 and draws.num_outside == 0:
        return Trial(name=name, p_value=None, finding=f"{draws.num} {what} are too few for a test", reason=reason)
    finding = f"{draws.num} {what}, G = {fit.statistic:.1f} on {fit.degrees}"
    if draws.num_outside:
        finding += f", {draws.num_outside} off the law"
    return Trial(
        name=name,
        p_value=either(fit.p_value, binomial_tail(draws.num_outside, draws.num, slack)),
        finding=finding,
        reason=reason,
        sight=Sight(fit.num, fit.degrees) if fit.degrees else None,
        figures={"num": draws.num, "num_outside": draws.num_outside, "statistic": fit.statistic, "df": fit.degrees},
    )


def _step_trials(found: Evidence) -> list[Trial]:
    """What happens inside a step once its proposals are there."""
    is_from_p, is_stale = found.replacements.log_odds > 0.0, found.bonuses.log_odds > 0.0
    return [
        *_acceptances(found),
        _fit_trial(
            "replacements follow (p - q)+",
            found.replacements,
            found.slack,
            "replacements",
            RESIDUAL if is_from_p else NOT_THE_RESIDUAL,
        ),
        _fit_trial("bonuses follow p", found.bonuses, found.slack, "bonuses", STALE if is_stale else NOT_P),
        _rates(found),
    ]


def _acceptances(found: Evidence) -> list[Trial]:
    """Acceptance given the proposal, by its chance; and whether it hangs on where in q the proposal was drawn."""
    groups: list[tuple[list[float], list[bool]]] = [([], []) for _ in range(4)]
    for chance, stood, _ in found.acceptances:
        probs, hits = groups[int(4.0 * chance)]
        probs.append(chance)
        hits.append(stood)
    statistic, degrees = 0.0, 0
    for probs, hits in groups:
        if min(math.fsum(probs), len(probs) - math.fsum(probs)) >= 5.0:
            statistic += bernoulli_root(probs, hits) ** 2
            degrees += 1
    probs, hits = [chance for chance, _, _ in found.acceptances], [stood for _, stood, _ in found.acceptances]
    weights = [middle - 0.5 for _, _, middle in found.acceptances]
    name, other = "acceptance is min(1, p/q)", "acceptance does not hang on the draw"
    if degrees == 0:
        too_few = f"{len(probs)} uncertain proposals are too few for a test"
        return [Trial(name=n, p_value=None, finding=too_few, reason=NOT_THE_RATIO) for n in (name, other)]
    deviation = math.sqrt(math.fsum(p * (1.0 - p) for p in probs) / len(probs))
    finding = f"{len(probs)} uncertain proposals, chi-square {statistic:.1f} on {degrees}; {found.num_certain} certain"
    if found.num_certain_broken:
        finding += f", {found.num_certain_broken} of them went the other way"
    trials = [
        Trial(
            name=name,
            p_value=either(
                chi_square_sf(statistic, degrees),
                binomial_tail(found.num_certain_broken, found.num_certain, 2.0 * found.slack),
            ),
            finding=finding,
            reason=NOT_THE_RATIO,
            sight=Sight(len(probs), degrees, deviation, "the chance to stand"),
            figures={"num": len(probs), "num_certain": found.num_certain, "num_broken": found.num_certain_broken},
        )
    ]
    spread = math.fsum(w * w for w in weights)
    if spread == 0.0:
        return [*trials, Trial(name=other, p_value=None, finding=NO_NOISE, reason=SHARED_NOISE)]
    root = bernoulli_root(probs, hits, weights)
    weighted = math.sqrt(math.fsum(w * w * p * (1.0 - p) for p, w in zip(probs, weights, strict=True)) / len(probs))
    return [
        *trials,
        Trial(
            name=other,
            p_value=two_sided(root),
            finding=f"{len(probs)} proposals by their place in q, root {root:+.2f}",
            reason=SHARED_NOISE,
            sight=Sight(len(probs), 1, weighted * len(probs) / spread, "the slope of acceptance over q"),
            figures={"root": root},
        ),
    ]


def _rates(found: Evidence) -> Trial:
    """Acceptance by position against its closed form."""
    name = "acceptance rate is sum min(p, q)"
    statistic, degrees, variance, num = 0.0, 0, 0.0, 0
    rows = []
    for position, (probs, hits) in sorted(found.rates.items()):
        expected = math.fsum(probs)
        rows.append({"position": position, "reached": len(probs), "stood": sum(hits), "expected": expected})
        if min(expected, len(probs) - expected) >= 5.0:
            statistic += bernoulli_root(probs, hits) ** 2
            degrees += 1
            num += len(probs)
            variance += sum(p * (1.0 - p) for p in probs)
    if degrees == 0:
        return Trial(name=name, p_value=None, finding="too few proposals for a test", reason=RATE)
    return Trial(
        name=name,
        p_value=chi_square_sf(statistic, degrees),
        finding=", ".join(f"{r['stood']} of {r['reached']} ({r['expected']:.1f})" for r in rows)
        + f" by position, chi-square {statistic:.1f} on {degrees}",
        reason=RATE,
        sight=Sight(num, degrees, math.sqrt(variance / num), "the acceptance rate"),
        figures={"by_position": rows},
    )


# ---- tokens ----------------------------------------------------------------------------------------------------------
def _examine_context(
    name: str,
    system: System,
    prompt: Sequence[int],
    sampling: SamplingParams,
    budget: SampledBudget,
    source: random.Random,
    slack: float,
) -> Trial:
    """Many first steps after one prompt and one first token: what was committed, against p, prefix by prefix."""
    first_V = sampling_law(system.logits(prompt)[-1:], sampling)[0]
    generator = torch.Generator().manual_seed(source.getrandbits(60))
    first = int(torch.multinomial(first_V, 1, generator=generator))
    width = system.max_width
    committed: list[tuple[int, ...]] = []
    for numbers in _batches(range(budget.num_per_context), 4 * budget.rows_at_once):
        asked = [
            Request(
                prompt_ids=prompt,
                max_new_tokens=width + 1,
                sampling=sampling,
                seed=source.getrandbits(62),
                stop_ids=frozenset(),
                speculate=True,
                width=width,
            )
            for _ in numbers
        ]
        traces = system.trace(asked, first_ids=[first] * len(asked), num_steps=1)
        committed.extend(trace.steps[0].committed for trace in traces)
    after: dict[tuple[int, ...], Counter[int]] = {}
    for ids in committed:
        for cut, token in enumerate(ids):
            after.setdefault(ids[:cut], Counter())[token] += 1
    fit, num_outside = Fit(0.0, 0, 0), 0
    for prefix, counts in after.items():
        if counts.total() >= _MIN_COUNT or prefix == ():
            raw_1V = system.logits([*prompt, first, *prefix])[-1:]
            law_V = sampling_law(raw_1V, sampling)[0]
            wide_V = sampling_law(raw_1V, sampling, slack=slack)[0]
            num_outside += sum(n for token, n in counts.items() if wide_V[token] == 0.0)
            inside = {token: n for token, n in counts.items() if law_V[token] > 0.0}
            fit = fit + _law_fit(inside, law_V)
    if fit.degrees == 0 and num_outside == 0:
        return Trial(name=name, p_value=None, finding="the next token is as good as certain here", reason=TOKENS)
    return Trial(
        name=name,
        p_value=either(fit.p_value, binomial_tail(num_outside, max(1, fit.num), slack)),
        finding=f"{len(committed)} steps after {len(prompt) + 1} ids, {fit.num} tokens, "
        f"G = {fit.statistic:.1f} on {fit.degrees}",
        reason=TOKENS,
        sight=Sight(fit.num, fit.degrees) if fit.degrees else None,
        figures={"num_steps": len(committed), "num": fit.num, "num_outside": num_outside},
    )


def _law_fit(counts: dict[int, int], law_V: torch.Tensor) -> Fit:
    """G of counts of ids against a law, without a cell for each of a hundred thousand ids never seen or expected."""
    num = sum(counts.values())
    frequent = {int(i) for i in (law_V * num >= 5.0).nonzero()[:, 0]}
    cells = [(counts.get(i, 0), float(law_V[i]) * num) for i in sorted(frequent)]
    rest_seen = num - sum(seen for seen, _ in cells)
    rest = max(0.0, num - sum(expected for _, expected in cells))
    observed, expected = [seen for seen, _ in cells], [mass for _, mass in cells]
    if rest > 0.0 or rest_seen > 0:
        observed.append(rest_seen)
        expected.append(max(rest, 1e-9 * num))
    return g_fit(observed, expected)


def _text_trials(found: Evidence) -> list[Trial]:
    variance = found.surprise_variance
    root = tilted_root(found.surprise, list(zip(TILTS, found.cumulants, strict=True)))
    num = found.tokens.num
    return [
        _fit_trial("tokens of free texts follow p", found.tokens, found.slack, "tokens", TOKENS),
        Trial(
            name="surprise equals entropy",
            p_value=two_sided(root) if variance > 0.0 else None,
            finding=f"surprise minus entropy {found.surprise / num:+.4f} nats a token over {num}, root {root:.2f}"
            if variance > 0.0
            else "every token was certain",
            reason=SURPRISE,
            sight=Sight(num, 1, math.sqrt(variance / num), "the mean surprise (nats)") if variance > 0.0 else None,
        ),
    ]


# ---- whole texts -----------------------------------------------------------------------------------------------------
def _features(ids: Sequence[int], logs: Sequence[float]) -> tuple[float, ...]:
    """Length, share of different ids, share of pairs that occurred before, mean ln p of what was emitted."""
    pairs = list(itertools.pairwise(ids))
    repeated = 1.0 - len(set(pairs)) / len(pairs) if pairs else 0.0
    return float(len(ids)), len(set(ids)) / len(ids), repeated, fmean(logs[: len(ids)])


def _sequences(texts: _Texts, source: random.Random) -> Trial:
    """Largest standardised difference of mean features, within prompts, by permutation."""
    features = torch.tensor([f for _, f in texts.drafted + texts.plain], dtype=torch.float64)
    prompts = torch.tensor([n for n, _ in texts.drafted + texts.plain])
    side = torch.cat((torch.ones(len(texts.drafted)), torch.zeros(len(texts.plain)))).double()
    for number in prompts.unique():
        here = prompts == number
        features[here] -= features[here].mean(0)
    spread = features.square().sum(0).sqrt()
    features = features[:, spread > 1e-9] / spread[spread > 1e-9]
    name = "texts with and without the draft are alike"
    if len(texts.drafted) < 8 or features.shape[1] == 0:
        return Trial(name=name, p_value=None, finding="too few different texts for a test", reason=SEQUENCES)
    generator = torch.Generator().manual_seed(source.getrandbits(60))
    seen = (side @ features).abs().max()
    num_larger = num_drawn = 0
    # Within a prompt every order is equally likely: sort by prompt first, by noise second.
    base = prompts.double() * 2.0
    order = prompts.argsort(stable=True)
    sides_sorted = side[order]
    features_sorted = features[order]
    keys_sorted = base[order]
    while num_drawn < _NUM_PERMUTATIONS and num_larger < _ENOUGH_LARGER:
        noise = torch.rand(500, len(side), dtype=torch.float64, generator=generator)
        num_drawn += 500
        shuffled = sides_sorted[(keys_sorted + noise).argsort(dim=1)]
        num_larger += int(((shuffled @ features_sorted).abs().amax(1) >= seen - 1e-12).sum())
    return Trial(
        name=name,
        p_value=(1 + num_larger) / (1 + num_drawn),
        finding=f"{len(texts.drafted)} texts each: length, variety, repetition and likelihood, permuted within prompts",
        reason=SEQUENCES,
        sight=Sight(max(1, len(side) // 4), 1, 1.0, "a feature's mean (in its standard deviations)"),
    )
