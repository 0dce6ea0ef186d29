"""A corpus is the target's own text with the taps that serving reads, and its writing can be interrupted anywhere."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError, RequestError, UnavailableError
from blockdraft.targets import HFTarget
from blockdraft.text import Tokenizer, load_tokenizer
from blockdraft.train import prepare, writer
from blockdraft.train.answers import Answers, AnswerSettings, loop_end
from blockdraft.train.corpus import Corpus
from blockdraft.train.prepare import ProgressLines, prepare_corpus
from blockdraft.train.prompts import Conversation, conversation
from blockdraft.train.writer import Event, Writer, read_held_out
from engine_kit import bigram_model, plain_ids
from train_kit import make_recipe

EOS = 2
TAPS = (0, 2)
SETTINGS = {
    "max_new_tokens": 12, "max_length": 200, "max_rows": 3, "temperature": 0.0, "top_p": 1.0, "every_turn": True,
    "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def talker(tiny_pair, tmp_path_factory) -> Path:
    """The folder of a tiny target that ends its turns (the end's row is long, so every few tokens it comes first) and
    otherwise mostly writes capitals and digits, of which the tokenizer never makes longer tokens."""
    folder = tmp_path_factory.mktemp("talker") / "target"
    shutil.copytree(tiny_pair.target, folder)
    weights = load_file(folder / "model.safetensors")
    tokenizer, generator = load_tokenizer(folder), torch.Generator().manual_seed(9)
    plain = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][plain] = torch.randn(len(plain), 32, generator=generator) * 0.7
    weights["lm_head.weight"][EOS] = torch.randn(32, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(talker):
    return AutoModelForCausalLM.from_pretrained(talker, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def tokenizer(talker):
    return load_tokenizer(talker)


def talk(*texts: str) -> Conversation:
    """User, assistant, user, ... of these texts."""
    roles = itertools.cycle(("user", "assistant"))
    return conversation([{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], "test")


TALKS = [
    talk("the quick brown fox"),
    talk("jumps over", "given", "the lazy dog", "given", "a block of proposals"),
    talk("is scored", "given", "in one step"),
    talk("of the target"),
    talk("café", "naïve", "日本語"),
]


def answered(model, tokenizer, talks=TALKS, *, order=None, **changes):
    target = HFTarget(model, TAPS)
    try:
        answers = Answers(target, tokenizer, AnswerSettings(**{**SETTINGS, **changes}))
        numbers = range(len(talks)) if order is None else order
        return {outcome.index: outcome for outcome in answers.run((n, talks[n]) for n in numbers)}
    finally:
        target.close()


def slowly(model, tokenizer: Tokenizer, one: Conversation, *, every_turn: bool, count: int = 12):
    """(ids, written) of a conversation, by the slowest way: whole sequences anew, and the template for every turn."""
    messages, ids, written = [], [], []
    for segment in one.segments(every_turn=every_turn):
        messages += segment
        asked = tokenizer.chat_ids(messages, add_generation_prompt=True)
        assert asked[: len(ids)] == ids
        answer = plain_ids(model, asked, count, stop=frozenset({EOS}))
        if answer == [EOS]:
            break
        ids, written = asked + answer, written + [False] * (len(asked) - len(ids)) + [True] * len(answer)
        if answer[-1] != EOS:
            break
        messages.append({"role": "assistant", "content": tokenizer.decode(answer[:-1])})
    return ids, written


# ---- text ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("every_turn", [True, False])
def test_text_and_taps_are_those_of_one_row_at_a_time(model, tokenizer, every_turn: bool) -> None:
    outcomes = answered(model, tokenizer, every_turn=every_turn)
    num_turns = 0
    for index, one in enumerate(TALKS):
        expected = slowly(model, tokenizer, one, every_turn=every_turn)
        if outcomes[index].reason:
            assert (outcomes[index].reason, expected) == ("empty_answer", ([], []))
            continue
        [sequence] = outcomes[index].sequences
        assert (sequence.ids, sequence.written) == expected
        assert sequence.prompt == index
        num_turns += sum(now and not before for before, now in itertools.pairwise(sequence.written))
        target = HFTarget(model, TAPS)
        [scored] = target.forward([torch.tensor(sequence.ids[:-1])], [target.new_row()])
        target.close()
        assert torch.allclose(sequence.taps_SNE[:-1].double(), scored.taps_TNE, rtol=1e-2, atol=1e-2)
    assert num_turns == (8 if every_turn else 4)


def test_sampled_text_does_not_depend_on_its_company(model, tokenizer) -> None:
    sampled = {"temperature": 1.2, "top_p": 0.9}
    alone = answered(model, tokenizer, max_rows=1, **sampled)
    for changes in ({"max_rows": 4}, {"max_rows": 2, "order": [3, 1, 4, 0, 2]}):
        together = answered(model, tokenizer, **changes, **sampled)
        for index in alone:
            assert [s.ids for s in together[index].sequences] == [s.ids for s in alone[index].sequences]
    other = answered(model, tokenizer, max_rows=1, seed=1, **sampled)
    assert [s.ids for s in other[0].sequences] != [s.ids for s in alone[0].sequences]


def test_what_the_template_does_not_go_on_from_stays_a_sequence_of_its_own(model, tokenizer) -> None:
    """A template that drops earlier answers, as reasoning is dropped: each turn is trained as it was served."""
    template = tokenizer.chat_template.replace("{{ m['content'] }}", "{{ m['content'] if m['role'] == 'user' }}")
    forgetful = Tokenizer(backend=tokenizer._backend, chat_template=template, special_tokens=tokenizer.special_tokens)
    outcome = answered(model, forgetful)[1]
    given, messages = TALKS[1].segments(every_turn=True), []
    for segment, sequence in zip(given, outcome.sequences, strict=False):
        messages += segment
        asked = forgetful.chat_ids(messages, add_generation_prompt=True)
        assert sequence.ids == asked + plain_ids(model, asked, 12, stop=frozenset({EOS}))
        assert sequence.written == [False] * len(asked) + [True] * (len(sequence.ids) - len(asked))
        messages.append({"role": "assistant", "content": ""})
    assert len(outcome.sequences) > 1


def test_a_prompt_that_cannot_be_answered_says_why(model, tokenizer) -> None:
    talks = [talk("x" * 300), talk("refuse me"), talk("the quick brown fox"), talk("and", "given", "y" * 300)]
    template = "{% if 'refuse' in messages[0]['content'] %}{{ raise_exception('not this') }}{% endif %}"
    strict = Tokenizer(backend=tokenizer._backend, chat_template=template + tokenizer.chat_template)
    outcomes = answered(model, strict, talks)
    assert [(o.reason, o.is_error, len(o.sequences)) for _, o in sorted(outcomes.items())] == [
        ("too_long", False, 0),
        ("refused_by_template", True, 0),
        ("", False, 1),
        ("", False, 1),
    ]
    assert "not this" in outcomes[1].detail
    assert outcomes[3].num_turns_left_out == 1


def test_an_empty_answer_is_skipped(tokenizer) -> None:
    silent = bigram_model(lambda token: EOS, vocab=tokenizer.vocab_size)
    silent.model.norm.weight.data.zero_()  # all logits are 0, and the first id is taken
    silent.config.eos_token_id = silent.generation_config.eos_token_id = 0
    assert {o.reason for o in answered(silent, tokenizer).values()} == {"empty_answer"}


# ---- loops -----------------------------------------------------------------------------------------------------------
def test_a_loop_is_cut_after_its_second_period(tokenizer) -> None:
    looping = bigram_model(lambda token: 10 + (token + 1) % 3, vocab=tokenizer.vocab_size)  # soon in some short cycle
    looping.config.eos_token_id = looping.generation_config.eos_token_id = EOS
    [outcome] = answered(looping, tokenizer, TALKS[:1], max_new_tokens=100).values()
    [sequence] = outcome.sequences
    answer = [token for token, is_written in zip(sequence.ids, sequence.written, strict=True) if is_written]
    assert outcome.num_cut_loops == 1
    period = len(answer) // 2
    assert answer[-period:] == answer[-2 * period : -period] and 1 <= period <= 3 and len(answer) <= 3 * period
    assert len(sequence.taps_SNE) == len(sequence.ids)
    [short] = answered(looping, tokenizer, TALKS[:1], max_new_tokens=60).values()
    assert short.num_cut_loops == 0 and sum(short.sequences[0].written) == 60


def test_the_end_of_a_loop_is_the_one_that_brute_force_finds() -> None:
    def brute(answer: list[int]) -> int | None:
        for period in range(1, 33):
            for start in range(len(answer) - 63):
                tail = answer[start:]
                if len(tail) >= 3 * period and all(tail[i] == tail[i + period] for i in range(len(tail) - period)):
                    return start + 2 * period
        return None

    generator = torch.Generator().manual_seed(0)
    seen = set()
    for case in range(120):
        period = case % 40 + 1
        lead = torch.randint(0, 50, (case % 7 * 5,), generator=generator).tolist()
        unit = torch.randint(0, 50, (period,), generator=generator).tolist()
        looped = (unit * 100)[: 50 + case]
        answer = lead + looped + ([7] if case % 11 == 0 else [])
        assert loop_end(answer) == brute(answer)
        seen.add(loop_end(answer) is None)
    assert seen == {True, False}
    assert loop_end([]) is None and loop_end([1]) is None and loop_end([1] * 64) == 2


WORDS = ("quick", "brown", "lazy", "small", "red", "old", "new", "sad", "wet")


# ---- a folder --------------------------------------------------------------------------------------------------------
@pytest.fixture
def groups_of_three(monkeypatch) -> None:
    monkeypatch.setattr(writer, "GROUP_SIZE", 3)


def recipe_for(tmp_path: Path, *, texts=None, self_written=0, held_out=2, text=None, prompts=None, **changes):
    """A recipe of eleven prompts in a file (one of them twice, one too long) and self-written ones."""
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "prompts.jsonl"
    given = [f"tell me about the {word} fox" for word in WORDS]
    given = [*given, given[0], "x" * 200] if texts is None else texts
    if not path.exists():
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in given), encoding="utf-8")
    own = {"self_written": self_written, "openings": ("", "tell"), "temperature": 1.0, "top_p": 0.9, "max_tokens": 24}
    return make_recipe(
        prompts={"files": (str(path),), "held_out": held_out, **(own if self_written else {}), **(prompts or {})},
        text={"max_new_tokens": 16, "batch_size": 4, **(text or {})},
        draft={"target_layer_ids": TAPS},
        max_length=120,
        **changes,
    )


def content(folder: Path) -> dict[int, tuple[list[int], list[bool], torch.Tensor]]:
    """Every sequence by its prompt."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        shard, start = load_file(path), 0
        for prompt, length in zip(shard["prompt"].tolist(), shard["len"].tolist(), strict=True):
            span = slice(start, start + length)
            found[prompt] = shard["ids"][span].tolist(), shard["written"][span].tolist(), shard["taps"][span].float()
            start += length
    return found


def same_text(one: Path, other: Path) -> bool:
    mine, theirs = content(one), content(other)
    return mine.keys() == theirs.keys() and all(
        mine[key][:2] == theirs[key][:2] and torch.allclose(mine[key][2], theirs[key][2], rtol=2e-2, atol=2e-2)
        for key in mine
    )


def test_every_prompt_is_accounted_for(talker, tokenizer, tmp_path, groups_of_three) -> None:
    recipe = recipe_for(tmp_path, self_written=8)
    excluded = "tell me about the RED fox"
    manifest = prepare_corpus(recipe, talker, tmp_path / "c", exclude=[excluded])
    assert manifest.given == 19
    assert manifest.success + manifest.num_errors + manifest.num_skipped == 19
    own = sum(count for reason, count in manifest.skipped.items() if reason.startswith("self_written"))
    expected = {"duplicate": 1, "excluded": 1, "held_out": 2, "too_long": 1}
    assert expected.items() <= manifest.skipped.items()
    assert manifest.success == 19 - own - 5 - manifest.skipped.get("empty_answer", 0) >= 6
    corpus = Corpus(tmp_path / "c", max_length=120)
    assert corpus.num_answer_tokens <= manifest.written_tokens
    prompts = [json.loads(line)["messages"] for line in (tmp_path / "c" / "prompts.jsonl").read_text().splitlines()]
    held_out = read_held_out(tmp_path / "c")
    asked = [tokenizer.chat_ids(messages, add_generation_prompt=True) for messages in prompts]
    assert len(held_out) == 2 and not any(ids in asked for ids in held_out)
    assert not any(excluded.lower() in messages[0]["content"] for messages in prompts)
    for number, (ids, written, _) in content(tmp_path / "c").items():
        assert ids[: written.index(True)] == asked[number]
    again = prepare_corpus(recipe, talker, tmp_path / "c", exclude=[excluded])
    assert again == manifest


def test_self_written_prompts_begin_with_their_openings(talker, tmp_path, groups_of_three) -> None:
    recipe = recipe_for(tmp_path, self_written=24)
    Writer(recipe, talker, tmp_path / "c").run()
    paths = sorted((tmp_path / "c").glob("self-written-*.jsonl"))
    turns = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    assert len(turns) == 24 and len(paths) == 8
    assert any(turn["text"] for turn in turns[1::2])
    assert all(turn["text"] is None or turn["text"].startswith("tell") for turn in turns[1::2])
    assert len({turn["text"] for turn in turns}) > 3


class Killed(Exception):
    pass


def test_writing_goes_on_from_any_moment(talker, tmp_path, groups_of_three) -> None:
    recipe = recipe_for(tmp_path, self_written=7, text={"temperature": 0.9})
    whole = prepare_corpus(recipe, talker, tmp_path / "whole")
    events: list[Event] = []
    Writer(recipe, talker, tmp_path / "counted", on_event=events.append).run()
    for fatal in range(1, len(events) + 1, 3):
        folder, seen = tmp_path / f"torn-{fatal}", []

        def stop(event: Event, seen=seen, fatal=fatal) -> None:
            seen.append(event)
            if len(seen) == fatal:
                raise Killed

        with pytest.raises(Killed):
            Writer(recipe, talker, folder, on_event=stop).run()
        (folder / "shard-00001.safetensors").with_suffix(".123.tmp").write_bytes(b"half")
        finished = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.json")}
        assert prepare_corpus(recipe, talker, folder) == dataclasses.replace(whole)
        assert all(path.stat().st_mtime_ns == when for path, when in finished.items())
        assert same_text(folder, tmp_path / "whole")
        assert not list(folder.glob("*.tmp")) or (folder / "shard-00001.json") in finished


def test_a_shard_that_was_deleted_is_missed_and_written_again(talker, tmp_path, groups_of_three) -> None:
    recipe, folder = recipe_for(tmp_path), tmp_path / "c"
    whole = prepare_corpus(recipe, talker, folder)
    before = content(folder)
    damaged = folder / "shard-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="delete it and its seal, and let the corpus be written on"):
        Corpus(folder, max_length=120)
    damaged.unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors: the manifest names this shard"):
        Corpus(folder, max_length=120)
    damaged.with_suffix(".json").unlink()
    assert prepare_corpus(recipe, talker, folder) == whole
    assert content(folder).keys() == before.keys()
    assert len(Corpus(folder, max_length=120)) == len(before)
    assert json.loads((folder / "manifest.json").read_text())["shards"]["shard-00001.safetensors"]


def test_ranks_share_the_shards(talker, tmp_path, groups_of_three) -> None:
    recipe = recipe_for(tmp_path)
    whole = prepare_corpus(recipe, talker, tmp_path / "whole")
    folder = tmp_path / "shared"
    for rank in range(3):
        Writer(recipe, talker, folder, rank=rank, num_ranks=3).run()
        seals = {path.name for path in folder.glob("shard-*.json")}
        assert seals == {f"shard-{n:05d}.json" for n in range(3) if n <= rank}
    assert Writer(recipe, talker, folder, rank=2, num_ranks=3).finish() == whole
    assert not (folder / "manifest.json").exists(), "the first rank writes it"
    assert Writer(recipe, talker, folder).finish() == whole
    assert same_text(folder, tmp_path / "whole")


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_a_corpus_of_other_settings_or_another_target_is_refused(talker, tiny_pair, tmp_path) -> None:
    recipe = recipe_for(tmp_path)
    prepare_corpus(recipe, talker, tmp_path / "c")
    others = {
        "text.temperature": recipe_for(tmp_path, text={"temperature": 0.5}),
        "max_length": dataclasses.replace(recipe, max_length=121),
        "prompts.held_out": recipe_for(tmp_path, held_out=1),
        "target_layer_ids": dataclasses.replace(
            recipe, draft=dataclasses.replace(recipe.draft, target_layer_ids=(0, 1))
        ),
        "features_dtype": recipe_for(tmp_path, text={"features_dtype": "float16"}),
    }
    for name, other in others.items():
        with pytest.raises(ConfigError, match=f"begun otherwise: {name} differ; go on with the old ones") as caught:
            prepare_corpus(other, talker, tmp_path / "c")
        assert "\n" not in str(caught.value)
    prepare_corpus(recipe_for(tmp_path, text={"batch_size": 1, "num_processes": 2}), talker, tmp_path / "c")
    with pytest.raises(ConfigError, match="begun otherwise: weights_sha256 differ"):
        prepare_corpus(recipe, tiny_pair.target, tmp_path / "c")
    with pytest.raises(ConfigError, match="exclude_sha256 differ"):
        prepare_corpus(recipe, talker, tmp_path / "c", exclude=["a"])
    (tmp_path / "prompts.jsonl").unlink()
    prepare_corpus(recipe, talker, tmp_path / "c")  # its prompts are in the folder
    with pytest.raises(RequestError, match=r"prompts\.files: no such file"):
        prepare_corpus(recipe, talker, tmp_path / "new")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "other"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"files_sha256\..*prompts.jsonl differ"):
        prepare_corpus(recipe, talker, tmp_path / "c")


