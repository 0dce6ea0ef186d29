"""Widths in the engine: every choice gives the same greedy text, free rows share a pass, costs are measured once."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

import blockdraft.engine.cost_probe as cost_probe
from blockdraft import Request, SamplingParams, load
from blockdraft.engine import Engine
from blockdraft.engine.adaptive import AdaptiveWidth
from blockdraft.engine.cost_probe import cost_key, grid, measure_costs, stored_costs
from blockdraft.engine.costs import StepCosts
from blockdraft.engine.lookup import TextIndex
from blockdraft.engine.tune import known_acceptance
from blockdraft.errors import RequestError
from engine_kit import bigram_model, draft_config, hf_target, plain_ids, random_draft, tiny_model
from tiny_pair import run_cli
from width_kit import cpu_machine, measured_costs


class Scripted:
    """Widths by chance, and a record of what was asked for."""

    def __init__(self, seed: int, guess: float = 0.3) -> None:
        self.source, self.chosen, self.guess = random.Random(seed), [], guess

    def choose(self, rows, most):
        free = [1 if self.source.random() < 0.4 else self.source.randint(1, limit) for limit in most]
        self.chosen.append([m if row.has_fixed_width else w for row, m, w in zip(rows, most, free, strict=True)])
        return self.chosen[-1]

    def offers(self, rows, widths):
        """Guesses, now and then, where the draft would have proposed."""
        free = [w > 1 and not row.has_fixed_width for row, w in zip(rows, widths, strict=True)]
        chance = [self.source.random() < self.guess for _ in rows]
        return [
            [self.source.randrange(30) for _ in range(w - 1)] if may and does else None
            for w, may, does in zip(widths, free, chance, strict=True)
        ]

    def record(self, rows, widths, num_accepted, times):
        pass


@pytest.fixture(scope="module")
def pair():
    model = tiny_model(seed=3)
    target = hf_target(model)
    return model, target, random_draft(draft_config(target.facts))


def prompts(count: int) -> list[list[int]]:
    source = random.Random(8)
    return [[source.randrange(30) for _ in range(source.randint(2, 9))] for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_does_not_depend_on_the_widths(pair, seed):
    model, target, draft = pair
    engine = Engine(target, draft, max_rows=4, width_policy=Scripted(seed))
    asked = [Request(prompt_ids=ids, max_new_tokens=24, stop_ids=frozenset()) for ids in prompts(6)]
    for request, done in zip(asked, engine.run(asked), strict=True):
        assert list(done.token_ids) == plain_ids(model, request.prompt_ids, 24)


def test_a_seeded_text_does_not_depend_on_the_policy(pair):
    _, target, draft = pair
    sampling = SamplingParams(temperature=1.0)
    seeded = [
        Request(prompt_ids=ids, max_new_tokens=20, sampling=sampling, seed=number, stop_ids=frozenset())
        for number, ids in enumerate(prompts(3))
    ]
    company = [Request(prompt_ids=ids, max_new_tokens=30, stop_ids=frozenset()) for ids in prompts(3)]
    alone = [Engine(target, draft).run([request])[0].token_ids for request in seeded]
    for seed in range(2):
        policy = Scripted(seed)
        together = Engine(target, draft, width_policy=policy).run([*seeded, *company])
        assert [done.token_ids for done in together[:3]] == alone
    assert len({width for widths in policy.chosen for width in widths}) > 3


def test_free_rows_share_one_pass_and_take_the_first_proposals_of_it(pair, monkeypatch):
    _, target, draft = pair
    passes, proposed = [], []
    forward, propose = type(draft).forward, type(draft).propose_rows

    def watched(self, noise_BLD, caches, *rest):
        passes.append(tuple(noise_BLD.shape[:2]))
        return forward(self, noise_BLD, caches, *rest)

    def kept(self, *arguments, **options):
        found = propose(self, *arguments, **options)
        proposed.extend(one.ids_G.tolist() for one in found)
        return found

    monkeypatch.setattr(type(draft), "forward", watched)
    monkeypatch.setattr(type(draft), "propose_rows", kept)

    def run(free, fixed):
        passes.clear(), proposed.clear()
        engine = Engine(target, draft, width_policy=_Widths(free))
        asked = [Request(prompt_ids=ids, max_new_tokens=12, stop_ids=frozenset()) for ids in prompts(len(free))]
        if fixed:
            asked[-1] = replace(asked[-1], width=fixed)
        tickets = [engine.submit(request) for request in asked]
        engine.step(), engine.step()
        assert all(ticket.row is not None and ticket.row.num_emitted > 1 for ticket in tickets)
        return list(passes), list(proposed)

    wide, by_wide = run([8, 8, 8, 8], None)
    assert wide == [(4, 8)]
    shared, by_shared = run([3, 8, 1, 5], None)
    assert shared == [(3, 8)]
    assert by_shared == [by_wide[0][:2], by_wide[1], by_wide[3][:4]]
    mixed, _ = run([3, 8, 2, 5], 5)
    assert sorted(mixed) == [(1, 5), (3, 8)]


class _Widths(Scripted):
    def __init__(self, widths) -> None:
        super().__init__(0, guess=0.0)
        self.widths = widths

    def choose(self, rows, most):
        return [min(w, limit) for w, limit in zip(self.widths, most, strict=False)]


def test_no_pass_is_wider_than_what_the_draft_has_positions_for(pair):
    model, target, _ = pair
    draft = random_draft(replace(draft_config(target.facts), max_position_embeddings=40))
    engine = Engine(target, draft, width_policy=Scripted(1))
    asked = [Request(prompt_ids=ids, max_new_tokens=45, stop_ids=frozenset()) for ids in prompts(4)]
    for request, done in zip(asked, engine.run(asked), strict=True):
        assert list(done.token_ids) == plain_ids(model, request.prompt_ids, 45)


# ---- proposals from the text -----------------------------------------------------------------------------------------
def test_the_index_finds_the_longest_match_and_of_equal_ones_the_latest():
    source = random.Random(2)
    for _ in range(40):
        ids, index = [source.randrange(4) for _ in range(3)], TextIndex()
        for _ in range(60):
            most = source.randint(1, 6)
            assert index.find(ids, most) == longest_match(ids, most)
            ids.extend(source.randrange(4) for _ in range(source.randint(1, 3)))
    assert TextIndex().find([], 3) == TextIndex().find([1], 3) == TextIndex().find([1, 2], 3) == (0, [])


def longest_match(ids, most):
    """By trying the 8 latest earlier places of the last two ids."""
    last = len(ids) - 1
    places = [at for at in range(1, last) if ids[at - 1 : at + 1] == ids[last - 1 :]][-8:]
    best, found = 0, []
    for place in places:
        same = 2
        while same < 12 and same <= place and ids[place - same] == ids[last - same]:
            same += 1
        if same >= best:
            best, found = same, ids[place + 1 : place + 1 + most]
    return best, found


def test_a_text_that_repeats_itself_proposes_its_own_continuation():
    model = bigram_model(lambda i: (i + 1) % 9)
    target = hf_target(model)
    draft = random_draft(draft_config(target.facts))
    for sampling in (SamplingParams(), SamplingParams(temperature=0.05)):  # at which its law is as good as one id
        policy = AdaptiveWidth(measured_costs(cpu_machine()), num_positions=7)
        engine = Engine(target, draft, width_policy=policy)
        [done] = engine.run([Request(prompt_ids=[3, 4], max_new_tokens=60, stop_ids=frozenset(), sampling=sampling)])
        assert list(done.token_ids) == [(5 + i) % 9 for i in range(60)]
        report = policy.report()
        assert report.num_lookups > 3 and done.stats.num_accepted_draft_tokens > 25
        assert "from the text" in str(report)


# ---- measured costs --------------------------------------------------------------------------------------------------
def test_costs_of_a_pair_are_measured_in_time_and_leave_nothing_behind(pair):
    _, target, draft = pair
    freed, made = [], []
    watch = _Watched(target, made, freed)
    started = cost_probe.time.process_time()
    model = measure_costs(watch, draft, max_rows=8, limit_s=0.4)
    assert cost_probe.time.process_time() - started < 2.0
    assert len(freed) == len(made) >= 1
    assert model.curve_s(1) > 0.0 and model.draft_pass_s + model.draft_row_s + model.draft_position_s > 0.0


class _Watched:
    def __init__(self, target, made, freed) -> None:
        self._target, self._made, self._freed = target, made, freed

    def __getattr__(self, name):
        return getattr(self._target, name)

    def new_row(self):
        self._made.append(self._target.new_row())
        return self._made[-1]

    def free(self, row):
        self._freed.append(row)
        self._target.free(row)


def test_the_grid_begins_with_what_matters_and_stays_inside_the_engine():
    points = grid(16, 8)
    assert points[:2] == [(1, 1), (1, 8)] and len(points) == len(set(points))
    assert max(n for n, _ in points) == 16 and max(w for _, w in points) == 8
    assert grid(1, 1) == [(1, 1)]


def test_an_engine_that_chooses_its_widths_writes_the_same_text(pair):
    model, target, draft = pair
    costs = StepCosts(measure_costs(target, draft, max_rows=4, limit_s=0.3))
    policy = AdaptiveWidth(costs, num_positions=7, prior=[0.9])
    engine = Engine(target, draft, max_rows=4, width_policy=policy)
    asked = [Request(prompt_ids=ids, max_new_tokens=40, stop_ids=frozenset()) for ids in prompts(6)]
    for request, done in zip(asked, engine.run(asked), strict=True):
        assert list(done.token_ids) == plain_ids(model, request.prompt_ids, 40)
    report = policy.report()
    assert report.num_steps >= 40 and sum(report.widths.values()) > report.num_steps
    assert report.measured_tok_per_s is not None and report.measured_tok_per_s > 0.0


def test_costs_are_stored_and_measured_again_after_any_change(pair, tmp_path, monkeypatch):
    _, target, draft = pair
    folder = tmp_path / "pair"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    measured = []

    def measure(target, draft, *, max_rows):
        measured.append(max_rows)
        return measure_costs(target, draft, max_rows=1, limit_s=0.05)

    monkeypatch.setattr(cost_probe, "measure_costs", measure)

    def get(**changes):
        given = {"target_folder": folder, "draft_folder": folder, "max_rows": 4, "options": {}, **changes}
        key = cost_key(target, draft, **given)
        return stored_costs(key, target, draft, max_rows=given["max_rows"], cache_dir=tmp_path)

    first = get()
    assert get() == first and measured == [4]
    get(max_rows=5), get(options={"quantize": "int8"})
    assert measured == [4, 5, 4]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        get()
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 4
    (folder / "model.safetensors").write_bytes(bytes([1]) * 100)
    get()
    assert len(measured) == 5
    stored = sorted((tmp_path / "costs").iterdir())
    assert len(stored) == 5 and all(path.suffix == ".json" for path in stored)
    for path in stored:
        path.write_text("{")
    get()
    assert len(measured) == 6
    for path in stored:
        raw = {"key": [], "model": {}}
        path.write_text(json.dumps(raw))
    get(), get()
    assert len(measured) == 7


def test_what_the_training_run_knows_is_the_prior(tmp_path):
    def known(record) -> list[float] | None:
        (tmp_path / "run.json").write_text(json.dumps(record))
        return known_acceptance(tmp_path)

    assert known({"evaluation": {"conditional_acceptance": [0.5, 0.6, None]}}) == [0.5, 0.6]
    assert known({"evaluation": {}}) is None and known([]) is None and known({}) is None
    assert known({"evaluation": {"conditional_acceptance": [None, 0.4]}}) is None
    (tmp_path / "run.json").write_text("{")
    assert known_acceptance(tmp_path) is None
    assert known_acceptance(tmp_path / "nowhere") is None


def test_load_with_an_adaptive_width(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_probe, "LIMIT_S", 0.1)
    engine = load(tiny_pair.draft, tiny_pair.target, width="adaptive", max_rows=2)
    assert isinstance(engine.width_policy, AdaptiveWidth)
    [first] = (tmp_path / "costs").iterdir()
    written = first.stat().st_mtime_ns
    load(tiny_pair.draft, tiny_pair.target, width="adaptive", max_rows=2)
    assert first.stat().st_mtime_ns == written
    with pytest.raises(RequestError, match="width is 5"):
        load(tiny_pair.draft, tiny_pair.target, width=5)
    with pytest.raises(RequestError, match="speculation is off"):
        load(None, tiny_pair.target, width="adaptive", speculation="off")


def test_width_auto_on_the_command_line(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_probe, "LIMIT_S", 0.1)
    words = ["generate", *tiny_pair.arguments, "--max-new-tokens", "24", "--json", "a block of proposals"]
    plain, auto = run_cli(*words, "--width", "4"), run_cli(*words, "--width", "auto")
    assert auto.code == plain.code == 0
    assert auto.json_lines[0]["token_ids"] == plain.json_lines[0]["token_ids"]
    assert "width auto: " in auto.err and "widths used " in auto.err
    assert "give a number from 2 to the trained width, or auto" in run_cli(*words, "--width", "wide").refusal
    assert "drop one of them" in run_cli("generate", "--no-draft", "--width", "auto", "hi").refusal
