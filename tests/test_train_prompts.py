"""Sources become conversations, each prompt counts once, and what is evaluated is never trained on."""

from __future__ import annotations

import importlib.util
import json
import random

import pytest

from blockdraft.errors import ConfigError, RequestError, UnavailableError
from blockdraft.text import load_tokenizer
from blockdraft.train.prompts import (
    Conversation,
    Tally,
    conversation,
    hub_conversations,
    read_file,
    read_hub,
    row_messages,
    select,
)
from blockdraft.train.sections import HubRecipe
from blockdraft.train.selfwritten import finished_turn, open_turn_ids

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def talk(*turns: tuple[str, str], suffix: str = "") -> Conversation:
    return conversation([{"role": role, "content": content} for role, content in turns], "test", suffix)


def hub(**changes) -> HubRecipe:
    settings = {"dataset": "some/set", "config": "", "split": "train", "field": "q", "suffix": "", "limit": 0}
    return HubRecipe(**{**settings, **changes})


def chosen(conversations, *, num_held_out=0, every_turn=False, exclude=(), usable=lambda one: True, tally=None):
    return select(
        conversations,
        num_held_out=num_held_out,
        every_turn=every_turn,
        exclude=exclude,
        ids_of=lambda one: [len(one.user_texts()[-1])] if usable(one) else None,
        tally=tally or Tally(),
    )


