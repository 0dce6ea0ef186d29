"""A whole tiny pair on disk, and the command line run in this process.

The target is a random Llama with a real byte-level tokenizer and a chat template, the draft a random DFlash 2 that fits
it: small enough that a test may load both, real enough that nothing in the way from a folder to a text is left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blockdraft.config import DraftConfig, TargetFacts
from blockdraft.formats import zlab
from blockdraft.inspection import read_target_facts
from engine_kit import draft_config, random_draft

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
EOS_ID, MASK_ID = 2, 3
MAX_LENGTH = 256
BLOCK_SIZE = 5
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a block of proposals is scored in one step of the target, and the target has the last word",
    "system user assistant café naïve 日本語 🦊",
)


@dataclass(frozen=True)
class TinyPair:
    target: Path
    draft: Path

    @property
    def arguments(self) -> list[str]:
        """The words that name this pair on a command line."""
        return [str(self.draft), "--target", str(self.target)]

    @property
    def facts(self) -> TargetFacts:
        return read_target_facts(self.target)


def write_tiny_pair(folder: Path) -> TinyPair:
    """Both halves under `folder`, in float32."""
    pair = TinyPair(folder / "target", folder / "draft")
    write_target(pair.target)
    write_draft(pair.draft, draft_config(pair.facts, block_size=BLOCK_SIZE, mask_token_id=MASK_ID))
    return pair


def write_target(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    vocab_size = _write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
            model.lm_head.weight[: len(SPECIAL)] = 0.0  # texts of some length: no special token is ever likely
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "eos_token": SPECIAL[EOS_ID], "backend": "tokenizers"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return int(backend.get_vocab_size())


def write_draft(folder: Path, config: DraftConfig) -> Path:
    draft = random_draft(config, dtype=torch.float32)
    zlab.write(folder, zlab.Checkpoint(config, dict(draft.state_dict())), dtype="float32")
    return folder


def changed_copy(source: Path, goal: Path, **changes: Any) -> Path:
    """A copy of a checkpoint folder with other entries in its config.json; `nest_x` is dflash_config.x."""
    shutil.copytree(source, goal)
    raw = json.loads((goal / "config.json").read_text("utf-8"))
    for key, value in changes.items():
        place = raw["dflash_config"] if key.startswith("nest_") else raw
        place[key.removeprefix("nest_")] = value
    (goal / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return goal


# ------------------------------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def refusal(self) -> str:
        """The one line of a refused command, checked to be nothing else."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert self.out == ""
        assert self.err.count("\n") == 1 and self.err.startswith("blockdraft: "), self.err
        return self.err.removeprefix("blockdraft: ").rstrip("\n")


def run_cli(*arguments: str | Path, stdin: str | bytes = b"") -> Ran:
    """The whole command with these arguments, in this process; any exception but an exit comes through."""
    from blockdraft.cli import main

    given = stdin.encode() if isinstance(stdin, str) else stdin
    argv, old_stdin = sys.argv, sys.stdin
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["blockdraft", *map(str, arguments)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        assert isinstance(end.code, int)
        return Ran(end.code, out.getvalue(), err.getvalue())
    finally:
        sys.argv, sys.stdin = argv, old_stdin
    raise AssertionError("main() returned")


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
