"""Grammars and a tokenizer: what is refused, masks against languages that are written down, what can be taken back."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blockdraft.errors import RequestError, UnavailableError
from blockdraft.text import Grammar, Matcher, Tokenizer, compile_grammar, json_rule, load_tokenizer, why_no_grammars
from blockdraft.text import matcher as matcher_module
from grammar_kit import END_ID, NAMED_ID, TOKENS, WORDS, allowed_ids, small_tokenizer, text_of
from tiny_pair import TinyPair

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.grammar_cases import cases

TREE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}},
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="module")
def bytes_tokenizer(tiny_pair: TinyPair) -> Tokenizer:
    """300 tokens, every byte among them."""
    return load_tokenizer(tiny_pair.target)


def next_ids(matcher: Matcher) -> set[int]:
    """What the mask says, END_ID for the end of the text."""
    mask = matcher.mask()
    found = set(np.unpackbits(mask.bits.view(np.uint8), bitorder="little").nonzero()[0].tolist())
    return found | ({END_ID} if mask.may_end else set())


def takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text, spelled by the tokenizer's own encoder, is one of the grammar's."""
    matcher = compile_grammar(grammar, tokenizer).matcher()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in next_ids(matcher):
            return False
        matcher.consume(token_id)
    return matcher.mask().may_end


# ---- refused ---------------------------------------------------------------------------------------------------------
REFUSED_AT_ONCE: dict[str, tuple[Callable[[], object], str]] = {
    "keyword": (
        lambda: Grammar.json_schema({"type": "array", "items": {"uniqueItems": True}}),
        r"the schema at items: keyword 'uniqueItems' cannot be kept to",
    ),
    "near keyword": (lambda: Grammar.json_schema({"minimumm": 1}), r"did you mean 'minimum'\?"),
    "the compiler's own switch": (lambda: Grammar.json_schema({"x-guidance": {"lenient": True}}), "'x-guidance'"),
    "OpenAPI's nullable": (lambda: Grammar.json_schema({"properties": {"a": {"nullable": True}}}), "'nullable'"),
    "no schema": (lambda: Grammar.json_schema([1]), "the schema is a list"),  # type: ignore[arg-type]
    "no schema inside": (lambda: Grammar.json_schema({"anyOf": [1]}), r"the schema at anyOf\[0\] is a int"),
    "names": (lambda: Grammar.json_schema({"properties": {3: {}}}), "names are texts"),
    "not a map": (lambda: Grammar.json_schema({"properties": []}), "properties is a list"),
    "not a list": (lambda: Grammar.json_schema({"anyOf": {}}), "anyOf is a dict"),
    "NaN": (lambda: Grammar.json_schema({"const": float("nan")}), "is not JSON"),
    "depth": (lambda: Grammar.json_schema(nested(70)), "more than 64 levels deep"),
    "depth of a value": (lambda: Grammar.json_schema({"const": nested(5000)}), "nested too deeply|not JSON"),
    "1.3 MB": (lambda: Grammar.json_schema({"enum": [f"{i:064}" for i in range(20000)]}), "at most 1048576 are taken"),
    "parts": (lambda: Grammar.lark("start: a\n" + "a: b\n" * 20000), "20001 parts"),
    "temperature": (lambda: Grammar.lark('start: a\na[temperature=0.5]: "b"'), "has no effect"),
    "surrogate": (lambda: Grammar.regex("a\ud800"), "half of a surrogate pair"),
    "bytes": (lambda: Grammar.regex(b"a"), "is a bytes; give text"),  # type: ignore[arg-type]
    "no choice": (lambda: Grammar.choice([]), "at least one text"),
    "a text as choice": (lambda: Grammar.choice("abc"), "give a list"),
    "a number as choice": (lambda: Grammar.choice(["a", 3]), "holds a int"),  # type: ignore[list-item]
    "false": (lambda: Grammar.json_schema(False), "the JSON schema is false"),
    "false in a rule": (lambda: json_rule(False), "the JSON schema is false"),
}
REFUSED_BY_CHECK: dict[str, tuple[Grammar, str]] = {
    "combination": (
        Grammar.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}),
        "oneOf constraints are not supported$",
    ),
    "type": (Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
    "format": (Grammar.json_schema({"type": "string", "format": "wurst"}), "Unknown format: wurst"),
    "nowhere": (Grammar.json_schema({"$ref": "#/$defs/x"}), "does not exist"),
    "elsewhere": (Grammar.json_schema({"$ref": "http://example.com/x"}), "not present"),
    "nothing fits": (Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "Unsatisfiable"),
    "regex": (Grammar.regex("(a"), "unclosed group"),
    "look-ahead": (Grammar.regex("(?=a)b"), "look-around"),
    "backreference": (Grammar.regex(r"(a)\1"), "backreferences"),
    "many groups": (Grammar.regex("(" * 5000 + "a" + ")" * 5000), "invalid regex"),
    "unknown rule": (Grammar.lark("start: y"), 'unknown name: "y"'),
    "unknown special token": (Grammar.lark('start: "a" <|nope|>'), "unknown special token"),
    "rule of itself": (Grammar.lark("start: start"), "has no token for it"),
    "not in this vocabulary": (Grammar.regex("xyz"), "has no token for it"),
}


