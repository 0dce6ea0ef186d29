"""A grammar under speculation: the law, the text and the end of a request are those of plain constrained decoding.

The reference knows no compiler of grammars: a small language is written down word by word, and a mask is what some word
goes on with. Engines that are broken in the usual ways are built here and seen to fail the same checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdraft.engine.decide as decide_module
from blockdraft.accept import SamplingParams, accept
from blockdraft.draft import FullLaw, Proposal
from blockdraft.engine import Completion, Engine, Request
from blockdraft.engine.constraint import MAX_KEPT, GrammarCache, RowConstraint
from blockdraft.engine.row import RunningRow
from blockdraft.engine.width import FixedWidth
from blockdraft.errors import RequestError
from blockdraft.text import Grammar, Matcher, Tokenizer, compile_grammar
from engine_kit import Continuation, draft_config, hf_target, random_draft, run_one, tiny_model
from exactness import Law, accept_law, largest_gap, plain_law, sequence_law_by_enumeration, step_law
from grammar_kit import END_ID, NAMED_ID, TOKENS, VOCAB, WORDS, allowed_ids, small_tokenizer, text_of

SENTENCES = sorted({"".join(words) for words in itertools.product(WORDS[:8], repeat=3)})
SENTENCE = Grammar.regex(f"(?:{'|'.join(WORDS[:8])}){{3}}")
PROMPT = (3, 7, 1, 12, 5)
ENDS = frozenset({END_ID})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(seed=4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


# ---- the law of a step -----------------------------------------------------------------------------------------------
FEW = ("a", "b", "ab", "c")
FEW_END = 4
FEW_WORDS = ("abc", "ab", "aab", "ca", "c", "cab")
TEMPERATURE = 1.3


def few_logits(prefix: Sequence[int]) -> Tensor:
    number = 1
    for token_id in prefix:
        number = number * 11 + token_id + 1
    return 1.5 * torch.randn(5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def few_law(prefix: tuple[int, ...]) -> list[float]:
    """Plain constrained sampling, written by hand; after the end nothing but the end."""
    law = [0.0] * 5
    if FEW_END in prefix:
        law[FEW_END] = 1.0
        return law
    allowed = allowed_ids(FEW_WORDS, text_of(prefix, FEW), FEW)
    ids = sorted({FEW_END if i == END_ID else i for i in allowed})
    weights = (few_logits(prefix)[ids] / TEMPERATURE).softmax(-1)
    for token_id, weight in zip(ids, weights.tolist(), strict=True):
        law[token_id] = weight
    return law


def p_of_step(make: Callable[..., RowConstraint], prefix: tuple[int, ...], proposals: Sequence[int]) -> Tensor:
    """The very p that the engine's decide gives to acceptance, in a row whose last step had proposals that fell."""
    few = small_tokenizer(FEW, specials=("<|end|>",))
    compiled = compile_grammar(Grammar.choice(FEW_WORDS), few)
    constraint = make(compiled.matcher(), stop_ids={FEW_END}, special_ids=few.special_ids, vocab_size=5)
    for at, token_id in enumerate(prefix):
        decoys = [i for i in allowed_ids(FEW_WORDS, text_of(prefix[:at], FEW), FEW) if i < 4]
        constraint.allowed(decoys[:1])
        constraint.advance([token_id])
    request = Request(prompt_ids=[0], max_new_tokens=9, sampling=SamplingParams(temperature=TEMPERATURE), seed=1)
    row = RunningRow(
        request=request,
        stop_ids=frozenset({FEW_END}),
        width=8,
        scanner=None,
        speculation_reason=None,
        constraint=constraint,
    )
    row.ids.extend(prefix)
    given: list[Tensor] = []

    def watched(ids: Any, q: Any, p_TV: Tensor, generator: Any) -> tuple[int, int]:
        given.append(p_TV)
        return accept(ids, q, p_TV, generator)

    logits_TV = torch.stack([few_logits((*prefix, *proposals[:i])) for i in range(len(proposals) + 1)])
    uniform = torch.full((len(proposals), 5), 0.2, dtype=torch.float64)
    original, decide_module.accept = decide_module.accept, watched
    try:
        decide_module.decide([row], [Proposal(torch.tensor(proposals), FullLaw(uniform))], [logits_TV])
    finally:
        decide_module.accept = original
    return given[0]


