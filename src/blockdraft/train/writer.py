"""Making a corpus: prompts are gathered or written by the target, the target answers them, its taps are kept.

Owns the order of work, the files of a corpus folder, their resumption and the division among processes. Every file is
written whole or not at all, so a call that was killed goes on where it stood:
    corpus.json                  what the corpus is made from; a call with other settings is refused
    self-written-00000.jsonl     user turns that the target made up, a group a file
    held_out.jsonl, prompts.jsonl, prompts.json    the split, and why prompts are not used
    shard-00000.safetensors      answers to a fixed group of lines of prompts.jsonl; finished when its seal is there
    manifest.json                written at the end: success + errors + skipped = given
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blockdraft.errors import CheckpointError, RequestError
from blockdraft.inspection import read_target_facts
from blockdraft.targets.contract import Target
from blockdraft.targets.writing import write
from blockdraft.text import Tokenizer, load_tokenizer
from blockdraft.train.answers import Answers, AnswerSettings, Outcome, generator_for
from blockdraft.train.corpus import DTYPES, MANIFEST_FILE, read_seal, seal_of, seal_shard, write_shard
from blockdraft.train.corpus_facts import FACTS_FILE, CorpusFacts
from blockdraft.train.files import file_sha256, write_text_atomically
from blockdraft.train.identity import identify, text_sha256
from blockdraft.train.prompts import Conversation, Tally, read_file, read_hub, select
from blockdraft.train.recipe import Recipe
from blockdraft.train.selfwritten import finished_turn, open_turn_ids

__all__ = ["Event", "Manifest", "Writer", "corpus_facts", "finished_manifest", "read_held_out", "read_manifest"]

PROMPTS_FILE = "prompts.jsonl"
TALLY_FILE = "prompts.json"
HELD_OUT_FILE = "held_out.jsonl"
GROUP_SIZE = 128
POLL_S = 0.2


class Event(NamedTuple):
    """How far a process is with its own part of a phase ("prompts" or "answers"); tokens are those of this call."""

    phase: str
    done: int
    total: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What became of the prompts: success + all errors + all skipped = given."""

    given: int
    success: int
    errors: dict[str, int]
    skipped: dict[str, int]
    examples: dict[str, str]
    sequences: int
    written_tokens: int
    cut_loops: int
    turns_left_out: int

    @property
    def num_skipped(self) -> int:
        """Prompts that were not answered, whatever the reason."""
        return sum(self.skipped.values())

    @property
    def num_errors(self) -> int:
        """Prompts that could not be asked."""
        return sum(self.errors.values())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished corpus, None where it is not finished."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    raw = _read_json(path)
    try:
        return Manifest(**{name: raw[name] for name in Manifest.__dataclass_fields__})
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} is not the manifest of a corpus; delete it and run again") from None