def test_a_target_with_another_template_or_tokenizer_is_not_the_writer(talker, tiny_pair, tmp_path) -> None:
    prepare_corpus(recipe_for(tmp_path), talker, tmp_path / "c")
    facts = Corpus(tmp_path / "c", max_length=120).facts
    facts.check_target("here", talker)
    with pytest.raises(ConfigError, match="written by tiny; here has another weights: name the target"):
        facts.check_target("here", tiny_pair.target)
    other = tmp_path / "other"
    shutil.copytree(talker, other)
    for name, old, new in (("chat_template.jinja", "role", "role "), ("tokenizer.json", "<|mask|>", "<|hole|>")):
        text = (other / name).read_text("utf-8")
        (other / name).write_text(text.replace(old, new), "utf-8")
    with pytest.raises(ConfigError, match="here has another tokenizer, another chat template"):
        facts.check_target("here", other)


def test_prompts_that_cannot_be_used_are_one_line(talker, tmp_path) -> None:
    for name, recipe, words in (
        (
            "long",
            recipe_for(tmp_path / "1", texts=["x" * 200, "y" * 200], held_out=0),
            "none of 2 prompts was answered",
        ),
        ("none", make_recipe(text={"max_new_tokens": 8}), "no prompts: give prompts.files or prompts.hub"),
        ("held", recipe_for(tmp_path / "2", texts=["one prompt"], held_out=1), "held_out is 1, and of 1 different"),
    ):
        with pytest.raises(BlockdraftError, match=words) as caught:
            prepare_corpus(recipe, talker, tmp_path / name)
        assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made"):
        prepare_corpus(make_recipe(), talker, tmp_path / "file" / "c")