def nested(depth: int) -> dict:
    made: dict = {}
    for _ in range(depth):
        made = {"items": made}
    return made


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    message = str(error.value)
    assert "\n" not in message and len(message) < 420, message
    return message


@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_what_is_wrong_without_a_tokenizer_is_refused_at_once(name: str) -> None:
    make, wanted = REFUSED_AT_ONCE[name]
    with pytest.raises(RequestError) as error:
        make()
    assert re.search(wanted, one_line(error)), error.value


@pytest.mark.parametrize("name", REFUSED_BY_CHECK)
def test_what_the_compiler_says_is_refused_in_one_line(small: Tokenizer, name: str) -> None:
    grammar, wanted = REFUSED_BY_CHECK[name]
    with pytest.raises(RequestError) as error:
        grammar.check(small)
    assert re.search(wanted, one_line(error)), error.value


def test_tokenizers_that_tell_no_bytes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, small: Tokenizer) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    in_python = Tokenizer(backend=None, auto=object())
    with pytest.raises(RequestError, match="run by transformers in Python") as error:
        Grammar.regex("a").check(in_python)
    assert one_line(error) == why_no_grammars(in_python)
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    backend.decoder = decoders.Fuse()
    with pytest.raises(RequestError, match="no grammars with this target's tokenizer: can't determine") as error:
        Grammar.regex("a").check(Tokenizer(backend=backend))
    one_line(error)
    assert "none" in (why_no_grammars(None) or "") and why_no_grammars(small) is None
    monkeypatch.setattr(matcher_module, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install 'blockdraft\[serve\]'"):
        Grammar.regex("a").check(small)


def test_equal_grammars_are_equal_and_notes_are_no_keywords() -> None:
    assert Grammar.regex("a") == Grammar.regex("a") != Grammar.choice(["a"])
    assert len({Grammar.json_object(), Grammar.json_schema({"type": "object"}), Grammar.regex("a")}) == 3
    notes = {"title": "t", "description": "d", "default": 1, "examples": [1], "x-note": {"uniqueItems": 3}}
    Grammar.json_schema({**notes, "properties": {"uniqueItems": {"enum": [{"not": 1}]}, "if": {"const": {"not": 1}}}})


# ---- large and recursive ---------------------------------------------------------------------------------------------
def test_recursion_is_no_end(bytes_tokenizer: Tokenizer) -> None:
    grammar = Grammar.json_schema(TREE)
    assert takes(grammar, bytes_tokenizer, '{"next": {"next":' * 20 + '{"next": {}}' + "}}" * 20)
    assert not takes(grammar, bytes_tokenizer, '{"next": {"other": {}}}')
    balanced = Grammar.lark('start: "(" start ")" start | ""')
    assert takes(balanced, bytes_tokenizer, "(()(()))()") and not takes(balanced, bytes_tokenizer, "(()(())()")


@pytest.mark.parametrize("length", [1000, 3000])
def test_a_long_chain_of_references_does_not_end_the_process(bytes_tokenizer: Tokenizer, length: int) -> None:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}}
    assert takes(Grammar.json_schema(schema), bytes_tokenizer, "null")
    rules = "".join(f"x{i}: x{i + 1}\n" for i in range(length))
    assert takes(Grammar.lark(f'start: x0\n{rules}x{length}: "a"'), bytes_tokenizer, "a")


