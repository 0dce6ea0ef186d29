"""How single tokens are shown in log-probabilities: a text and its bytes, also where a character spans several tokens.

Knows a tokenizer and engine events, no HTTP.
"""

from __future__ import annotations

from typing import Any

from blockdraft.accept import TokenLogprobs
from blockdraft.text import Tokenizer
from blockdraft.text.stream import token_bytes

__all__ = ["Speller"]


class Speller:
    """Tokens of one tokenizer, each spelled once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of a token by itself; bytes that are no whole character are written as \\xNN."""
        known = self._known.get(token_id)
        if known is None:
            raw = token_bytes(self._tokenizer, token_id)
            known = self._known[token_id] = (raw.decode("utf-8", "backslashreplace"), raw)
        return known

    def chat_entry(self, entry: TokenLogprobs, *, num_top: int) -> dict[str, Any]:
        """One entry of a chat choice's logprobs.content."""
        top = [self._one(token_id, logprob) for token_id, logprob in entry.top[:num_top]]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.spell(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    def top_map(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens of a completion's position, the emitted one always among them."""
        pairs = {self.spell(token_id)[0]: _finite(logprob) for token_id, logprob in reversed(entry.top)}
        return {self.spell(entry.token_id)[0]: _finite(entry.logprob), **dict(reversed(pairs.items()))}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot occur."""
    return max(logprob, -9999.0)
