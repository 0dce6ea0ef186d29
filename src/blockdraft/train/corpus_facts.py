"""What a corpus was made from and with which settings: corpus.json, and every check against it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from blockdraft.config import TAP_STREAMS, DraftConfig, require_int
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.text import load_tokenizer
from blockdraft.train.checks import require_one_of
from blockdraft.train.files import write_text_atomically
from blockdraft.train.identity import identify
from blockdraft.train.recipe import differing_keys

__all__ = ["FACTS_FILE", "CorpusFacts"]

FACTS_FILE = "corpus.json"
_HASHES = {
    "weights_sha256": "weights",
    "tokenizer_sha256": "tokenizer",
    "chat_template_sha256": "chat template",
}


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """A mismatch with the recipe or the target at load is an error.

    target_layer_ids   the taps of the draft; empty where features are computed online
    tap_stream         which of the target's streams the taps are: "plain" where it has one; "none" without taps
    last_layer_id      the target's last layer where its output is kept for a teacher, else None
    features_dtype     of the taps on disk; "none" where they are computed online
    settings           what decides which text there is: prompts, lengths, sampling, seed
    """

    target: str
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    vocab_size: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    tap_stream: str
    last_layer_id: int | None
    features_dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("target", *_HASHES):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {getattr(self, name)!r}: it must be text")
        if not isinstance(self.target_layer_ids, list | tuple):
            raise ConfigError(f"target_layer_ids is {self.target_layer_ids!r}: it must be a list of layers")
        for tap in self.target_layer_ids:
            require_int("an entry of target_layer_ids", tap, least=0)
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        require_one_of("tap_stream", self.tap_stream, "none", "plain", *TAP_STREAMS)
        require_int("target_hidden_size", self.target_hidden_size)
        require_int("vocab_size", self.vocab_size)
        if self.last_layer_id is not None:
            require_int("last_layer_id", self.last_layer_id, least=0)
        require_one_of("features_dtype", self.features_dtype, "bfloat16", "float16", "none")
        if not isinstance(self.settings, Mapping):
            raise ConfigError(f"settings is {self.settings!r}: it must be an object")

    @property
    def has_taps(self) -> bool:
        """Whether taps are stored beside the text."""
        return self.features_dtype != "none"

    @property
    def stored_layer_ids(self) -> tuple[int, ...]:
        """Layers whose outputs a sequence carries: the taps, then the last layer unless it is one of them."""
        last = self.last_layer_id
        return self.target_layer_ids + (() if last is None or last in self.target_layer_ids else (last,))

    def write(self, folder: Path) -> None:
        """Write corpus.json into a corpus folder."""
        write_text_atomically(folder / FACTS_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> CorpusFacts:
        """The facts of a corpus folder. Raises CheckpointError where there are none or they make no sense."""
        path = folder / FACTS_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder}: not a corpus, it has no {FACTS_FILE}; write one first")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON ({error}); write the corpus anew") from None
        known = [entry.name for entry in fields(cls)]
        if not isinstance(raw, dict) or sorted(raw) != sorted(known):
            found = ", ".join(raw) if isinstance(raw, dict) else type(raw).__name__
            raise CheckpointError(f"{path} must hold {', '.join(known)}; found {found}")
        try:
            facts = cls(**raw)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None
        if facts.has_taps == (not facts.stored_layer_ids):
            layers = list(facts.stored_layer_ids)
            raise CheckpointError(
                f"{path}: features_dtype is {facts.features_dtype!r} while layers {layers} are stored"
            )
        if facts.has_taps == (facts.tap_stream == "none"):
            raise CheckpointError(
                f"{path}: tap_stream is {facts.tap_stream!r} while features_dtype is {facts.features_dtype!r}"
            )
        return facts

    def check_fits(self, config: DraftConfig) -> None:
        """Nothing; a ConfigError naming every number in which the corpus and the draft disagree."""
        pairs: list[tuple[str, object, object]] = [
            ("target_hidden_size", self.target_hidden_size, config.target_hidden_size),
            ("vocab_size", self.vocab_size, config.vocab_size),
        ]
        if self.has_taps:
            pairs.insert(0, ("target_layer_ids", list(self.target_layer_ids), list(config.target_layer_ids)))
            pairs.insert(1, ("tap_stream", self.tap_stream, config.tap_stream or "plain"))
        wrong = [f"{name} {mine} instead of {asked}" for name, mine, asked in pairs if mine != asked]
        if wrong:
            raise ConfigError(
                f"the corpus (written by {self.target}) has {', '.join(wrong)}; "
                "write a corpus for this recipe and target, or name the ones it was made for"
            )

    def check_target(self, name: str, folder: Path) -> None:
        """Nothing; a ConfigError if the target in `folder` is not the one that wrote this corpus, saying in what.

        A corpus that records no hashes (one made by hand) cannot be told apart here.
        """
        if not any(getattr(self, entry) for entry in _HASHES):
            return
        identity = identify(name, folder, load_tokenizer(folder))
        wrong = [words for entry, words in _HASHES.items() if getattr(self, entry) != getattr(identity, entry)]
        if wrong:
            raise ConfigError(
                f"the corpus was written by {self.target}; {identity.name} has another {', another '.join(wrong)}: "
                "name the target that wrote it, or write a corpus with this one"
            )

    def check_continues(self, asked: CorpusFacts, folder: Path) -> None:
        """Nothing; a ConfigError naming every fact and setting in which the corpus in `folder` is another."""
        mine, theirs = (json.loads(json.dumps(asdict(facts))) for facts in (self, asked))
        for entry in (mine, theirs):
            del entry["target"]  # the same target may be named by its folder and by its hub id
        differing = [key.removeprefix("settings.") for key in differing_keys(mine, theirs)]
        if differing:
            raise ConfigError(
                f"{folder} holds a corpus that was begun otherwise: {', '.join(differing)} differ; "
                "go on with the old ones, or name an empty folder"
            )