def test_a_schema_of_a_megabyte_is_compiled_or_refused(bytes_tokenizer: Tokenizer) -> None:
    values = [f"value {i} {i * 7919 % 100003}" for i in range(45_000)]
    grammar = Grammar.json_schema({"enum": values})
    assert 900_000 < len(grammar.source) < 2**20
    assert takes(grammar, bytes_tokenizer, json.dumps(values[-1]))
    assert not takes(grammar, bytes_tokenizer, '"value 1 1"')
    wide = {f"key {i}": {"type": "string", "description": "x" * 80} for i in range(8000)}
    with pytest.raises(RequestError, match=r"schema too large|parts"):
        Grammar.json_schema({"type": "object", "properties": wide}).check(bytes_tokenizer)


# ---- masks -----------------------------------------------------------------------------------------------------------
SAME_LANGUAGE = {
    "choice": Grammar.choice(WORDS),
    "regex": Grammar.regex("|".join(WORDS)),
    "lark": Grammar.lark("start: " + " | ".join(f'"{word}"' for word in WORDS)),
}


@pytest.mark.parametrize("kind", SAME_LANGUAGE)
def test_masks_are_those_of_the_language_at_every_prefix(small: Tokenizer, kind: str) -> None:
    compiled = compile_grammar(SAME_LANGUAGE[kind], small)
    num_seen = 0

    def walk(matcher: Matcher, prefix: list[int]) -> None:
        nonlocal num_seen
        num_seen += 1
        wanted = allowed_ids(WORDS, text_of(prefix))
        assert next_ids(matcher) == wanted, text_of(prefix)
        for token_id in sorted(wanted - {END_ID}):
            matcher.consume(token_id)
            walk(matcher, [*prefix, token_id])
            matcher.rollback(1)
            assert matcher.num_ids == len(prefix)
        assert next_ids(matcher) == wanted, "after taking back"

    walk(compiled.matcher(), [])
    assert num_seen > 60


def test_choices_are_taken_literally(bytes_tokenizer: Tokenizer) -> None:
    texts = ["a.c", "(x|y)*", "\\d", "[0-9]", "é🦊", "a b\n", "^$", ""]
    grammar = Grammar.choice(texts)
    assert all(takes(grammar, bytes_tokenizer, text) for text in texts)
    assert not any(takes(grammar, bytes_tokenizer, text) for text in ("abc", "x", "5", "a b", "^"))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_matcher_goes_on_after_a_dead_end(small: Tokenizer, steps: int) -> None:
    matcher = compile_grammar(Grammar.regex("a[bc]x|d"), small).matcher()
    for token in ("a", "b"):
        assert TOKENS.index(token) in next_ids(matcher)
        matcher.consume(TOKENS.index(token))
    with pytest.raises(RequestError, match="the regex cannot be gone on with after 2 ids of the text"):
        matcher.mask()
    matcher.rollback(steps)
    wanted = {1: ("b", "c"), 2: ("a", "d", "ab")}[steps]
    assert next_ids(matcher) == {TOKENS.index(token) for token in wanted}


def test_an_id_that_is_not_allowed_breaks_the_state_until_it_is_taken_back(small: Tokenizer) -> None:
    matcher = compile_grammar(Grammar.choice(["abc", "ab"]), small).matcher()
    matcher.consume(TOKENS.index("a"))
    with pytest.raises(RequestError, match="broke off after 2 ids"):
        matcher.consume(TOKENS.index("e"))
    matcher.rollback(1)
    assert next_ids(matcher) == {TOKENS.index("b"), TOKENS.index("bc")}


