"""What a text must look like: a JSON object, a JSON schema, a regular expression, one of some texts, or a Lark grammar.

Owns the value that a request carries, and what can be said of it without a tokenizer. Knows no models; the compiler
(``llguidance``) and the state of a text under a grammar are matcher.py's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from blockdraft.errors import RequestError, shown
from blockdraft.text.json_schema import SPELLING, check_schema
from blockdraft.text.prompts import check_unicode

if TYPE_CHECKING:
    from blockdraft.text.tokenizer import Tokenizer

__all__ = ["MAX_GRAMMAR_CHARS", "MAX_GRAMMAR_PARTS", "Grammar", "GrammarKind", "json_rule"]

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]
MAX_GRAMMAR_CHARS = 2**20
MAX_GRAMMAR_PARTS = 2**14  # colons: there is one at least at every level and in every rule that the compiler descends

_NAMES = {"json_schema": "the JSON schema", "regex": "the regex", "choice": "the choice", "lark": "the Lark grammar"}
_UNKEPT_ATTRIBUTE = re.compile(r"^\s*[?!]?\w+\s*\[[^\]\n]*\btemperature\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that may be written. Made by its class methods, which refuse what is wrong without a tokenizer.

    Equal grammars compare equal. ``source`` is the compiler's: JSON text, a regular expression, or Lark.
    """

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise RequestError(f"{self.name} is a {type(self.source).__name__}; give text")
        check_unicode(self.source, self.name)
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{self.name} has {len(self.source)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
        if self.kind in ("json_schema", "lark") and (parts := self.source.count(":")) > MAX_GRAMMAR_PARTS:
            raise RequestError(f"{self.name} has {parts} parts (colons); at most {MAX_GRAMMAR_PARTS} are taken")

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that fits a schema; a keyword that would not be kept to is refused. Properties come in its order.

        Narrower than the schema, so that a text ends and a name has one spelling: at most 64 blanks in a row between
        the parts, and characters are escaped only where they must be.
        """
        return cls("json_schema", _schema_text(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that match a whole pattern (Rust's syntax: no look-around, no backreferences; \\d is 0 to 9)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise RequestError(f"choice is {shown(texts)}; give a list of at least one text")
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(f"choice holds a {type(text).__name__}; give texts")
            check_unicode(text, "a text of the choice")
        return cls("choice", "|".join("".join(_literal(char) for char in text) for text in texts))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """llguidance's Lark: ``start:`` and its rules, special tokens as ``<|name|>`` or ``<[id]>``.

        JSON inside it has this module's spelling where it is written by `json_rule`. The end of the text is not part
        of it: the request's stop ids come where the grammar may end.
        """
        made = cls("lark", text)
        if _UNKEPT_ATTRIBUTE.search(text):
            raise RequestError("the Lark grammar sets a rule's temperature, which has no effect; use the request's")
        return made

    @property
    def name(self) -> str:
        """How messages call it."""
        return _NAMES[self.kind]

    def check(self, tokenizer: Tokenizer) -> None:
        """Nothing; a RequestError in one line if it cannot be compiled for this tokenizer, or no text can begin.

        Raises UnavailableError where the compiler is not installed.
        """
        from blockdraft.text.matcher import compile_grammar

        compile_grammar(self, tokenizer)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """A JSON schema as it stands in a rule of a Lark grammar, checked and spelled as by ``Grammar.json_schema``."""
    spelled = {**json.loads(_schema_text(schema)), "x-guidance": dict(SPELLING)}
    return f"%json {json.dumps(spelled, ensure_ascii=False)}"


def _schema_text(schema: object) -> str:
    """The schema as an object of JSON."""
    check_schema(schema)
    if schema is False:
        raise RequestError("the JSON schema is false, which nothing fits; remove it")
    try:
        return json.dumps({} if schema is True else schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply") from None


def _literal(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"