def law_gap(make: Callable[..., RowConstraint], num_proposals: int, length: int) -> float:
    """Largest error of the law of the first ids of a text, all proposals drawn from a flat draft."""
    from blockdraft.accept import Dense

    known: dict[tuple[int, ...], Law] = {}

    def law_of(prefix: tuple[int, ...]) -> Law:
        if FEW_END in prefix:
            return {(FEW_END,): 1.0}
        if prefix not in known:
            q = Dense(torch.full((num_proposals, 5), 0.2, dtype=torch.float64))
            drafts = [
                (ids, q, p_of_step(make, prefix, ids), 0.2**num_proposals)
                for ids in itertools.product(range(5), repeat=num_proposals)
            ]
            cut: Law = {}
            for emitted, mass in step_law(accept, drafts).items():
                end = emitted.index(FEW_END) + 1 if FEW_END in emitted else len(emitted)
                cut[emitted[:end]] = cut.get(emitted[:end], 0.0) + mass
            known[prefix] = cut
        return known[prefix]

    return largest_gap(sequence_law_by_enumeration(law_of, length), plain_law(few_law, length))


class AfterAll(RowConstraint):
    """Every row is masked by the state after all proposals."""

    def allowed(self, proposals):
        found = super().allowed(proposals)
        found.ids_TV[:] = found.ids_TV[-1]
        return found


class BonusIsFree(RowConstraint):
    def allowed(self, proposals):
        found = super().allowed(proposals)
        found.ids_TV[-1] = True
        return found


class NotTakenBack(RowConstraint):
    """Proposals that fell stay in the matcher."""

    def advance(self, ids):
        self._ahead = []
        for token_id in ids:
            try:
                self._matcher.consume(token_id)
            except RequestError as error:
                self._error = str(error)


class EndsAnywhere(RowConstraint):
    def _row(self):
        ids_V = super()._row()
        ids_V[self._end_ids] = True
        return ids_V


BROKEN = [AfterAll, BonusIsFree, NotTakenBack, EndsAnywhere]


@pytest.mark.parametrize("num_proposals", [0, 1, 2])
def test_the_law_of_a_text_is_that_of_plain_constrained_sampling(num_proposals: int) -> None:
    assert law_gap(RowConstraint, num_proposals, 4 if num_proposals < 2 else 2) < 1e-12


@pytest.mark.parametrize("broken", BROKEN)
def test_the_law_tells_broken_masks(broken: type[RowConstraint]) -> None:
    gap = law_gap(broken, 1, 2)
    print(f"{broken.__name__}: {gap:.3f}")
    assert gap > 0.01


def test_the_law_needs_no_uniform_number_where_one_id_is_left() -> None:
    p_TV = p_of_step(RowConstraint, (3, 0), [1])
    assert p_TV[0].nonzero()[:, 0].tolist() == [1, 4] and p_TV[1].nonzero()[:, 0].tolist() == [FEW_END]
    assert set(accept_law(accept, [], None, p_TV[1:])) == {(0, FEW_END)}


# ---- greedy text -----------------------------------------------------------------------------------------------------
def slow_ids(model: Any, prompt: Sequence[int], words: Sequence[str], count: int = 40) -> list[int]:
    """One token at a time from a full forward pass, masked by the language that is written down."""
    made: list[int] = []
    with torch.inference_mode():
        while len(made) < count and END_ID not in made:
            logits_V = model(torch.tensor([[*prompt, *made]])).logits[0, -1]
            allowed = sorted(allowed_ids(words, text_of(made)))
            made.append(allowed[int(logits_V[allowed].argmax())])
    return made


def engine_of(
    model: Any, tokenizer: Tokenizer, kind: str, texts: Sequence[Sequence[int]] = (), **options: Any
) -> Engine:
    target = hf_target(model)
    config = draft_config(target.facts)
    if kind == "plain":
        return Engine(target, tokenizer=tokenizer, **options)
    if kind == "random":
        return Engine(target, random_draft(config), tokenizer=tokenizer, **options)
    slots = {"perfect": (None,), "wrong": (3, None, 0, 1), "never": (0,)}[kind]
    draft = Continuation(config, texts, wrong=lambda step: slots[step % len(slots)])
    return Engine(target, draft, tokenizer=tokenizer, **options)


def prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * i + 3 * j + 1) % 29 for j in range(4)) for i in range(count)]


def greedy_texts_are_plain(model: Any, tokenizer: Tokenizer, kind: str, width: int, count: int = 4) -> bool:
    """Whether engine and reference have the same texts, each ended where the language ends."""
    for prompt in prompts(count):
        wanted = slow_ids(model, prompt, SENTENCES)
        engine = engine_of(model, tokenizer, kind, [[*prompt, *wanted]])
        try:
            done = run_one(engine, prompt_ids=prompt, max_new_tokens=40, grammar=SENTENCE, width=width)
        except RequestError:
            return False
        if list(done.token_ids) != wanted or done.text not in SENTENCES or done.finish_reason != "stop":
            return False
        done.stats.check()
    return True


@pytest.mark.parametrize("width", [2, 5, 8])
@pytest.mark.parametrize("kind", ["random", "perfect", "wrong", "never"])
def test_greedy_text_is_the_reference_s(model: Any, tokenizer: Tokenizer, kind: str, width: int) -> None:
    assert greedy_texts_are_plain(model, tokenizer, kind, width)


def test_proposals_stand_under_a_grammar(model: Any, tokenizer: Tokenizer) -> None:
    wanted = slow_ids(model, PROMPT, SENTENCES)
    engine = engine_of(model, tokenizer, "perfect", [[*PROMPT, *wanted]])
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE, width=8)
    assert done.stats.num_accepted_draft_tokens >= len(wanted) - 2 and done.stats.num_steps <= 2