def test_special_tokens_come_only_where_lark_names_them(small: Tokenizer) -> None:
    matcher = compile_grammar(Grammar.lark('start: "a" <|named|> "b"'), small).matcher()
    for token_id in (TOKENS.index("a"), NAMED_ID, TOKENS.index("b")):
        assert next_ids(matcher) == {token_id}
        matcher.consume(token_id)
    assert matcher.mask().may_end and next_ids(matcher) == {END_ID}
    anything = compile_grammar(Grammar.regex("(?s:.*)"), small).matcher()
    assert next_ids(anything) - {END_ID} == set(range(len(TOKENS)))


def test_the_compiler_takes_every_token_for_the_bytes_that_it_decodes_to(bytes_tokenizer: Tokenizer) -> None:
    vocabulary = compile_grammar(Grammar.regex("a"), bytes_tokenizer).vocabulary
    assert vocabulary.num_ids == bytes_tokenizer.vocab_size
    for token_id in set(range(vocabulary.num_ids)) - bytes_tokenizer.special_ids:
        if bytes_tokenizer.token(token_id) == "ÿ":  # byte 255, which no text holds, marks special tokens there
            continue
        written = vocabulary.token_bytes([token_id]).decode("utf-8", "replace")
        assert written == bytes_tokenizer.decode([token_id]), token_id


# ---- what it writes fits ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [1, 2])
def test_random_ids_under_random_grammars_are_texts_of_them(bytes_tokenizer: Tokenizer, seed: int) -> None:
    """No model has a say, so that the odd corners of every grammar are visited; the judges know no compiler."""
    rng = random.Random(seed)
    lengths = []
    for case in cases(120, seed=seed):
        matcher, ids = compile_grammar(case.grammar, bytes_tokenizer).matcher(), list[int]()
        for _ in range(400):
            mask = matcher.mask()
            allowed = np.unpackbits(mask.bits.view(np.uint8), bitorder="little").nonzero()[0].tolist()
            if mask.may_end and (not allowed or rng.random() < 0.3):
                break
            ids.append(rng.choice(allowed))
            matcher.consume(ids[-1])
        else:
            pytest.fail(f"no end: {case.source}")
        text = bytes_tokenizer.decode(ids, skip_special_tokens=False)
        assert case.fits(text), (case.source, text)
        lengths.append(len(ids))
    assert max(lengths) > 20 and len(set(lengths)) > 10


def test_a_name_has_one_spelling(bytes_tokenizer: Tokenizer) -> None:
    """An escaped name that the schema knows would pass for another one, and its value for any value."""
    grammar = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "null"}, "b/c": {"type": "null"}}})
    assert takes(grammar, bytes_tokenizer, '{"a": null, "b/c": null, "d\\n\\"": 1}')
    for text in ('{"\\u0061": 1}', '{"b\\/c": 1}', '{"a": 1}'):
        assert not takes(grammar, bytes_tokenizer, text), text
    rule = Grammar.lark(f"start: {json_rule({'type': 'object', 'properties': {'a': {'type': 'null'}}})}")
    assert takes(rule, bytes_tokenizer, '{"a":null}') and not takes(rule, bytes_tokenizer, '{"\\u0061":1}')


def test_blanks_are_bounded(bytes_tokenizer: Tokenizer) -> None:
    grammar = Grammar.json_object()
    assert takes(grammar, bytes_tokenizer, '{\n  "a": [1,\t2]\n}')
    assert takes(grammar, bytes_tokenizer, "{" + " " * 64 + "}")
    assert not takes(grammar, bytes_tokenizer, "{" + " " * 65 + "}")


def test_the_judges_of_cases_can_say_no() -> None:
    some = list(itertools.islice(cases(40, seed=5), 40))
    assert not any(case.fits("\x00 neither") for case in some)
    assert any("ö" in case.source or "名" in case.source or "🦊" in case.source for case in some)
    assert [case.source for case in some] == [case.source for case in cases(40, seed=5)]
