"""Can these counters be true? Identities of one record, and of all records of a run.

Owns what a wrong adapter, a wrong unit or a wrong engine breaks. A table made of records that break one of them is not
printed as a result. Letters as in record.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockdraft.bench.record import WHOLE_RUN, Counts, RequestRecord

__all__ = ["Verdict", "examine", "faults_of_record", "faults_of_run"]

ROUNDING = 0.006  # of ratios that engines state with two or three digits
SURE_AT, SURE_AT_ANY = 10, 40  # records that all cut one and the same number of tokens; all cut some


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the identities say of a run. `faults` are words, each with the number of records that have it."""

    num_records: int
    num_checked: int
    num_failed: int
    num_without_steps: int
    num_derived: int
    faults: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, object]:
        return {
            "holds": self.holds,
            "num_records": self.num_records,
            "num_checked": self.num_checked,
            "num_failed_requests": self.num_failed,
            "num_without_steps": self.num_without_steps,
            "num_with_derived_steps": self.num_derived,
            "faults": list(self.faults),
        }


def examine(records: Sequence[RequestRecord]) -> Verdict:
    """Every identity over every record. Failed requests are counted, not checked: what they count has no end."""
    whole = [record for record in records if record.is_whole]
    found: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for record in whole:
        for fault in faults_of_record(record):
            name = fault.split(":")[0]
            found[name] += 1
            examples.setdefault(name, f"{record.prompt_id} turn {record.turn}: {fault}")
    faults = [f"{examples[name]} ({count} of {len(whole)} records)" for name, count in found.items()]
    faults += faults_of_run(whole)
    return Verdict(
        num_records=len(records),
        num_checked=len(whole),
        num_failed=len(records) - len(whole),
        num_without_steps=sum(record.speculation and not record.counts.num_steps for record in whole),
        num_derived=sum(record.counts.steps_source == "derived" for record in whole),
        faults=tuple(faults),
    )


def faults_of_record(record: RequestRecord) -> list[str]:
    """Every identity of one record that does not hold, as "name: what was found"."""
    found = [*_time_faults(record), *_split_faults(record)]
    counts = record.counts
    if counts.num_steps is None or counts.num_draft_tokens is None or counts.num_accepted_draft_tokens is None:
        return found
    s, p, a = counts.num_steps, counts.num_draft_tokens, counts.num_accepted_draft_tokens
    if not record.speculation and (p or a):
        found.append(f"speculation is off: yet {p} proposals and {a} accepted ones were counted")
    found += _depth_faults(counts, s, p, a)
    found += _histogram_faults(counts, s, p, a)
    if counts.steps_source == "counted" and not record.is_replay:
        found += _length_faults(counts, s, a, is_limit=counts.num_emitted_tokens > record.max_new_tokens)
    found += _ratio_faults(counts, s, p, a)
    return found


def _time_faults(record: RequestRecord) -> list[str]:
    first = record.first_token_s
    if first is not None and first > record.total_s + 1e-6:
        return [f"the first token is not after the last: {first:.4f} s, {record.total_s:.4f} s"]
    return []


def _split_faults(record: RequestRecord) -> list[str]:
    thinking = record.num_thinking_tokens
    if thinking is not None and thinking > record.counts.num_emitted_tokens:
        return [f"thinking is part of the output: {thinking} of {record.counts.num_emitted_tokens} tokens"]
    return []


def _depth_faults(counts: Counts, s: int, p: int, a: int) -> list[str]:
    k = counts.max_draft_tokens
    found = []
    if a > p:
        found.append(f"A <= P: {a} accepted of {p} proposals")
    if k is not None and p > k * s:
        found.append(f"P <= k S: {p} proposals in {s} steps of at most {k}; is the unit the block's rows?")
    if k is not None and counts.has_fixed_depth and p != k * s:
        found.append(f"P = k S: {p} proposals in {s} steps of {k}")
    if k is not None and a > k * s:
        found.append(f"A <= k S: {a} accepted in {s} steps of {k}; is the bonus token counted?")
    return found