@pytest.mark.parametrize("broken", BROKEN)
def test_the_same_check_tells_broken_engines(
    model: Any, tokenizer: Tokenizer, broken: type[RowConstraint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockdraft.engine.constraint.RowConstraint", broken)
    assert not greedy_texts_are_plain(model, tokenizer, "wrong", 5)


def test_the_fast_greedy_path_is_not_taken(model: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningRow, "takes_best", lambda self, num_rows: self._is_plain_greedy)
    assert not greedy_texts_are_plain(model, tokenizer, "random", 5)


def test_proposals_from_the_text_are_masked_too(model: Any, tokenizer: Tokenizer) -> None:
    class Offering(FixedWidth):
        def offers(self, rows, widths):
            return [
                [(row.anchor_id + 1) % 30 for _ in range(width - 1)] for row, width in zip(rows, widths, strict=True)
            ]

    engine = engine_of(model, tokenizer, "random", width_policy=Offering())
    for prompt in prompts(4):
        done = run_one(engine, prompt_ids=prompt, max_new_tokens=40, grammar=SENTENCE)
        assert list(done.token_ids) == slow_ids(model, prompt, SENTENCES)


# ---- company ---------------------------------------------------------------------------------------------------------
def mixed_requests() -> list[Request]:
    sampled = SamplingParams(temperature=1.2, top_p=0.9)
    made = []
    for i, prompt in enumerate(prompts(10)):
        grammar = (SENTENCE, None, Grammar.choice(WORDS), Grammar.lark("start: (/[ab]/ | /cc/)+"), None)[i % 5]
        made.append(
            Request(
                prompt_ids=prompt * (1 + i % 3),
                max_new_tokens=12,
                grammar=grammar,
                seed=i,
                sampling=sampled if i % 2 else SamplingParams(repetition_penalty=1.3 if i % 4 else 1.0),
                num_logprobs=3 if i % 3 == 0 else None,
                width=(2, 5, 8)[i % 3],
            )
        )
    return made


def facts(done: Completion) -> tuple[Any, ...]:
    values = [pytest.approx(event.logprobs.logprob) for event in done.events if event.logprobs is not None]
    return done.token_ids, done.text, done.finish_reason, done.stop, done.stats.accepted_histogram, values


def test_rows_with_and_without_grammars_do_not_meet(model: Any, tokenizer: Tokenizer) -> None:
    requests = mixed_requests()
    together = engine_of(model, tokenizer, "random", mixed_chunk_size=3, prefix_cache_bytes=2**22).run(requests)
    for request, done in zip(requests, together, strict=True):
        [alone] = engine_of(model, tokenizer, "random").run([request])
        assert facts(alone) == facts(done)
    assert {done.text for done in together[2::5]} <= set(WORDS)


def test_a_kept_prefix_does_not_keep_a_state_of_the_grammar(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "random", prefix_cache_bytes=2**22)
    prompt = PROMPT * 4
    first = run_one(engine, prompt_ids=prompt, max_new_tokens=40, grammar=SENTENCE)
    again = run_one(engine, prompt_ids=prompt, max_new_tokens=40, grammar=SENTENCE)
    assert first.token_ids == again.token_ids and again.stats.num_cached_prompt_tokens > 8
    longer = (*prompt, *first.token_ids[:3])
    done = run_one(engine, prompt_ids=longer, max_new_tokens=40, grammar=SENTENCE)
    assert list(done.token_ids) == slow_ids(model, longer, SENTENCES)


def test_sampled_rows_stay_in_the_language_and_seeds_repeat(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "random")
    hot = SamplingParams(temperature=2.0)
    requests = [
        Request(prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE, sampling=hot, seed=i) for i in range(12)
    ]
    done = engine.run(requests)
    assert {one.text for one in done} <= set(SENTENCES) and len({one.text for one in done}) > 6
    assert [one.token_ids for one in engine.run(requests)] == [one.token_ids for one in done]


# ---- with the other settings of a request --------------------------------------------------------------------------
def test_logprobs_are_those_of_the_raw_logits(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "random")
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE, num_logprobs=2)
    ids = list(PROMPT)
    for event in done.events:
        with torch.inference_mode():
            scores_V = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert event.logprobs is not None
        assert event.logprobs.logprob == pytest.approx(float(scores_V[event.token_id]), abs=1e-9)
        assert event.logprobs.top[0][0] == int(scores_V.argmax())
        ids.append(event.token_id)


@pytest.mark.parametrize("kind", ["plain", "random"])
def test_min_new_tokens_forbids_the_end_and_not_the_grammar(model: Any, tokenizer: Tokenizer, kind: str) -> None:
    engine = engine_of(model, tokenizer, kind)
    fields = {"prompt_ids": PROMPT, "max_new_tokens": 30, "grammar": Grammar.regex("[abc]{2,20}")}
    short = run_one(engine, sampling=SamplingParams(logit_bias={END_ID: 100.0}), **fields)
    assert short.finish_reason == "stop" and 2 <= len(short.text or "") <= 4
    done = run_one(engine, sampling=SamplingParams(logit_bias={END_ID: 100.0}), min_new_tokens=6, **fields)
    assert done.finish_reason == "stop" and len(done.token_ids) >= 7 and END_ID not in done.token_ids[:-1]


@pytest.mark.parametrize("kind", ["plain", "random", "never"])
def test_a_row_without_a_token_left_ends_alone(model: Any, tokenizer: Tokenizer, kind: str) -> None:
    """The text must end before min_new_tokens: an error of that row, with the text so far; the others go on."""
    engine = engine_of(model, tokenizer, kind, [[*PROMPT, 0, 1, 2, 3]] * 3)
    good = Request(prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE)
    bad = Request(prompt_ids=PROMPT, max_new_tokens=40, grammar=Grammar.regex("abc|ab"), min_new_tokens=20)
    tickets = [engine.submit(request) for request in (good, bad, good)]
    while not all(ticket.is_finished for ticket in tickets):
        engine.step()
    first, broken, last = (ticket.completion for ticket in tickets)
    assert first is not None and broken is not None and last is not None
    assert first.token_ids == last.token_ids and first.text in SENTENCES
    assert broken.finish_reason == "error" and broken.text in ("abc", "ab")
    assert broken.error == (
        f"the grammar must end after {len(broken.token_ids)} tokens of the text, and min_new_tokens is 20; lower it"
    )
    broken.stats.check()
    engine.check_integrity()


@pytest.mark.parametrize("kind", ["plain", "random"])
def test_a_dead_end_of_the_vocabulary_ends_its_row_alone(model: Any, tokenizer: Tokenizer, kind: str) -> None:
    engine = engine_of(model, tokenizer, kind)
    bad = Request(prompt_ids=PROMPT, max_new_tokens=40, grammar=Grammar.regex("(a|b|c)d[xyz]"))
    good = Request(prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE)
    tickets = [engine.submit(request) for request in (bad, good)]
    while not all(ticket.is_finished for ticket in tickets):
        engine.step()
    broken, fine = (ticket.completion for ticket in tickets)
    assert broken is not None and fine is not None and fine.text in SENTENCES
    assert broken.error == "the regex cannot be gone on with after 2 ids of the text: this target has no token for it"
    assert len(broken.token_ids) == 2 and (broken.text or "").endswith("d")


@pytest.mark.parametrize("method", ["mask", "consume", "rollback"])
def test_a_matcher_that_breaks_inside_a_step_ends_its_row_alone(
    model: Any, tokenizer: Tokenizer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, tokenizer, "random")
    tickets = [engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE)) for _ in range(2)]
    engine.step()
    first = tickets[0].row
    assert first is not None and first.constraint is not None and not tickets[0].is_finished
    real = getattr(Matcher, method)

    def breaking(self: Matcher, *arguments: int) -> Any:
        if self is first.constraint._matcher:
            raise RuntimeError("out of\nfuel")
        return real(self, *arguments)

    monkeypatch.setattr(Matcher, method, breaking)
    while not all(ticket.is_finished for ticket in tickets):
        engine.step()
    broken, fine = (ticket.completion for ticket in tickets)
    assert broken is not None and broken.finish_reason == "error" and broken.error == "out of fuel"
    assert fine is not None and list(fine.token_ids) == slow_ids(model, PROMPT, SENTENCES)
    engine.check_integrity()


