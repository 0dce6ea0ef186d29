"""A grammar compiled for a tokenizer, and how far one text has come in it.

Owns the use of ``llguidance``, which is imported when it is needed. Masks are bits, 32 ids in each int32, lowest first.
Knows no torch, no rows and no end ids: whether the text may end is a flag of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from blockdraft.errors import RequestError, UnavailableError
from blockdraft.text.grammar import Grammar, json_rule
from blockdraft.text.json_schema import SPELLING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from blockdraft.text.tokenizer import Tokenizer

__all__ = ["CompiledGrammar", "Mask", "Matcher", "compile_grammar", "why_no_grammars"]

# The compiler knows ends of texts as a token only. This one is nobody's, so that the real end ids stay special tokens.
_END_TOKEN = "<|blockdraft: the text may end here|>"
# Without it the one spelling is demanded that the tokenizer prefers, wherever the characters to come are certain.
_OPTIONS_WORD, _ALL_SPELLINGS = "%llguidance", '{"no_forcing": true}'
_SHALLOW_PARTS = 100
_DEEP_STACK_BYTES = 512 * 2**20  # reserved while a grammar of many parts is compiled, used as deep as it is
_MAX_REASON = 240

_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
_lock = threading.Lock()


def why_no_grammars(tokenizer: Tokenizer | None) -> str | None:
    """Why no text can be held to a grammar here, as far as can be seen without compiling one; None if it can."""
    if tokenizer is None:
        return "a grammar needs a tokenizer, and the engine has none"
    if not tokenizer.can_spell:
        return (
            "this target's tokenizer is run by transformers in Python, which does not tell the bytes of its tokens; "
            "grammars need one with a tokenizer.json"
        )
    if find_spec("llguidance") is None:
        return "grammars need llguidance, which is not installed: pip install 'blockdraft[serve]'"
    return None


@dataclass(frozen=True, slots=True)
class Mask:
    """What may come next: ``bits`` int32 [ids / 32], bit i % 32 of entry i // 32 for id i; and may the text end?"""

    bits: NDArray[np.int32]
    may_end: bool


class CompiledGrammar:
    """A grammar made ready for one tokenizer; any number of texts begin from it. Safe to share between threads."""

    def __init__(self, grammar: Grammar, vocabulary: _Vocabulary, beginning: Any) -> None:
        self.grammar, self.vocabulary, self._beginning = grammar, vocabulary, beginning

    def matcher(self) -> Matcher:
        """The state of a text that has not begun."""
        return Matcher(self)

    def _fresh(self) -> Any:
        with _lock:
            return self._beginning.deep_copy()


class Matcher:
    """How far a text has come in a grammar. Every id can be taken back.

    Where the compiler's own state breaks (a limit, or ids after which nothing can come), RequestError says so, and
    after a rollback to before that it goes on.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._state = compiled._fresh()
        self._ids: list[int] = []

    @property
    def num_ids(self) -> int:
        """Ids that it was given and that were not taken back."""
        return len(self._ids)

    def mask(self) -> Mask:
        """The ids that may come next; RequestError if none can and the text cannot end here either."""
        import numpy as np

        content = self._state.compute_bitmask()
        if self._state.is_error():
            raise RequestError(self._reason())
        end_id = self._compiled.vocabulary.num_ids
        bits = np.frombuffer(content, dtype=np.uint32)[: end_id // 32 + 1].copy()
        end_bit = np.uint32(1 << end_id % 32)
        may_end = bool(bits[-1] & end_bit)
        bits[-1] &= ~end_bit
        return Mask(bits.view(np.int32), may_end)

    def consume(self, token_id: int) -> None:
        """Go on by one id, which the last mask allows."""
        self._ids.append(token_id)
        if not self._state.consume_token(token_id):
            raise RequestError(self._reason())

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` ids."""
        assert 0 <= count <= len(self._ids)
        if not count:
            return
        del self._ids[len(self._ids) - count :]
        if self._state.is_error() or not self._state.rollback(count):
            self._state = self._compiled._fresh()
            if self._ids and not self._state.consume_tokens(self._ids):
                raise RequestError(self._reason())

    def may_end_after(self, token_id: int) -> bool:
        """Whether this id, which the last mask allows, completes the text."""
        try:
            self.consume(token_id)
            return self.mask().may_end
        except RequestError:
            return False
        finally:
            self.rollback(1)

    def _reason(self) -> str:
        error = _one_line(self._state.get_error())
        where = f"after {len(self._ids)} ids of the text"
        if error.startswith("NoExtension"):
            return f"{self._compiled.grammar.name} cannot be gone on with {where}: this target has no token for it"
        return f"{self._compiled.grammar.name} broke off {where}: {error}"


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer) -> CompiledGrammar:
    """The grammar made ready for this tokenizer.

    RequestError in one line: what is wrong with the grammar, that no token can begin a text of it, or that the
    tokenizer is not one for grammars. UnavailableError: the compiler is not installed.
    """
    vocabulary = _vocabulary(tokenizer)
    is_deep = grammar.kind in ("json_schema", "lark") and grammar.source.count(":") > _SHALLOW_PARTS
    state = _on_deep_stack(grammar, vocabulary) if is_deep else vocabulary.compile(grammar)
    if state.is_error():
        raise RequestError(f"{grammar.name} cannot be used: {_one_line(state.get_error())}")
    if warnings := state.get_grammar_warnings():
        raise RequestError(f"{grammar.name} cannot be used as it is: {_one_line(' '.join(map(str, warnings)))}")
    compiled = CompiledGrammar(grammar, vocabulary, state)
    begun = compiled.matcher()
    mask = begun.mask()
    if not mask.may_end and not mask.bits.any():
        raise RequestError(f"{grammar.name} cannot be used: this target has no token to begin with")
    return compiled