# ---- sources ---------------------------------------------------------------------------------------------------------
def test_a_file_gives_prompts_and_conversations(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "one"},
        {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "given"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = read_file(str(path))
    assert [one.user_texts() for one in found] == [["one"], ["two"], ["three"]]
    assert found[1].messages[-1]["role"] == USER  # the answer at the end is the target's to write
    assert [one.source for one in found] == ["p.jsonl"] * 3


def test_a_line_separator_inside_a_prompt_does_not_end_its_line(tmp_path) -> None:
    path, text = tmp_path / "p.jsonl", "one\u2028two\x85three"
    path.write_bytes(json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n" + b'{"prompt": "four"}\n')
    assert [one.user_texts() for one in read_file(str(path))] == [[text], ["four"]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"p\.jsonl: line 1 is not valid JSON"),
        ('{"prompt": "a"}\n{"messages": [{"role": "assistant", "content": "a"}]}', r"p\.jsonl: line 2: .* no user"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role 'tool' given"),
        ("", "the prompt file is empty"),
    ],
)
def test_a_file_that_cannot_be_meant_is_one_line(tmp_path, content: str, words: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RequestError, match=words) as caught:
        read_file(str(path))
    assert "\n" not in str(caught.value)


def test_both_spellings_of_messages_are_mapped() -> None:
    plain = [{"role": SYSTEM, "content": "s"}, {"role": USER, "content": "q"}, {"role": ASSISTANT, "content": "a"}]
    other = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert row_messages(plain) == row_messages(other) == row_messages([{**entry, "weight": 1} for entry in plain])
    assert row_messages("q") == [{"role": USER, "content": "q"}]
    for bad, words in (
        ([{"from": "bing", "value": "a"}], "message 0: role 'bing' given, allowed are system, user, human"),
        ([{"role": "user", "content": ["part"]}], "content must be text, not list"),
        ([{"text": "a"}], "role None given"),
        ([3], "must be an object, not int"),
        (3, "a text or a list of messages, not int"),
    ):
        with pytest.raises(RequestError, match=words):
            row_messages(bad)


def test_rows_of_a_data_set_are_used_or_counted() -> None:
    tally = Tally()
    rows = [{"q": "one"}, {"q": [{"from": "tool", "value": "x"}]}, {"q": "  "}, {"q": "two"}]
    found = hub_conversations(rows, hub(suffix=" Think."), "some/set:train", tally)
    assert [one.user_texts() for one in found] == [["one Think."], ["two Think."]]
    assert tally.counts == {"refused_rows": 2}
    assert "some/set:train row 1: message 0: role 'tool'" in tally.examples["refused_rows"]
    with pytest.raises(ConfigError, match=r"no column 'q'; prompts.hub.field is one of a, b"):
        hub_conversations([{"a": 1, "b": 2}], hub(), "some/set", Tally())
    with pytest.raises(RequestError, match="gives no prompt: some/set row 0: a prompt is a text"):
        hub_conversations([{"q": 3}], hub(), "some/set", Tally())


def test_a_local_folder_is_read_through_the_extra_or_named(tmp_path) -> None:
    rows = [{"q": f"question number {number}"} for number in range(5)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    if importlib.util.find_spec("datasets") is None:
        with pytest.raises(UnavailableError, match=r"pip install 'blockdraft\[train\]'"):
            read_hub(hub(dataset=str(tmp_path)), Tally())
        pytest.skip("the extra `datasets` is not installed: only its absence was tested")
    for limit, count in ((0, 5), (3, 3)):
        found = read_hub(hub(dataset=str(tmp_path), limit=limit), Tally())
        assert [one.user_texts()[0] for one in found] == [row["q"] for row in rows[:count]]
    with pytest.raises(UnavailableError, match="could not be read"):
        read_hub(hub(dataset=str(tmp_path), split="none"), Tally())


# ---- turns -----------------------------------------------------------------------------------------------------------
def test_segments_are_what_is_given_before_each_answer() -> None:
    one = talk(
        (SYSTEM, "s"), (USER, "a"), (ASSISTANT, "x"), (USER, "b"), (ASSISTANT, "y"), (USER, "c"), (ASSISTANT, "z")
    )
    texts = [[m["content"] for m in segment] for segment in one.segments(every_turn=True)]
    assert texts == [["s", "a"], ["b"], ["c"]]
    assert [m["content"] for m in one.segments(every_turn=False)[0]] == ["s", "a", "x", "b", "y", "c"]
    greeting = talk((ASSISTANT, "hello"), (USER, "a"))
    assert [m["content"] for m in greeting.segments(every_turn=True)[0]] == ["hello", "a"]


# ---- each prompt once, on one side -----------------------------------------------------------------------------------
def test_the_same_prompt_counts_once() -> None:
    tally = Tally()
    same = [talk((USER, "Add 2 and 3")), talk((USER, " add 2  and 3\n")), talk((USER, "add 2 and 4"))]
    assert len(chosen(same, tally=tally).train) == 2
    assert tally.counts == {"duplicate": 1}
    answers = [talk((USER, "a"), (ASSISTANT, text), (USER, "b")) for text in "xy"]
    assert [len(chosen(answers, every_turn=every).train) for every in (True, False)] == [1, 2]


def test_evaluation_prompts_never_get_in() -> None:
    tally = Tally()
    given = [
        talk((USER, "How much is 2+3?"), suffix="\nBox it."),
        talk((USER, "tell me"), (ASSISTANT, "what"), (USER, "how MUCH is 2+3?")),
        talk((USER, "How much is 2+4?")),
    ]
    for exclude in (["How much is 2+3?"], ["how much is 2+3?\nBox it.", "how much is  2+3?"]):
        assert [one.user_texts()[0] for one in chosen(given, exclude=exclude, tally=tally).train] == [
            "How much is 2+4?"
        ]
    assert tally.counts == {"excluded": 4}


def test_a_prompt_stands_on_one_side_and_new_ones_never_move_it_into_evaluation() -> None:
    rng = random.Random(0)
    texts = [f"prompt {rng.random()}" for _ in range(200)]
    sides = {}
    for count in (50, 120, 200):
        given = [talk((USER, text)) for text in texts[:count]]
        given += [talk((USER, text), (ASSISTANT, "x"), (USER, "more")) for text in texts[:count:3]]
        rng.shuffle(given)
        split = chosen(given, num_held_out=20, every_turn=bool(count % 3))
        held_out = {one.user_texts()[0] for one, _ in split.held_out}
        trained = {one.user_texts()[0] for one in split.train}
        assert len(held_out) == len(split.held_out) == 20
        assert not held_out & trained and held_out | trained == set(texts[:count])
        for text in trained:
            assert sides.get(text) in (None, "train", "held out")
        for text in held_out:
            assert sides.get(text) in (None, "held out"), "a prompt that was trained on is evaluated"
        sides.update(dict.fromkeys(trained, "train") | dict.fromkeys(held_out, "held out"))


def test_held_out_prompts_are_such_that_can_be_asked() -> None:
    given = [talk((USER, "x" * (5 + number))) for number in range(30)]
    split = chosen(given, num_held_out=6, usable=lambda one: len(one.user_texts()[0]) < 20)
    assert all(len(one.user_texts()[0]) < 20 for one, _ in split.held_out)
    assert {ids[0] for _, ids in split.held_out} == {len(one.user_texts()[0]) for one, _ in split.held_out}
    for count in (30, 31):
        with pytest.raises(ConfigError, match=f"held_out is {count}, and of 30 different prompts"):
            chosen(given, num_held_out=count)


# ---- turns that the target writes ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer(tiny_pair):
    return load_tokenizer(tiny_pair.target)


@pytest.mark.parametrize("opening", ["", "Tell", "Write a function to", "日本"])
def test_a_turn_is_opened_as_the_template_would(tokenizer, opening: str) -> None:
    opened = tokenizer.decode(open_turn_ids(tokenizer, opening), skip_special_tokens=False)
    assert opened == f"<|im_start|>user\n{opening}"


def test_a_template_that_changes_turns_is_refused(tokenizer) -> None:
    with pytest.raises(ConfigError, match="ends in a space"):
        open_turn_ids(tokenizer, "Tell me ")
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = kept.replace("m['content']", "m['content'] | upper")
        with pytest.raises(ConfigError, match="does not keep a user turn that begins with 'Tell'"):
            open_turn_ids(tokenizer, "Tell")
    finally:
        tokenizer.chat_template = kept


def test_a_finished_turn_is_whole_or_says_why_not(tokenizer) -> None:
    stop = frozenset({2})
    ids = tokenizer.encode(" me what the quick fox is", add_special_tokens=False)
    assert finished_turn(tokenizer, "Tell", [*ids, 2], stop).text == "Tell me what the quick fox is"
    for answer, reason in (
        (ids, "unfinished"),
        ([], "unfinished"),
        ([2], "too_short"),
        ([ids[0], 2], "too_short"),
        ([*ids, 1, *ids, 2], "control_tokens"),
    ):
        turn = finished_turn(tokenizer, "Tell", answer, stop)
        assert (turn.text, turn.reason) == (None, reason)
    assert finished_turn(tokenizer, "A long opening", [2], stop).reason == "too_short"