def test_a_target_that_gives_no_chance_to_any_allowed_token(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "plain")

    def none_of_the_first(rows: Any, proposals: Any, logits: Any) -> Any:
        return decide_module.decide(
            rows, proposals, [x.masked_fill(torch.arange(VOCAB) < 10, -torch.inf) for x in logits]
        )

    engine.decide = none_of_the_first
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(RequestError, match="gives no chance to any token that the grammar allows after 0 tokens"):
            run_one(engine, prompt_ids=PROMPT, max_new_tokens=9, grammar=Grammar.choice(["ab"]), sampling=params)


@pytest.mark.parametrize("width", [2, 8])
def test_a_stop_string_ends_the_text_inside_a_json_string(model: Any, tokenizer: Tokenizer, width: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["bccbcc"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    fields = {"prompt_ids": PROMPT, "max_new_tokens": 200, "grammar": Grammar.json_schema(schema)}
    blanks = SamplingParams(logit_bias={TOKENS.index(" "): -100.0, TOKENS.index("\n"): -100.0})
    whole = run_one(engine_of(model, tokenizer, "plain"), sampling=blanks, **fields)
    assert whole.text == '{"a":"bccbcc"}'
    for stop, text in (("cc", '{"a":"b'), ('"}', '{"a":"bccbcc'), ("never", whole.text)):
        engine = engine_of(model, tokenizer, "perfect", [[*PROMPT, *whole.token_ids]])
        done = run_one(engine, sampling=blanks, stop_strings=(stop,), width=width, **fields)
        assert done.text == text and done.finish_reason == "stop"


def test_penalties_and_bias_choose_among_what_is_allowed(model: Any, tokenizer: Tokenizer) -> None:
    for params in (
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(frequency_penalty=1.5, presence_penalty=1.0),
        SamplingParams(logit_bias={END_ID: 100.0, NAMED_ID: 100.0, TOKENS.index("true"): 100.0}),
    ):
        fields = {"prompt_ids": PROMPT, "max_new_tokens": 40, "grammar": SENTENCE, "sampling": params}
        plain = run_one(engine_of(model, tokenizer, "plain"), **fields)
        assert plain.text in SENTENCES
        for kind in ("random", "wrong"):
            engine = engine_of(model, tokenizer, kind, [[*PROMPT, *plain.token_ids]])
            assert run_one(engine, **fields).token_ids == plain.token_ids


def test_a_length_limit_cuts_a_beginning(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "random")
    for count in range(1, 5):
        done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=count, grammar=SENTENCE)
        assert done.finish_reason == "length" and len(done.token_ids) == count
        assert any(sentence.startswith(done.text or "?") for sentence in SENTENCES)


# ---- end ids ---------------------------------------------------------------------------------------------------------
def test_other_stop_ids_end_the_text_where_it_may(model: Any, tokenizer: Tokenizer) -> None:
    """Even an id with a text of its own: it is no text then."""
    engine = engine_of(model, tokenizer, "random")
    stop = TOKENS.index("}")
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=60, grammar=SENTENCE, stop_ids=frozenset({stop}))
    assert done.stop == stop and done.text in SENTENCES
    braces = Grammar.regex("[ab]{1,3}}[ab]")
    with pytest.raises(RequestError, match="leaves no token of this target after"):
        run_one(engine, prompt_ids=PROMPT, max_new_tokens=60, grammar=braces, stop_ids=frozenset({stop}))