def test_a_full_disk_leaves_the_finished_shards(talker, tmp_path, groups_of_three, monkeypatch) -> None:
    from blockdraft.train import corpus

    recipe = recipe_for(tmp_path)
    save, calls = corpus.save_file, []

    def full(tensors, path) -> None:
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"some of it")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(corpus, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*finished shards are kept"):
        prepare_corpus(recipe, talker, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("shard-*.json"))) == 1
    assert not list((tmp_path / "c").glob("*.tmp"))
    manifest = prepare_corpus(recipe, talker, tmp_path / "c")
    assert manifest.success + manifest.skipped.get("empty_answer", 0) == 7


# ---- several processes -----------------------------------------------------------------------------------------------
def test_two_processes_write_what_one_writes(talker, tmp_path) -> None:
    own = {"self_written": 140, "prompts": {"max_tokens": 4}, "text": {"max_new_tokens": 3, "batch_size": 64}}
    recipe = recipe_for(tmp_path, **own)
    one = prepare_corpus(recipe, talker, tmp_path / "one")
    lines: list[str] = []
    two = dataclasses.replace(recipe, text=dataclasses.replace(recipe.text, num_processes=2))
    assert prepare_corpus(two, talker, tmp_path / "two", lines.append) == one
    assert same_text(tmp_path / "one", tmp_path / "two")
    assert any(line.startswith("prompts 140/140, ") and "tokens/s" in line for line in lines)
    assert any(line.startswith("answers ") for line in lines)