def _histogram_faults(counts: Counts, s: int, p: int, a: int) -> list[str]:
    found = []
    accepted, drafted = counts.accepted_histogram, counts.drafted_histogram
    for name, histogram, total in (("accepted", accepted, a), ("drafted", drafted, p)):
        if histogram is None:
            continue
        if sum(histogram) != s:
            found.append(f"sum of the {name} histogram = S: {sum(histogram)}, {s}")
        if (weighted := sum(i * n for i, n in enumerate(histogram))) != total:
            found.append(f"weighted sum of the {name} histogram = its tokens: {weighted}, {total}")
        k = counts.max_draft_tokens
        if k is not None and any(histogram[k + 1 :]):
            found.append(f"no step of the {name} histogram is beyond k: {list(histogram)}, {k}")
    if accepted is not None and drafted is not None:
        longest = max(len(accepted), len(drafted))
        if any(sum(accepted[i:]) > sum(drafted[i:]) for i in range(longest)):
            found.append(f"no step accepts more than it drafted: {list(accepted)}, {list(drafted)}")
    one, two = counts.per_step_accepted, counts.per_step_drafted
    for name, steps, total in (("accepted", one, a), ("drafted", two, p)):
        if steps is not None and (len(steps) != s or sum(steps) != total):
            found.append(f"{name} by step = its sums: {len(steps)} steps of {s}, {sum(steps)} tokens of {total}")
    if one is not None and two is not None and any(x > y for x, y in zip(one, two, strict=False)):
        found.append("every step accepts at most what it drafted: one does not")
    return found


def _length_faults(counts: Counts, s: int, a: int, *, is_limit: bool) -> list[str]:
    c, k = counts.num_emitted_tokens, counts.max_draft_tokens
    if is_limit:
        return [f"C <= the length limit: {c} tokens"]
    if s == 0:
        return [f"C <= 1 without steps: {c} tokens"] if c > 1 else []
    cut = 1 + s + a - c
    if cut < 0:
        return [f"1 + S + A - C >= 0: it is {cut} (S {s}, A {a}, C {c}); tokens came from nowhere"]
    if cut > (a if k is None else min(a, k)):
        return [f"1 + S + A - C <= min(A, k): it is {cut} (S {s}, A {a}, C {c}, k {k}); is something counted twice?"]
    if counts.num_clipped_tokens is not None and cut != counts.num_clipped_tokens:
        return [f"1 + S + A - C = tokens cut away: {cut}, {counts.num_clipped_tokens}"]
    return []


def _ratio_faults(counts: Counts, s: int, p: int, a: int) -> list[str]:
    found = []
    length, rate = counts.reported_acceptance_length, counts.reported_acceptance_rate
    if length is not None and s and abs(length - (1 + a / s)) > ROUNDING * length:
        found.append(f"the length that is stated = 1 + A / S: {length:.4f}, {1 + a / s:.4f}")
    if rate is not None and p and abs(rate - a / p) > ROUNDING:
        found.append(f"the rate that is stated = A / P: {rate:.4f}, {a / p:.4f}")
    return found


def faults_of_run(records: Iterable[RequestRecord]) -> list[str]:
    """What only many records together show, by engine and setting."""
    groups: dict[tuple[object, ...], list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.counts.has_acceptance and record.speculation and not record.is_replay:
            groups[(record.engine, record.width, record.sampling, record.load)].append(record)
    found = []
    for (engine, width, *_), group in groups.items():
        found += _sum_faults(group)
        depths = {record.counts.max_draft_tokens for record in group} - {None}
        if len(depths) > 1:
            found.append(f"one k in a setting: {engine}, width {width}, has {sorted(map(str, depths))}")
        cuts = [_cut(record.counts) for record in group if record.counts.steps_source == "counted"]
        least, most = min(cuts, default=0), max(cuts, default=0)
        if least >= 1 and (len(cuts) >= SURE_AT_ANY or (least == most and len(cuts) >= SURE_AT)):
            found.append(
                f"last steps that nothing cut: in all {len(cuts)} records of {engine}, width {width}, 1 + S + A - C "
                f"is at least {least}; is the token of the prefill counted as a step or as accepted?"
            )
    return found


def _sum_faults(records: Sequence[RequestRecord]) -> list[str]:
    """Where a run had a server for itself, its requests add up to what the server counted."""
    found = []
    for record in records:
        entry = record.raw.get(WHOLE_RUN)
        if not isinstance(entry, dict) or entry.get("nobody_else") is not True or not entry.get("requests"):
            continue
        for name, ours in entry["requests"].items():
            theirs = entry["server"].get(name)
            if theirs is not None and theirs != ours:
                found.append(
                    f"the sum over {entry['num_requests']} requests = the server's counter: {name} {ours}, {theirs}"
                )
    return found


def _cut(counts: Counts) -> int:
    return 1 + (counts.num_steps or 0) + (counts.num_accepted_draft_tokens or 0) - counts.num_emitted_tokens