def test_a_special_token_that_the_grammar_names_last_may_end_the_text(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "random")
    named = Grammar.lark('start: "ab" <|end|>')
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=9, grammar=named)
    assert done.stop == END_ID and done.text == "ab"
    inside = Grammar.lark('start: "ab" <|named|> "c"')
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=9, grammar=inside)
    assert NAMED_ID in done.token_ids and done.text == "abc"
    with pytest.raises(RequestError, match="leaves no token of this target after"):
        ends = frozenset({NAMED_ID, END_ID})
        run_one(engine, prompt_ids=PROMPT, max_new_tokens=9, grammar=inside, stop_ids=ends)


def test_rows_of_the_target_without_a_token_are_never_chosen(tokenizer: Tokenizer) -> None:
    model = tiny_model(vocab=VOCAB + 9, seed=2)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] *= 20.0
    wanted = None
    for kind in ("plain", "random"):
        engine = engine_of(model, tokenizer, kind)
        done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE, stop_ids=ENDS)
        assert done.text in SENTENCES and (wanted is None or done.token_ids == wanted)
        wanted = done.token_ids


def test_a_target_with_fewer_rows_than_the_tokenizer_has_tokens() -> None:
    model = tiny_model(vocab=12)
    engine = engine_of(model, small_tokenizer(), "plain")
    ends = frozenset({11})
    done = run_one(engine, prompt_ids=[1, 2], max_new_tokens=40, grammar=Grammar.regex("(ab|10){3}"), stop_ids=ends)
    assert done.text == "ababab" and done.stop == 11, "1 and 0 alone are ids 11 and 10; 11 is the end here"


# ---- what an engine refuses ------------------------------------------------------------------------------------------
def test_what_cannot_be_served_is_refused_when_it_is_submitted(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "plain")
    fields = {"prompt_ids": PROMPT, "max_new_tokens": 9}
    for grammar, more, message in (
        (Grammar.regex("("), {}, "the regex cannot be used: .*unclosed group"),
        (Grammar.regex("xyz"), {}, "this target has no token for it"),
        (SENTENCE, {"stop_ids": frozenset[int]()}, "ends its text with an end id, and there is none; give stop_ids"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(Request(grammar=grammar, **fields, **more))
    with pytest.raises(RequestError, match="grammar is a str; give a Grammar"):
        Request(grammar="a", **fields)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="a grammar needs a tokenizer, and the engine has none"):
        Engine(hf_target(tiny_model())).submit(Request(grammar=SENTENCE, **fields))
    assert engine.num_waiting == 0


def test_grammars_are_kept_compiled_within_bounds(tokenizer: Tokenizer) -> None:
    cache = GrammarCache(tokenizer, vocab_size=VOCAB)
    first = cache.compiled(Grammar.regex("a"))
    assert cache.compiled(Grammar.regex("a")) is first
    for i in range(MAX_KEPT + 5):
        cache.compiled(Grammar.regex("a" * (2 + i)))
    assert len(cache) == MAX_KEPT and cache.compiled(Grammar.regex("a")) is not first
    for i in range(10):
        cache.compiled(Grammar.lark(f'start: "a"\n// {i}{"x" * 1_000_000}'))
    assert len(cache) == 8


def test_a_waiting_request_with_a_grammar_can_be_cancelled(model: Any, tokenizer: Tokenizer) -> None:
    engine = engine_of(model, tokenizer, "random", max_rows=1)
    tickets = [engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=40, grammar=SENTENCE)) for _ in range(3)]
    engine.step()
    engine.cancel(tickets[2])
    engine.cancel(tickets[0])
    while not tickets[1].is_finished:
        engine.step()
    assert tickets[1].completion is not None and tickets[1].completion.text in SENTENCES
    engine.check_integrity()