class _Vocabulary:
    """A tokenizer as the compiler knows it; id ``num_ids`` is the end of texts, which no target has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from llguidance import LLTokenizer

        definition, self.num_ids = tokenizer.definition()
        raw = json.loads(definition)
        raw["truncation"] = raw["padding"] = None
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        raw["added_tokens"].append({"id": self.num_ids, "content": _END_TOKEN, "special": True, **flags})
        try:
            self._tokens = LLTokenizer(json.dumps(raw, ensure_ascii=False), eos_token=self.num_ids)
        except ValueError as error:
            raise RequestError(f"no grammars with this target's tokenizer: {_one_line(str(error))}") from None
        is_whole = self._tokens.vocab_size == self.num_ids + 1
        if not is_whole or self._tokens.decode_bytes([self.num_ids]) != _END_TOKEN.encode():
            raise RequestError("no grammars with this target's tokenizer: its ids have holes between them")

    def compile(self, grammar: Grammar) -> Any:
        """The compiler's state before the first id; it holds its own errors."""
        from llguidance import LLMatcher, regex_to_lark

        if grammar.kind == "lark":
            text = grammar.source
        elif grammar.kind == "json_schema":
            text = f"start: {json_rule(json.loads(grammar.source))}"
        else:
            text = f"start: /{regex_to_lark(grammar.source, 'd')}/"
        if _OPTIONS_WORD not in text:
            text = f"{text}\n{_OPTIONS_WORD} {_ALL_SPELLINGS}\n"
        state = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(text), log_level=0)
        if grammar.kind == "json_schema" and state.is_error():  # in its own words: those of a rule quote the schema
            own = LLMatcher.grammar_from_json_schema(grammar.source, overrides=dict(SPELLING))  # type: ignore[arg-type]
            own_state = LLMatcher(self._tokens, own, log_level=0)
            return own_state if own_state.is_error() else state
        return state

    def token_bytes(self, ids: Sequence[int]) -> bytes:
        """What the compiler takes these ids for."""
        return bytes(self._tokens.decode_bytes(list(ids)))


def _vocabulary(tokenizer: Tokenizer) -> _Vocabulary:
    """Made once for each tokenizer: it costs a second or two for a large one."""
    reason = why_no_grammars(tokenizer)
    if reason is not None:
        raise (RequestError if find_spec("llguidance") else UnavailableError)(reason)
    with _lock:
        known = _vocabularies.get(tokenizer)
        if known is None:
            known = _vocabularies[tokenizer] = _Vocabulary(tokenizer)
        return known


def _on_deep_stack(grammar: Grammar, vocabulary: _Vocabulary) -> Any:
    """The compiler descends rules and references on the stack, and a stack that is too short would end the process."""
    made: list[Any] = []
    with _lock:
        usual = threading.stack_size(_DEEP_STACK_BYTES)
        try:
            worker = threading.Thread(target=lambda: made.append(vocabulary.compile(grammar)), daemon=True)
            worker.start()
        except RuntimeError:
            raise RequestError(f"{grammar.name} is too large for the memory that is free; make it smaller") from None
        finally:
            threading.stack_size(usual)
    worker.join()
    if not made:
        raise RequestError(f"{grammar.name} cannot be used: the compiler broke off")
    return made[0]


def _one_line(text: str) -> str:
    """The compiler's words without its picture of the state and its advice about its own options."""
    words = " ".join(text.partition("<state>")[0].partition("<backtrace>")[0].partition(". Enable '")[0].split())
    return words if len(words) <= _MAX_REASON else words[: _MAX_REASON - 3] + "..."
