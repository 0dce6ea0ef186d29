"""From committed ids to text that may be shown: streamed detokenising and stop strings.

Owns what is held back and for how long. Knows a tokenizer, no requests and no models.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.errors import RequestError
from blockdraft.text.prompts import check_unicode
from blockdraft.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


def _byte_alphabet() -> dict[str, int]:
    """The byte behind every character of a byte-level vocabulary: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of one token by itself, special ones included; part of a character where a vocabulary splits them."""
    spelled = tokenizer.token(token_id) if tokenizer.can_spell else None
    if spelled is None or token_id in tokenizer.special_ids:
        return tokenizer.decode([token_id], skip_special_tokens=False).encode()
    kinds = tokenizer.decoder_kinds
    if "ByteLevel" in kinds:
        known = [_BYTE_OF.get(char) for char in spelled]
        return spelled.encode() if None in known else bytes(byte for byte in known if byte is not None)
    if "ByteFallback" in kinds:
        return (
            bytes([int(spelled[3:5], 16)])
            if _BYTE_TOKEN.fullmatch(spelled)
            else spelled.replace("\u2581", " ").encode()
        )
    return tokenizer.decode([token_id], skip_special_tokens=False).encode()


class StreamDecoder:
    """Text of a growing sequence of ids, in pieces that are certain: no piece is ever taken back or changed.

    All pieces and the flush joined are ``tokenizer.decode(all ids)``, however the ids were split over calls.
    A byte-level vocabulary is decoded byte by byte. Any other is decoded in a short window: the ids not yet
    settled, after those of the last piece as context (decoders may treat a text's first token specially).
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, visible_special_tokens: Sequence[str] = ()
    ) -> None:
        """``visible_special_tokens``: texts that are written out where the vocabulary has them as special tokens."""
        shown = {tokenizer.special_id_of.get(text) for text in visible_special_tokens}
        self._tokenizer = tokenizer
        self._left_out = tokenizer.special_ids - shown if skip_special_tokens else frozenset()
        # Leaving some of the special tokens out is ours to do; leaving out all or none is the tokenizer's.
        self._must_leave_out = skip_special_tokens and self._left_out != tokenizer.special_ids
        self._skip_special = skip_special_tokens and not self._must_leave_out
        kinds = tokenizer.decoder_kinds
        self._is_byte_level = kinds == ("ByteLevel",)
        self._has_byte_tokens = "ByteFallback" in kinds
        self._may_split_characters = "ByteLevel" in kinds or not tokenizer.can_spell
        self._bytes_of_id: dict[int, bytes] = {}
        self._reset()

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """The text that became certain with these ids (often empty in the middle of a character)."""
        if self._is_byte_level:
            return self._utf8.decode(b"".join(map(self._token_bytes, ids)))
        return "".join(map(self._feed_one, ids))

    def flush(self) -> str:
        """What was held back, as the end of the text; the decoder is then as new."""
        if self._is_byte_level:
            text = self._utf8.decode(b"", True)
        else:
            text = self._decode(self._context + self._pending)[len(self._context_text) :]
        self._reset()
        return text

    def _decode(self, ids: list[int]) -> str:
        if self._must_leave_out:
            ids = [token_id for token_id in ids if token_id not in self._left_out]
        return self._tokenizer.decode(ids, self._skip_special)

    def _token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary; None for an id that decoding leaves out."""
        return None if token_id in self._left_out else self._tokenizer.token(token_id)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes_of_id.get(token_id)
        if known is None:
            token = self._token(token_id) or ""
            try:
                known = bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token, written as plain text
                known = token.encode()
            self._bytes_of_id[token_id] = known
        return known

    def _feed_one(self, token_id: int) -> str:
        if self._tokenizer.can_spell:
            token = self._token(token_id)
            if token is None:
                return ""
            # One invalid byte spoils its whole run of byte tokens, so a run says nothing before it has ended.
            if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
                self._pending.append(token_id)
                return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if self._may_split_characters and text.endswith(_REPLACEMENT):
            return ""
        piece = text[len(self._context_text) :]
        if piece:
            self._context, self._pending = self._pending, []
            self._context_text = self._decode(self._context)
        return piece


@dataclass(frozen=True, slots=True)
class Scan:
    """What one call of the scanner settled: text to show, how many of the ids it was given are kept, and the
    stop string that ended the text (None: none did, and all ids are kept)."""

    text: str
    num_kept: int
    stop: str | None


class StopScanner:
    """Streamed text that ends at a stop string, wherever that begins: in a token, a block or an earlier step.

    The result is the one of decoding one id at a time: the id that completes a stop string is the last one
    kept. Of several stop strings the one that ends first wins; of two that end together, the longer. Text
    that could still become a stop string is held back. A scanner serves one text and is done after a stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        visible_special_tokens: Sequence[str] = (),
    ) -> None:
        self._stop = check_stop(stop)
        self._include_stop = include_stop
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens, visible_special_tokens)
        self._held = ""
        self._is_stopped = False

    def feed(self, ids: Sequence[int], *, may_stop: bool = True) -> Scan:
        """What the ids of one step settle.

        ``may_stop`` False: no stop string ends the text inside these ids; one that begins in them and is
        completed by a later id still does.
        """
        assert not self._is_stopped, "the text has ended"
        if not self._stop:
            return Scan(self._decoder.feed(ids), len(ids), None)
        shown = []
        for index, token_id in enumerate(ids):
            text, stop = self._advance(self._decoder.feed((token_id,)), may_stop=may_stop)
            shown.append(text)
            if stop is not None:
                return Scan("".join(shown), index + 1, stop)
        return Scan("".join(shown), len(ids), None)

    def flush(self) -> Scan:
        """End of the ids: the text held back, in which a stop string may still be completed."""
        if self._is_stopped:
            return Scan("", 0, None)
        text, stop = self._advance(self._decoder.flush())
        held, self._held = self._held, ""
        return Scan(text + held, 0, stop)

    def _advance(self, piece: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        if not piece:
            return "", None
        text = self._held + piece
        matches = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches and may_stop:
            end, start, stop = min(matches)
            self._held = ""
            self._is_stopped = True
            return text[: end if self._include_stop else start], stop
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], None


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ends ``text``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings, each once, or RequestError."""
    given = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(given) > MAX_STOP_STRINGS:
        raise RequestError(f"{len(given)} stop strings given, at most {MAX_STOP_STRINGS} are allowed")
    for item in given:
        if not isinstance(item, str):
            raise RequestError(f"a stop string must be text, not {type(item).__name__}")
        if not item:
            raise RequestError("an empty stop string would end every text at once: remove it")
        if len(item) > MAX_STOP_CHARS:
            raise RequestError(f"a stop string of {len(item)} characters given, at most {MAX_STOP_CHARS} are allowed")
        check_unicode(item, "a stop string")
    return tuple(dict.fromkeys(given))
