"""A tokenizer of a few dozen tokens, and languages small enough to be written down: the reference of grammars.

The reference knows words and tokens only: an id may come where some word goes on with it, and the text may end where a
word is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blockdraft.text import Tokenizer

VOCAB = 32
END_ID = 31
NAMED_ID = 30
TOKENS = (
    *("a", "b", "c", "d", "e", "ab", "bc", "abc", "ba", "cc"),
    *("0", "1", "2", "10", "21"),
    *("{", "}", "[", "]", '"', ":", ",", '":', '{"', " ", "\n", "é"),
    *("true", "dd", "-"),
)
WORDS = ("ab", "abc", "abcab", "bacc", "ba", "ccd", "ccde", "c10", "c1021", "aabbcc", "dd0", "e")


def small_tokenizer(tokens: Sequence[str] = TOKENS, *, specials: Sequence[str] = ("<|named|>", "<|end|>")) -> Tokenizer:
    """A byte-level tokenizer; the special tokens have the highest ids."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    plain = [_spelled(token) for token in tokens]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(plain)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return Tokenizer(backend=backend)


def _spelled(token: str) -> str:
    """The token in the alphabet of byte-level vocabularies."""
    return token.replace(" ", "Ġ").replace("\n", "Ċ").replace("é", "Ã©")


def text_of(ids: Iterable[int], tokens: Sequence[str] = TOKENS) -> str:
    return "".join(tokens[i] for i in ids if i < len(tokens))


def allowed_ids(words: Iterable[str], prefix: str, tokens: Sequence[str] = TOKENS) -> set[int]:
    """Ids with which some word goes on after ``prefix``; END_ID where one is complete.

    Only words that can be spelled to their end count: every word here can, by single characters.
    """
    words = list(words)
    found = {i for i, token in enumerate(tokens) if any(word.startswith(prefix + token) for word in words)}
    return found | ({END_ID} if prefix in words else set())
