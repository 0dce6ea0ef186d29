"""The text that tiny targets learn: paragraphs of a novel, their split, a tokenizer made for them, prompts.

Owns what is held out: no target is taught, and no drafter trained, on the paragraphs that measured prompts come from.
A drafter's prompts are beginnings that its target has not seen either, for that is what it will be asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Prompt
from blockdraft.errors import ConfigError

FILE = Path("haystack") / "sherlock_pg1661.paragraphs.jsonl"
SET = "sherlock"
HELD_OUT_EVERY = 20
NUM_PROMPT_WORDS = 12
END, MASK = "<|end|>", "<|mask|>"
END_ID, MASK_ID = 0, 1
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # a prompt is text to be continued
_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Prose:
    """Paragraphs, by their row in the file."""

    taught: dict[int, str]
    drafted: dict[int, str]
    held_out: dict[int, str]

    def prompts(self, count: int) -> list[Prompt]:
        """How the first `count` held-out paragraphs begin."""
        if count > len(self.held_out):
            raise ConfigError(f"{count} prompts asked for, {len(self.held_out)} paragraphs are held out; ask for fewer")
        return [Prompt(f"{SET}-{row}", opening(text)) for row, text in list(self.held_out.items())[:count]]


def read_prose(data: Path, num_taught: int, num_drafted: int) -> Prose:
    """The paragraphs below the folder of --data, as `split` parts them."""
    file = data / FILE
    if not file.is_file():
        raise ConfigError(f"--data {data}: {FILE} is not there; name the folder that holds it")
    texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines() if line.strip()]
    return split(texts, num_taught, num_drafted)


def split(texts: Sequence[str], num_taught: int, num_drafted: int) -> Prose:
    """Every HELD_OUT_EVERY-th paragraph is held out; of the others the first are taught, the next begin what a drafter
    is trained on."""
    rows = [row for row in range(len(texts)) if row % HELD_OUT_EVERY]
    if len(rows) < num_taught + num_drafted:
        raise ConfigError(f"{num_taught} + {num_drafted} paragraphs asked for, the text has {len(rows)}; ask for fewer")
    taught, drafted = rows[:num_taught], rows[num_taught : num_taught + num_drafted]
    parts = (taught, drafted, range(0, len(texts), HELD_OUT_EVERY))
    return Prose(*({row: texts[row] for row in part} for part in parts))


def opening(text: str) -> str:
    """The first words of a paragraph, without a space behind them."""
    return " ".join(text.split()[:NUM_PROMPT_WORDS])


def write_prompts(path: Path, texts: Sequence[str]) -> None:
    """A prompt file of the trainer: how these paragraphs begin."""
    lines = [json.dumps({"prompt": opening(text)}, ensure_ascii=False) for text in texts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE of exactly `vocab_size` tokens, END and MASK among them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the text gives {backend.get_vocab_size()} tokens, {vocab_size} were asked for; ask for fewer"
        )
    return backend


def write_tokenizer(backend: Any, folder: Path) -> None:
    """The tokenizer's files, beside the weights of a target."""
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def ids_of(backend: Any, texts: Sequence[str]) -> list[int]:
    """One long text: the paragraphs, one to a line. It never ends, so END stays what no target writes."""
    return list(backend.encode(_SEPARATOR.join(texts) + _SEPARATOR).ids)
