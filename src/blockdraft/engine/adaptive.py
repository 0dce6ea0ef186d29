"""The width of each row's next block and where its proposals come from, chosen for the most tokens per second.

Owns the choice: from what a step costs (costs.py), how likely each request's proposals are to stand (expected.py) and
whether its text has ended like this before (lookup.py), plain decoding included, and from rare probes of rows that do
not speculate. Pure arithmetic over few numbers; no torch.

A second is worth RATE tokens: those of plain decoding times the gain that speculation had of late. A step with n rows
and m proposals is worth n + (sum of their survivals) - RATE * (table[m] + drafting seconds). Survivals fall along a
block, so for any m the best m proposals are the likeliest ones, and one pass over all proposals in that order sees
every width vector that can be best. What a row costs to speculate at all (its share of the draft's pass, catching up
with the taps held back) is charged to its first proposals.

What keeps it from harm: speculation must promise MARGIN more than plain decoding before it begins; probes and audits
are paid from a budget, a share of all time, and become rarer while they find nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from blockdraft.engine.costs import DraftPrices, StepCosts, StepSample
from blockdraft.engine.expected import AcceptanceRecord, Ease
from blockdraft.engine.lookup import LookupRecord, TextIndex
from blockdraft.engine.width_report import RowReport, WidthReport

if TYPE_CHECKING:
    from blockdraft.engine.row import RunningRow
    from blockdraft.engine.times import StepTimes

__all__ = ["AdaptiveWidth", "RowReport", "WidthReport"]

MARGIN = 0.02  # predicted gain over plain decoding at which speculation begins
STAY = 0.01  # predicted loss at which it ends
TRUSTED_STEPS = 8  # with drafting, after which half of the table's stated error is forgotten
GAIN_RATE = 0.05  # of the running mean of gains, per step
HORIZON_STEPS = 32.0  # over which the cost of catching up is counted
MOST_LOST_STEPS = 4.0  # that are remembered
PROBE_SHARE = 0.005  # of all time, for probes and audits together
FIRST_BUDGET_STEPS = 0.5  # what the budget begins with, in plain steps
LOST_WEIGHT = 0.15  # gain that must be promised for each plain step that speculation has lost, per root of the rows
PROBE_WIDTH = 3
FIRST_PROBE_STEPS, LAST_PROBE_STEPS = 8, 512  # pause between two probes of a row, doubled while they find nothing
AUDIT_STEPS = 64  # at least, between two plain steps that check whether speculation still pays
AUDIT_GAIN = 0.10  # predicted gain below which it is checked
REFRESH_STEPS = 8  # after which a row that does not speculate is estimated anew from the engine's average


@dataclass(slots=True)
class _State:
    """What the policy keeps of a running row."""

    ease: Ease
    survival: list[float]
    probe_pause: int = FIRST_PROBE_STEPS
    next_probe: int = 0
    num_draft_seen: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    num_probes: int = 0
    num_lookups: int = 0
    index: TextIndex = field(default_factory=TextIndex)
    lookup_ease: Ease = field(default_factory=Ease)
    match: tuple[int, list[int]] = (0, [])
    """What followed the last time that the text ended like this, and in how many ids the two agree."""
    is_lookup: bool = False
    """Whether the row's next proposals are the match's."""


_Piece = tuple[float, int, float, float, bool, int]
"""Proposals of one row that are taken together: (tokens per proposal less what drafting them costs, proposals, tokens,
seconds of drafting, whether they are the match's, row). A tuple, because hundreds are made in every step."""


@dataclass(slots=True)
class _Plan:
    """A choice and what it promises: tokens and seconds (without the machine's level) of the step."""

    widths: list[int]
    tokens: float
    seconds: float
    plain_rate: float
    plain_s: float
    best_rate: float
    kind: str  # "plain", "speculate", "probe", "audit"


class AdaptiveWidth:
    """Chooses widths by predicted tokens per second, and learns from every step.

    ``num_positions`` is the most proposals of a block, ``prior`` the conditional acceptance by position that is known
    of the draft. Rows with a fixed width keep it.
    """

    def __init__(self, costs: StepCosts, *, num_positions: int, prior: Sequence[float] | None = None) -> None:
        self.costs = costs
        self.acceptance = AcceptanceRecord(num_positions, prior)
        self.lookups = LookupRecord(num_positions)
        self._states: WeakKeyDictionary[RunningRow, _State] = WeakKeyDictionary()
        self._step = 0
        self._is_on = False
        self._gain = 1.0  # of the choices of late over plain decoding, predicted
        self._budget_s: float | None = None  # for probes and audits
        self._won_s = 0.0  # by speculation against plain decoding, of late
        self._total_s = self._spent_s = 0.0
        self._last_audit = 0
        self._plan: _Plan | None = None
        self._widths: Counter[int] = Counter()
        self._num_probes = self._num_audits = self._num_drafted = self._num_lookups = 0
        self._expected = [0.0, 0.0]  # tokens, seconds
        self._measured = [0.0, 0.0]
        self._context = self._num_injected = 0
        self._last_draft: tuple[int, int] | None = None  # rows and proposals of the last step that drafted

    # ---- the choice --------------------------------------------------------------------------------------------------
    def choose(self, rows: Sequence[RunningRow], most: Sequence[int]) -> list[int]:
        """The width of each row's next block, 1 <= width <= most of the row."""
        self._step += 1
        if not rows:
            self._plan = None
            return []
        states = [self._state(row) for row in rows]
        for row, state, limit in zip(rows, states, most, strict=True):
            state.is_lookup = False
            state.match = (0, []) if limit == 1 or row.has_fixed_width else state.index.find(row.ids, limit - 1)
        self._context = sum(len(row.ids) for row in rows)
        plan = self._best(rows, states, most)
        if self._budget_s is None:
            self._budget_s = FIRST_BUDGET_STEPS * len(rows) / plan.plain_rate
            self._won_s = self._stake_s(len(rows), plan.plain_rate)
        if plan.kind == "speculate":
            plan = self._audited(rows, most, plan)
        if any(width == 1 < limit for width, limit in zip(plan.widths, most, strict=True)):
            plan = self._probed(rows, states, most, plan)
        self._plan = plan
        self._num_injected = sum(
            row.num_pending
            for row, state, width in zip(rows, states, plan.widths, strict=True)
            if width > 1 and not state.is_lookup
        )
        return plan.widths

    def offers(self, rows: Sequence[RunningRow], widths: Sequence[int]) -> list[Sequence[int] | None]:
        """Proposals that are here already, width - 1 of them; None where the draft is to make them."""
        states = [self._state(row) for row in rows]
        return [s.match[1][: w - 1] if s.is_lookup and w > 1 else None for s, w in zip(states, widths, strict=True)]

    def _state(self, row: RunningRow) -> _State:
        state = self._states.get(row)
        if state is None:
            ease = Ease()
            state = self._states[row] = _State(ease, self.acceptance.survival(ease))
        return state

    def _best(self, rows: Sequence[RunningRow], states: Sequence[_State], most: Sequence[int]) -> _Plan:
        """The widths of the highest tokens per second; rows that speculated at the last step need no margin."""
        num_rows = len(rows)
        widths = [1] * num_rows
        tokens, num_extra, num_drafting = float(num_rows), 0, 0
        fixed_widths = set()
        for i, row in enumerate(rows):
            if row.has_fixed_width and most[i] > 1:
                widths[i] = most[i]
                fixed_widths.add(most[i])
                num_drafting += 1
                num_extra += most[i] - 1
                tokens += sum(states[i].survival[: most[i] - 1])
        most_extra = sum(most) - num_rows
        table = self.costs.table(num_rows, most_extra)
        prices = self.costs.draft_prices(*(self._last_draft or (num_rows, 3 * num_rows)))
        plain_s = self.costs.model.context_s * self._context + table[num_extra]
        if num_drafting:
            plain_s += prices.pass_s * len(fixed_widths) + prices.row_s * num_drafting + prices.inject_s
            plain_s += prices.position_s * num_extra
        plain_rate = tokens / plain_s
        rate = plain_rate * self._gain
        near = min(max(3 * num_rows, num_extra + 1), most_extra)
        position_s = (table[near] - table[num_extra]) / (near - num_extra) if near > num_extra else 0.0
        pass_s = prices.pass_s + (0.0 if num_drafting else prices.inject_s)
        pieces = self._pieces(rows, states, most, widths, prices, pass_s / num_rows, position_s, rate)
        # all prefixes of the proposals in falling order of what they bring
        extra, gained, seconds, is_drafting = num_extra, tokens, plain_s - table[num_extra], False
        best, best_count, best_tokens, best_s = -math.inf, 0, tokens, plain_s
        for count, (_, size, value, draft_s, is_lookup, _) in enumerate(pieces, start=1):
            extra += size
            gained += value
            if not is_lookup:
                seconds += draft_s if is_drafting else draft_s + pass_s
                is_drafting = True
            worth = gained - rate * (seconds + table[extra])
            if worth > best:
                best, best_count, best_tokens, best_s = worth, count, gained, seconds + table[extra]
        gain = best - (tokens - rate * plain_s)
        needed = -STAY if self._is_on else self._margin
        self._is_on = gain > tokens * (needed + self._lost_share(num_rows, plain_s))
        best_rate = best_tokens / best_s if pieces else 0.0
        if not self._is_on:
            self._learn_gain(1.0)
            return _Plan(widths, tokens, plain_s, plain_rate, plain_s, best_rate, "plain")
        self._learn_gain(best_rate / plain_rate)
        for _, size, _, _, is_lookup, i in pieces[:best_count]:
            widths[i] += size
            states[i].is_lookup = is_lookup
        return _Plan(widths, best_tokens, best_s, plain_rate, plain_s, best_rate, "speculate")

    @property
    def _margin(self) -> float:
        """Gain that must be promised: more while the table is believed, less once speculative steps were timed."""
        doubt = self.costs.model.error or 0.0
        return MARGIN + doubt * TRUSTED_STEPS / (TRUSTED_STEPS + self._num_drafted)

    def _lost_share(self, num_rows: int, plain_s: float) -> float:
        """More gain that must be promised while speculation has lost more than its stake."""
        return LOST_WEIGHT * math.sqrt(num_rows) * max(-self._won_s, 0.0) / plain_s

    @staticmethod
    def _stake_s(num_rows: int, plain_rate: float) -> float:
        """What speculation may lose before it must promise more: a plain step, and more for few rows, whose luck
        varies more."""
        return (1.0 + 2.0 / num_rows) * num_rows / plain_rate

    def _learn_gain(self, gain: float) -> None:
        self._gain += max(GAIN_RATE, 1.0 / self._step) * (gain - self._gain)

    def _pieces(
        self,
        rows: Sequence[RunningRow],
        states: Sequence[_State],
        most: Sequence[int],
        widths: Sequence[int],
        prices: DraftPrices,
        pass_s: float,
        position_s: float,
        rate: float,
    ) -> list[_Piece]:
        """The proposals of all rows in falling order of their worth.

        A row takes them from its match or from the draft, whichever is worth more at ``position_s`` per scored position
        and with its share ``pass_s`` of the draft's pass. Its first piece carries what it costs to draft for it at all,
        and as many proposals as make that worth most.
        """
        pieces: list[_Piece] = []
        charge, position = rate * prices.position_s, rate * position_s
        for i, row in enumerate(rows):
            count = most[i] - widths[i]
            if count <= 0 or widths[i] > 1:
                continue
            state = states[i]
            survival = state.survival
            on_s = prices.row_s + prices.inject_position_s * row.num_pending / HORIZON_STEPS
            length, found = state.match
            if found:
                looked_up = self.lookups.survival(length, state.lookup_ease)[: min(count, len(found))]
                drafted = _best_sum(survival[:count], position + charge) - rate * (on_s + pass_s)
                if _best_sum(looked_up, position) >= max(drafted, 0.0):
                    pieces.extend((value, 1, value, 0.0, True, i) for value in looked_up)
                    continue
            best, size, total = -math.inf, 1, 0.0
            for k in range(count):
                total += survival[k]
                mean = (total - rate * on_s) / (k + 1)
                if mean <= best:
                    break
                best, size = mean, k + 1
            draft_s = on_s + size * prices.position_s
            pieces.append((best - charge, size, sum(survival[:size]), draft_s, False, i))
            pieces.extend((v - charge, 1, v, prices.position_s, False, i) for v in survival[size:count])
        pieces.sort(key=itemgetter(0), reverse=True)
        return pieces

    # ---- probes and audits -------------------------------------------------------------------------------------------
    def _audited(self, rows: Sequence[RunningRow], most: Sequence[int], plan: _Plan) -> _Plan:
        """A plain step instead of the plan, now and then where the two are predicted to be close."""
        gain = plan.best_rate / plan.plain_rate - 1.0
        if gain > AUDIT_GAIN or self._step - self._last_audit < AUDIT_STEPS:
            return plan
        widths = [limit if row.has_fixed_width else 1 for row, limit in zip(rows, most, strict=True)]
        rate, seconds = plan.plain_rate, plan.plain_s
        loss_s = max(gain, 0.0) * seconds
        if loss_s > self._left_s:
            return plan
        self._spend(loss_s)
        self._last_audit, self._num_audits = self._step, self._num_audits + 1
        return _Plan(widths, rate * seconds, seconds, rate, seconds, plan.best_rate, "audit")

    def _probed(self, rows: Sequence[RunningRow], states: Sequence[_State], most: Sequence[int], plan: _Plan) -> _Plan:
        """The plan with a few of the rows that do not speculate at a small width, if the budget allows it."""
        due = [
            i
            for i, state in enumerate(states)
            if plan.widths[i] == 1 < most[i] and state.next_probe <= self._step and not rows[i].has_fixed_width
        ]
        if not due:
            return plan
        due.sort(key=lambda i: states[i].next_probe)
        due = due[: max(1, len(rows) // 8)]
        widths, value, num_extra = list(plan.widths), 0.0, sum(plan.widths) - len(rows)
        added = injected = 0
        for i in due:
            widths[i] = min(PROBE_WIDTH, most[i])
            states[i].survival = self.acceptance.survival(states[i].ease)
            value += sum(states[i].survival[: widths[i] - 1])
            added += widths[i] - 1
            injected += rows[i].num_pending
        table = self.costs.table(len(rows), sum(most) - len(rows))
        prices = self.costs.draft_prices(len(due), added)
        cost_s = table[num_extra + added] - table[num_extra] + prices.row_s * len(due) + prices.position_s * added
        cost_s += prices.inject_position_s * injected
        if plan.kind != "speculate":
            cost_s += prices.pass_s + prices.inject_s
        loss_s = max(cost_s - value / (plan.plain_rate * self._gain), 0.0)
        if loss_s > self._left_s:
            return plan
        self._spend(loss_s)
        self._num_probes += len(due)
        for i in due:
            state = states[i]
            state.num_probes += 1
            state.next_probe = self._step + state.probe_pause
            state.probe_pause = min(2 * state.probe_pause, LAST_PROBE_STEPS)
        kind = "probe" if plan.kind == "plain" else plan.kind
        tokens, seconds = plan.tokens + value, plan.seconds + cost_s
        return _Plan(widths, tokens, seconds, plan.plain_rate, plan.plain_s, plan.best_rate, kind)

    @property
    def _left_s(self) -> float:
        return self._budget_s or 0.0

    def _spend(self, seconds: float) -> None:
        self._budget_s = self._left_s - seconds
        self._spent_s += seconds

    # ---- learning ----------------------------------------------------------------------------------------------------
    def record(
        self, rows: Sequence[RunningRow], widths: Sequence[int], num_accepted: Sequence[int], times: StepTimes
    ) -> None:
        """What a step with these widths gave."""
        num_drafting = num_proposals = 0
        drafted: list[_State] = []
        passes = set()  # a pass for each fixed width, and one for all rows without
        for row, width, accepted in zip(rows, widths, num_accepted, strict=True):
            state = self._state(row)
            state.widths[width] += 1
            self._widths[width] += 1
            num_proposed = row.stats.num_draft_tokens - state.num_draft_seen  # fewer than width - 1 after a cut
            state.num_draft_seen = row.stats.num_draft_tokens
            if width > 1 and state.is_lookup:
                state.num_lookups += 1
                self._num_lookups += 1
                self.lookups.observe(state.match[0], state.lookup_ease, num_proposed, accepted)
            elif width > 1:
                passes.add(width if row.has_fixed_width else 0)
                num_drafting += 1
                num_proposals += width - 1
                self.acceptance.observe(state.ease, num_proposed, accepted)
                drafted.append(state)
                if self._is_on:
                    state.probe_pause = FIRST_PROBE_STEPS
                    state.next_probe = self._step + FIRST_PROBE_STEPS
            elif (self._step + id(row) // 64) % REFRESH_STEPS == 0:
                state.survival = self.acceptance.survival(state.ease)
        self.acceptance.refresh()
        for state in drafted:
            state.survival = self.acceptance.survival(state.ease)
        if num_drafting:
            self._last_draft = (num_drafting, num_proposals)
            self._num_drafted += 1
        plan, seconds = self._plan, times.total_s
        if plan is None or times.num_prefilled or not rows:
            return
        self._total_s += seconds
        self._settle(plan, sum(num_accepted) + len(rows), len(rows), seconds / self.costs.level)
        self._expected[0] += plan.tokens
        self._expected[1] += plan.seconds * self.costs.level
        self._measured[0] += sum(num_accepted) + len(rows)
        self._measured[1] += seconds
        self.costs.observe(
            StepSample(
                num_rows=len(rows),
                num_scored=times.num_scored,
                context=self._context,
                num_passes=len(passes),
                num_drafting=num_drafting,
                num_proposals=num_proposals,
                num_injected=self._num_injected,
                score_s=times.score_s,
                other_s=times.accept_s + times.commit_s,
                propose_s=times.propose_s,
            )
        )

    def _settle(self, plan: _Plan, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Pay into the budget of probes, and book what speculation won or lost against plain decoding."""
        paid_s = PROBE_SHARE * seconds
        self._budget_s = min(self._left_s + paid_s, 2.0 * plan.seconds)
        plain_step_s = num_rows / plan.plain_rate
        won_s = paid_s
        if plan.kind == "speculate":
            spent_s = min(max(seconds, 0.8 * plan.seconds), 1.25 * plan.seconds)  # the rest is the machine's
            won_s += max(num_tokens / plan.plain_rate - spent_s, -plain_step_s)
        least_s, most_s = -MOST_LOST_STEPS * plain_step_s, self._stake_s(num_rows, plan.plain_rate)
        self._won_s = min(max(self._won_s + won_s, least_s), most_s)

    # ---- explanations ------------------------------------------------------------------------------------------------
    def report(self) -> WidthReport:
        """What was chosen so far, what it was expected to give and what it gave."""
        expected, measured = (a / b if b > 0 else None for a, b in (self._expected, self._measured))
        return WidthReport(
            num_steps=self._step,
            widths=dict(sorted(self._widths.items())),
            num_probes=self._num_probes,
            num_audits=self._num_audits,
            num_lookups=self._num_lookups,
            probe_share=self._spent_s * self.costs.level / self._total_s if self._total_s else 0.0,
            expected_tok_per_s=expected,
            measured_tok_per_s=measured,
            conditional_acceptance=self.acceptance.shares,
            num_trials=self.acceptance.num_trials,
            lookup_acceptance=self.lookups.shares(),
            reason=self._reason(),
        )

    def explain(self, row: RunningRow) -> RowReport:
        """How the widths of one request were chosen."""
        state = self._state(row)
        reason = "its width is fixed" if row.has_fixed_width else self._reason()
        return RowReport(
            widths=dict(sorted(state.widths.items())),
            num_probes=state.num_probes,
            num_lookups=state.num_lookups,
            survival=list(state.survival),
            reason=reason,
        )

    def _reason(self) -> str:
        plan = self._plan
        if plan is None:
            return "no step yet"
        level = self.costs.level
        plain, best = plan.plain_rate / level, plan.best_rate / level
        survival = " ".join(f"{100 * share:.0f}" for share in self.acceptance.survival())
        means = f"an average request has {survival} % of its proposals accepted by position"
        if plan.kind in ("speculate", "audit"):
            return f"speculates: {best:.1f} tok/s predicted, plain {plain:.1f}; {means}"
        if best <= plain:
            return f"plain: no width promises more than its {plain:.1f} tok/s; {means}"
        return (
            f"plain: the best widths promise {best:.1f} tok/s, plain {plain:.1f}, not {self._margin:.1%} more; {means}"
        )


def _best_sum(values: Sequence[float], price: float) -> float:
    """The largest sum of the first of these falling values, each less the price; at least 0."""
    total = 0.0
    for value in values:
        if value <= price:
            break
        total += value - price
    return total