def finished_manifest(folder: Path) -> Manifest | None:
    """The manifest, None where it is not there or one of its shards is missing or was written since."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for name, sha256 in _read_json(folder / MANIFEST_FILE).get("shards", {}).items():
        path = folder / name
        if not path.is_file() or not seal_of(path).is_file() or read_seal(path)["sha256"] != sha256:
            return None
    return manifest


def read_held_out(folder: Path) -> list[list[int]]:
    """Ids of every prompt that was kept out of training, ready to be answered."""
    return [entry["ids"] for entry in _read_lines(folder / HELD_OUT_FILE)]


def corpus_facts(
    recipe: Recipe, target_folder: Path, folder: Path, *, tokenizer: Tokenizer, exclude: Sequence[str] = ()
) -> CorpusFacts:
    """What a corpus of this recipe and target is made from."""
    identity = identify(recipe.target.name, target_folder, tokenizer)
    facts = read_target_facts(target_folder)
    has_taps = recipe.text.features == "disk"
    raw = json.loads(json.dumps(recipe.to_dict()))
    apart = ("batch_size", "num_processes", "features", "features_dtype")
    return CorpusFacts(
        target=identity.name,
        weights_sha256=identity.weights_sha256,
        tokenizer_sha256=identity.tokenizer_sha256,
        chat_template_sha256=identity.chat_template_sha256,
        vocab_size=facts.vocab_size,
        target_hidden_size=facts.hidden_size,
        target_layer_ids=recipe.draft.target_layer_ids if has_taps else (),
        tap_stream=recipe.draft.tap_stream if has_taps else "none",
        last_layer_id=facts.num_layers - 1 if has_taps and recipe.loss.kind == "kl" else None,
        features_dtype=recipe.text.features_dtype,
        settings={
            "seed": recipe.seed,
            "max_length": recipe.max_length,
            "prompts": raw["prompts"],
            "text": {name: value for name, value in raw["text"].items() if name not in apart},
            "files_sha256": _files_sha256(recipe.prompts.files, folder),
            "exclude_sha256": text_sha256(json.dumps(sorted(exclude))),
            "group_size": GROUP_SIZE,
        },
    )


def _files_sha256(names: Sequence[str], folder: Path) -> dict[str, str]:
    """Hashes of the prompt files. A file that is gone keeps its recorded one once its prompts are in the folder."""
    known: dict[str, str] = {}
    if (folder / PROMPTS_FILE).is_file():
        known = dict(CorpusFacts.read(folder).settings.get("files_sha256", {}))
    found = {}
    for name in names:
        if Path(name).is_file():
            found[name] = file_sha256(Path(name))
        elif name in known:
            found[name] = known[name]
        else:
            raise RequestError(f"prompts.files: no such file {name}; name JSONL files relative to the working folder")
    return found


class Writer:
    """One process's part of a corpus: rank r of n takes every n-th group of prompts and every n-th shard.

    The first rank also gathers the prompts; the others wait for what they need in the folder.
    """

    def __init__(
        self,
        recipe: Recipe,
        target_folder: Path,
        folder: Path,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        exclude: Sequence[str] = (),
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.recipe, self.target_folder, self.folder = recipe, target_folder, folder
        self.rank, self.num_ranks, self.exclude = rank, num_ranks, exclude
        self.say = on_event or (lambda _event: None)
        self.tokenizer = load_tokenizer(target_folder)
        self.facts = corpus_facts(recipe, target_folder, folder, tokenizer=self.tokenizer, exclude=exclude)

    # ---- the whole of it ---------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Write what is missing of this process's part."""
        self.claim()
        if not (self.folder / PROMPTS_FILE).is_file():
            self._prepare_prompts()
        self._answer()

    def claim(self) -> None:
        """Make the folder this corpus's, or refuse it as another's."""
        if (self.folder / FACTS_FILE).is_file():
            CorpusFacts.read(self.folder).check_continues(self.facts, self.folder)
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made ({error}); name another folder") from None
        self.facts.write(self.folder)

    def finish(self) -> Manifest:
        """The manifest, once every shard is there; the first rank writes it."""
        manifest = finished_manifest(self.folder)
        if manifest is not None:
            return manifest
        names = self._shard_paths(sum(1 for _ in _read_lines(self.folder / PROMPTS_FILE)))
        _wait_for([part for path in names for part in (path, seal_of(path))])
        seals = {path.name: read_seal(path) for path in names}
        before = _read_json(self.folder / TALLY_FILE)
        skipped, errors = Tally(), Tally()
        skipped.merge(before["skipped"], before["examples"])
        for seal in seals.values():
            skipped.merge(seal["skipped"], {})
            errors.merge(seal["errors"], seal["examples"])
        sums = {
            name: sum(seal[name] for seal in seals.values())
            for name in ("success", "sequences", "written_tokens", "cut_loops", "turns_left_out")
        }
        manifest = Manifest(
            given=before["given"],
            errors=dict(errors.counts),
            skipped=dict(skipped.counts),
            examples={**skipped.examples, **errors.examples},
            **sums,
        )
        assert manifest.success + manifest.num_errors + manifest.num_skipped == manifest.given
        if not manifest.success:
            reasons = ", ".join(f"{count} {reason}" for reason, count in (errors.counts + skipped.counts).items())
            raise RequestError(f"{self.folder}: none of {manifest.given} prompts was answered ({reasons})")
        if self.rank == 0:
            shards = {name: seal["sha256"] for name, seal in seals.items()}
            _write_json(self.folder / MANIFEST_FILE, {**asdict(manifest), **asdict(self.facts), "shards": shards})
        return manifest

    # ---- the target --------------------------------------------------------------------------------------------------
    @cached_property
    def target(self) -> Target:
        """The target, loaded when there is something to write."""
        from blockdraft.targets import load_target  # seconds, which a process with nothing to write does not spend

        name = self.recipe.optim.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and torch.cuda.device_count():
            name = f"cuda:{self.rank % torch.cuda.device_count()}"
        dtype = getattr(torch, self.recipe.text.dtype)
        return load_target(
            self.target_folder,
            tap_layer_ids=self.facts.stored_layer_ids,
            dtype=dtype,
            device=name,
            tap_stream=self.recipe.draft.loaded_stream,
        )

    def _mine(self, paths: Sequence[Path], done: Callable[[Path], bool]) -> tuple[list[int], list[int]]:
        """Numbers of this process's files: those that are finished, and those to be written."""
        own = [number for number in range(len(paths)) if number % self.num_ranks == self.rank]
        finished = [number for number in own if done(paths[number])]
        return finished, [number for number in own if number not in set(finished)]

    # ---- prompts -----------------------------------------------------------------------------------------------------
    def _prepare_prompts(self) -> None:
        tally = Tally()
        given: list[Conversation] = []
        if self.rank == 0:  # before the target writes: what is wrong with a file should show at once
            for name in self.recipe.prompts.files:
                given += read_file(name)
            for source in self.recipe.prompts.hub:
                given += read_hub(source, tally)
            if not given and not self.recipe.prompts.self_written:
                raise RequestError("no prompts: give prompts.files or prompts.hub, or set prompts.self_written")
        groups = _groups(self.recipe.prompts.self_written)
        paths = [self.folder / f"self-written-{number:05d}.jsonl" for number in range(len(groups))]
        self._write_own(groups, paths)
        if self.rank:
            _wait_for([self.folder / PROMPTS_FILE])
            return
        _wait_for(paths)
        num_given = len(given) + sum(tally.counts.values()) + self.recipe.prompts.self_written
        for entry in (entry for path in paths for entry in _read_lines(path)):
            if entry["text"] is None:
                tally.add(f"self_written_{entry['reason']}")
            else:
                given.append(Conversation(({"role": "user", "content": entry["text"]},), "self_written"))
        self._keep_prompts(given, num_given, tally)

    def _keep_prompts(self, given: list[Conversation], num_given: int, tally: Tally) -> None:
        """Split the prompts and put them into the folder; prompts.jsonl comes last and says that all is there."""
        if not given:
            raise RequestError(f"none of {num_given} prompts is of use ({dict(tally.counts)}); give others")
        selection = select(
            given,
            num_held_out=self.recipe.prompts.held_out,
            every_turn=self.recipe.text.every_turn,
            exclude=self.exclude,
            ids_of=self._ids_of,
            tally=tally,
        )
        train = list(selection.train)
        random.Random(self.recipe.seed).shuffle(train)
        held_out = [{"ids": ids, "messages": one.messages, "source": one.source} for one, ids in selection.held_out]
        _write_lines(self.folder / HELD_OUT_FILE, held_out)
        counts = {"given": num_given, "skipped": dict(tally.counts), "examples": tally.examples}
        _write_json(self.folder / TALLY_FILE, counts)
        _write_lines(self.folder / PROMPTS_FILE, [{"messages": one.messages, "source": one.source} for one in train])

    def _ids_of(self, prompt: Conversation) -> list[int] | None:
        try:
            ids = self.tokenizer.chat_ids(prompt.messages, add_generation_prompt=True)
        except RequestError:
            return None
        return ids if len(ids) + self.recipe.text.max_new_tokens <= self.recipe.max_length else None

    def _write_own(self, groups: list[range], paths: list[Path]) -> None:
        """This process's groups of self-written user turns, each into its file when all of it is done."""
        finished, to_do = self._mine(paths, Path.is_file)
        done, total = (sum(len(groups[number]) for number in numbers) for numbers in (finished, [*finished, *to_do]))
        tokens = 0
        if total:
            self.say(Event("prompts", done, total, tokens))
        if not to_do:
            return
        prompts, stop_ids = self.recipe.prompts, frozenset(self.target.facts.eos_token_ids)
        opened = [open_turn_ids(self.tokenizer, opening) for opening in prompts.openings]
        turns: dict[int, dict[str, Any]] = {}
        for index, item in write(
            self.target,
            ((index, opened[index % len(opened)]) for number in to_do for index in groups[number]),
            max_new_tokens=prompts.max_tokens,
            stop_ids=stop_ids,
            temperature=prompts.temperature,
            top_p=prompts.top_p,
            generator_of=lambda index: generator_for(self.recipe.seed, "prompt", index),
            max_rows=self.recipe.text.batch_size,
        ):
            opening, answer = prompts.openings[index % len(opened)], item.ids[item.num_prompt :]
            turns[index] = asdict(finished_turn(self.tokenizer, opening, answer, stop_ids))
            done, tokens = done + 1, tokens + len(answer)
            self.say(Event("prompts", done, total, tokens))
            number = index // GROUP_SIZE
            if all(other in turns for other in groups[number]):
                _write_lines(paths[number], [turns.pop(other) for other in groups[number]])

    # ---- answers -----------------------------------------------------------------------------------------------------
    def _shard_paths(self, num_prompts: int) -> list[Path]:
        return [self.folder / f"shard-{number:05d}.safetensors" for number in range(len(_groups(num_prompts)))]

    def _answer(self) -> None:
        """This process's shards, each written when all of its prompts are answered."""
        prompts = [Conversation(tuple(e["messages"]), e["source"]) for e in _read_lines(self.folder / PROMPTS_FILE)]
        groups, paths = _groups(len(prompts)), self._shard_paths(len(prompts))
        finished, to_do = self._mine(paths, lambda path: path.is_file() and seal_of(path).is_file())
        done, total = (sum(len(groups[number]) for number in numbers) for numbers in (finished, [*finished, *to_do]))
        tokens = 0
        self.say(Event("answers", done, total, tokens))
        if not to_do:
            return
        outcomes: dict[int, Outcome] = {}
        answers = Answers(self.target, self.tokenizer, self._answer_settings())
        for outcome in answers.run((index, prompts[index]) for number in to_do for index in groups[number]):
            outcomes[outcome.index] = outcome
            done, tokens = done + 1, tokens + outcome.num_written
            self.say(Event("answers", done, total, tokens))
            group = groups[outcome.index // GROUP_SIZE]
            if all(index in outcomes for index in group):
                self._write_shard(paths[outcome.index // GROUP_SIZE], [outcomes.pop(index) for index in group])

    def _answer_settings(self) -> AnswerSettings:
        text = self.recipe.text
        return AnswerSettings(
            max_new_tokens=text.max_new_tokens,
            max_length=self.recipe.max_length,
            max_rows=text.batch_size,
            temperature=text.temperature,
            top_p=text.top_p,
            every_turn=text.every_turn,
            seed=self.recipe.seed,
            taps_dtype=DTYPES.get(self.facts.features_dtype, torch.bfloat16),
        )

    def _write_shard(self, path: Path, outcomes: Sequence[Outcome]) -> None:
        sequences = [sequence for outcome in outcomes for sequence in outcome.sequences]
        entries = write_shard(path, sequences, facts=self.facts)
        failed = [outcome for outcome in outcomes if outcome.reason]
        seal_shard(
            path,
            {
                **entries,
                "success": len(outcomes) - len(failed),
                "errors": dict(Counter(outcome.reason for outcome in failed if outcome.is_error)),
                "skipped": dict(Counter(outcome.reason for outcome in failed if not outcome.is_error)),
                "examples": {outcome.reason: outcome.detail for outcome in reversed(failed) if outcome.detail},
                "cut_loops": sum(outcome.num_cut_loops for outcome in outcomes),
                "turns_left_out": sum(outcome.num_turns_left_out for outcome in outcomes),
            },
        )


# ---- small files -----------------------------------------------------------------------------------------------------
def _groups(count: int) -> list[range]:
    return [range(start, min(start + GROUP_SIZE, count)) for start in range(0, count, GROUP_SIZE)]


def _wait_for(paths: Sequence[Path]) -> None:
    """Return when all files are there, which other processes write."""
    for path in paths:
        while not path.is_file():
            time.sleep(POLL_S)


def _write_json(path: Path, value: Any) -> None:
    write_text_atomically(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _write_lines(path: Path, entries: Sequence[Any]) -> None:
    write_text_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); put it back, or write the corpus anew") from None


def _read_lines(path: Path) -> Iterator[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); put it back, or write the corpus anew") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise CheckpointError(f"{path} line {number} is damaged ({error}); write the corpus anew") from None