def test_a_workers_failure_is_told_in_its_own_words(talker, tmp_path, monkeypatch) -> None:
    recipe = recipe_for(tmp_path, text={"num_processes": 2})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}', encoding="utf-8")
    with pytest.raises(RequestError, match=r"prompts\.jsonl: line 2: prompt must be text, not int"):
        prepare_corpus(recipe, talker, tmp_path / "c")
    monkeypatch.setattr(prepare, "_WORKER", ("-c", "import os, sys; print('bad', file=sys.stderr); os.abort()"))
    with pytest.raises(UnavailableError, match=r"ended with code -6: bad; finished shards in .* are kept"):
        prepare_corpus(recipe, talker, tmp_path / "c")


def test_progress_is_summed_over_workers_and_says_what_is_left(monkeypatch) -> None:
    lines: list[str] = []
    now = [100.0]
    monkeypatch.setattr(prepare.time, "monotonic", lambda: now[0])
    progress = ProgressLines(2, lines.append)
    progress(0, Event("answers", 10, 60, 0))
    assert lines == []
    progress(1, Event("answers", 0, 40, 0))
    assert lines == ["answers 10/100"]
    for seconds, done in ((2, 20), (10, 40)):
        now[0] = 100.0 + seconds
        progress(0, Event("answers", done, 60, done * 5))
    assert lines[1:] == ["answers 40/100, 200 tokens, 20 tokens/s, 0.3 min left"]
    progress(1, Event("answers", 40, 40, 0))
    progress(0, Event("answers", 60, 60, 300))
    progress(0, Event("answers", 60, 60, 300))
    assert len(lines) == 3
    assert lines[-1] == "answers 100/100, 300 tokens, 30 tokens/s, 0.0 min left"
