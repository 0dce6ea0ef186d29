"""Text: streamed pieces equal the whole, stop strings equal decoding one by one, bad prompts are named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from blockdraft.errors import CheckpointError, RequestError, UnavailableError
from blockdraft.text import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    StopScanner,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
    parse_chat_jsonl,
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not thinking %}-{% endif %}{% endif %}"
)
CORPUS = [
    "The lighthouse keeper found a message in a bottle. The message was old, and the bottle older.",
    "naïve café déjà vu — “quotes” … 日本語のテキスト 한국어 العربية हिन्दी 👩‍👩‍👧 🏳️‍🌈 é",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
]


def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("日本", special=False)])
    return Tokenizer(backend=backend, chat_template=TEMPLATE)


def sentencepiece_like() -> Tokenizer:
    """Spaces as a visible mark, one stripped in front, and bytes for characters outside the vocabulary."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁t", "▁the", "th", "he"]
    pieces += [chr(c) for c in range(ord("a"), ord("z") + 1)] + ["é", "日", ".", "\n"]
    merges = [("▁", "t"), ("t", "h"), ("h", "e"), ("▁t", "he")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend=backend)


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁the", "the", *"abcdefghé日."]
    backend = Backend(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend=backend)


class ByteTokenizer:
    """Stands for a tokenizer that runs in Python: one id per byte, ids past 255 are special."""

    all_special_tokens = ("<|mark|>",)
    all_special_ids = (256,)

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        mark = b"" if skip_special_tokens else b"<|mark|>"
        return b"".join(bytes([i]) if i < 256 else mark for i in ids).decode("utf-8", "replace")


TOKENIZERS = {
    "byte_level": byte_level(),
    "sentencepiece_like": sentencepiece_like(),
    "metaspace": metaspace(),
    "python": Tokenizer(backend=None, auto=ByteTokenizer()),
}
KINDS = list(TOKENIZERS)
LONG = settings(max_examples=150, deadline=None)

texts = st.text(max_size=40) | st.lists(
    st.sampled_from(
        [
            "the ",
            " ",
            "e\u0301",
            "👩‍👩‍👧",
            "🏳️‍🌈",
            "日本語",
            "<think>",
            "é",
            "\n\n",
            "ab",
            "\ufffd",
            "a\u0300\u0301",
        ]
    ),
    max_size=12,
).map("".join)


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """The ids in consecutive steps of the given lengths, the last as long as it takes."""
    steps, at = [], 0
    for length in cuts:
        steps.append(ids[at : at + length])
        at += length
    return [*steps, ids[at:]]


cut_lists = st.lists(st.integers(0, 9), max_size=12)


# ----------------------------------------------------------------------------------- streamed decoding


def check_stream(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], skip: bool) -> None:
    whole = tokenizer.decode(ids, skip)
    decoder = StreamDecoder(tokenizer, skip)
    shown = ""
    for step in split(ids, cuts):
        shown += decoder.feed(step)
        assert whole.startswith(shown)
    assert shown + decoder.flush() == whole


@pytest.mark.parametrize("kind", KINDS)
@LONG
@given(text=texts, cuts=cut_lists, skip=st.booleans())
def test_pieces_of_a_text_join_to_the_whole(kind: str, text: str, cuts: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    check_stream(tokenizer, tokenizer.encode(text, False), cuts, skip)


@pytest.mark.parametrize("kind", KINDS)
@LONG
@given(data=st.data(), cuts=cut_lists, skip=st.booleans())
def test_pieces_of_any_ids_join_to_the_whole(kind: str, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    """A model may emit halves of characters, special ids in the middle and rows that have no token."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    check_stream(tokenizer, ids, cuts, skip)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like", "python"])
def test_no_half_of_a_character_is_shown(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("a🦊🐙b", False)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.feed([token_id]) for token_id in ids]
    assert len(ids) > 6  # more ids than characters
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + decoder.flush() == "a🦊🐙b"


def test_an_unfinished_character_is_replaced_only_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("🦊", False)
    assert len(ids) > 1
    decoder = StreamDecoder(tokenizer)
    assert decoder.feed(ids[:-1]) == ""
    assert decoder.flush() == "\ufffd" == tokenizer.decode(ids[:-1])
    assert decoder.feed(ids) == "🦊"  # as new after the flush


def test_one_bad_byte_spoils_its_whole_run_of_byte_tokens() -> None:
    tokenizer = TOKENIZERS["sentencepiece_like"]
    euro = tokenizer.encode("€", False)[-3:]
    bad = tokenizer.encode("\x80", False)[-1]
    letter = tokenizer.encode("a", False)[-1]
    assert tokenizer.decode([letter, *euro]) == "a€"
    assert tokenizer.decode([letter, *euro, bad]) == "a" + "\ufffd" * 4
    check_stream(tokenizer, [letter, *euro, bad, letter], [1] * 6, True)
    end = tokenizer.encode("</s>", False)[-1]  # left out of the text, so it does not end a run of bytes
    check_stream(tokenizer, [letter, *euro, end, bad, letter], [1] * 7, True)
    check_stream(tokenizer, [letter, *euro, end, bad, letter], [1] * 7, False)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like", "metaspace"])
def test_work_per_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[kind]
    decoded: list[int] = []
    plain = Tokenizer.decode

    def counted(self: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded.append(len(ids))
        return plain(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    ids = tokenizer.encode("the bad face " * 100, False)
    decoder = StreamDecoder(tokenizer)
    for token_id in ids:
        decoder.feed([token_id])
    assert sum(decoded) <= 6 * len(ids)


# ---------------------------------------------------------------------------------------- stop strings


def one_by_one(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int, str | None]:
    """The slow oracle: (text, ids kept, stop), by one id at a time and a look at every character."""
    decoder = StreamDecoder(tokenizer)
    text, done = "", 0
    for num_kept in range(1, len(ids) + 2):
        text += decoder.feed(ids[num_kept - 1 : num_kept]) if num_kept <= len(ids) else decoder.flush()
        for end in range(done + 1, len(text) + 1):
            for stop in sorted(stops, key=len, reverse=True):
                if text[:end].endswith(stop):
                    return text[: end - len(stop)], min(num_kept, len(ids)), stop
        done = len(text)
    return text, len(ids), None


def scan(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], stops: Sequence[str], **kwargs: Any
) -> tuple[str, int, str | None]:
    scanner = StopScanner(tokenizer, stops, **kwargs)
    text, kept = "", 0
    for step in split(ids, cuts):
        result = scanner.feed(step)
        text += result.text
        kept += result.num_kept
        if result.stop is not None:
            return text, kept, result.stop
        assert result.num_kept == len(step)
    last = scanner.flush()
    return text + last.text, kept, last.stop


@pytest.mark.parametrize("kind", KINDS)
@LONG
@given(data=st.data(), text=texts, cuts=cut_lists)
def test_stop_equals_decoding_one_by_one(kind: str, data: st.DataObject, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, False)
    whole = tokenizer.decode(ids)
    inside = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 6)).map(
        lambda span: whole[span[0] : span[0] + span[1]] or "?"
    )
    stops = data.draw(st.lists(inside | st.text(min_size=1, max_size=3), max_size=4, unique=True))
    assert scan(tokenizer, ids, cuts, stops) == one_by_one(tokenizer, ids, stops)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_stop_at_every_offset(length: int, step: int) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(CORPUS[0] + " 日本語 " + CORPUS[2], False)
    whole = tokenizer.decode(ids)
    for start in range(len(whole) - length + 1):
        stop = whole[start : start + length]
        text, kept, found = scan(tokenizer, ids, [step] * len(ids), [stop])
        assert (text, found) == (whole[: whole.index(stop)], stop)
        assert stop in tokenizer.decode(ids[:kept])
        assert stop not in tokenizer.decode(ids[: kept - 1])
        with_stop, same_kept, _ = scan(tokenizer, ids, [step] * len(ids), [stop], include_stop=True)
        assert (with_stop, same_kept) == (text + stop, kept)


def test_the_stop_that_ends_first_wins_and_the_longer_of_a_tie() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("one two three", False)
    assert scan(tokenizer, ids, [], ["one two three", "two"]) == one_by_one(tokenizer, ids, ["two"])
    assert scan(tokenizer, ids, [], ["o", "two"])[::2] == ("", "o")
    assert scan(tokenizer, ids, [], ["wo", "two"])[::2] == ("one ", "two")


@LONG
@given(text=texts, stops=st.lists(st.sampled_from(["the the", "\n\n\n", "ab日", "éé", "aba"]), max_size=3))
def test_only_the_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    scanner, decoder = StopScanner(tokenizer, stops), StreamDecoder(tokenizer)
    shown = certain = ""
    for token_id in tokenizer.encode(text, False):
        result = scanner.feed([token_id])
        if result.stop is not None:
            return
        shown += result.text
        certain += decoder.feed([token_id])
        held = certain.removeprefix(shown)
        assert shown + held == certain
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_that_may_not_end_yet_is_passed_over() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("ab ab ab", False)
    scanner = StopScanner(tokenizer, ["b a"])
    first = scanner.feed(ids[:1], may_stop=False)
    cut = len(tokenizer.encode("ab ab", False))
    second = scanner.feed(ids[1:cut], may_stop=False)
    third = scanner.feed(ids[cut:])
    assert (first.stop, second.stop, third.stop) == (None, None, "b a")
    assert first.text + second.text + third.text == "ab a"


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ([""], "an empty stop string"),
        (["a", ""], "an empty stop string"),
        ([3], "must be text, not int"),
        (["\ud800"], "surrogate"),
        (["x" * (MAX_STOP_CHARS + 1)], f"at most {MAX_STOP_CHARS}"),
        ([str(n) for n in range(MAX_STOP_STRINGS + 1)], f"at most {MAX_STOP_STRINGS}"),
    ],
)
def test_stop_strings_that_cannot_work_are_refused(stop: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        StopScanner(TOKENIZERS["byte_level"], stop)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------ messages and templates


def test_chat_ids_render_the_template() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi 🦊"}]
    ids = tokenizer.chat_ids(messages)
    head = "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi 🦊<|im_end|>\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == head + "<|im_start|>assistant\n-"
    assert tokenizer.decode(tokenizer.chat_ids(messages, add_generation_prompt=False), False) == head
    assert tokenizer.decode(tokenizer.chat_ids(messages, thinking=True), False).endswith("assistant\n")


def test_a_template_setting_without_effect_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'thinkin'.*did you mean 'thinking'"):
        TOKENIZERS["byte_level"].chat_ids([{"role": "user", "content": "x"}], thinkin=True)


def test_no_template_and_a_template_that_refuses() -> None:
    user = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="no chat template"):
        TOKENIZERS["metaspace"].chat_ids(user)
    strict = Tokenizer(
        backend=TOKENIZERS["byte_level"]._backend,
        chat_template="{{ raise_exception('roles must alternate') }}",
    )
    with pytest.raises(RequestError, match="roles must alternate"):
        strict.chat_ids(user)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"role": "user"}], "content must be text, not NoneType"),
        ([{"role": "user", "content": ""}], "user message is empty"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content must be text, not list"),
        ([{"role": "bot", "content": "x"}], "allowed are system, user, assistant"),
        ([{"role": "user", "content": "x", "nmae": "y"}], "unknown key 'nmae'"),
        ([{"role": "user", "content": "x", "contents": "y"}], "did you mean 'content'"),
        ([{"role": "user", "content": "\ud83d"}], "half of a surrogate pair"),
    ],
)
def test_messages_that_cannot_be_meant_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        TOKENIZERS["byte_level"].chat_ids(messages)
    assert "\n" not in str(error.value)


def test_prompt_lines() -> None:
    prompts = parse_chat_jsonl(
        [
            '{"prompt": "a"}\n',
            "\n",
            '{"messages": [{"role": "user", "content": "b"}]}\n',
            '{"prompt": "\\ud83e\\udd8a"}',
        ]
    )
    assert [prompt.line for prompt in prompts] == [1, 3, 4]
    assert [prompt.text for prompt in prompts] == ["a", None, "🦊"]
    assert [prompt.as_messages()[0]["content"] for prompt in prompts] == ["a", "b", "🦊"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "prompt file is empty"),
        (["  \n"], "prompt file is empty"),
        (['{"prompt": "a"}', "{prompt}"], "line 2 is not valid JSON"),
        (["[1]"], "line 1 must be a JSON object"),
        (['{"prompt": "a", "promt": "b"}'], "line 1: unknown key 'promt'.*did you mean 'prompt'"),
        (['{"prompt": "a", "messages": []}'], 'line 1 must hold either "prompt" or "messages"'),
        (["{}"], 'line 1 must hold either "prompt" or "messages"'),
        (['{"prompt": ""}'], "line 1: the prompt is empty"),
        (['{"prompt": 7}'], "line 1: prompt must be text, not int"),
        (['{"prompt": "\\ud800"}'], "line 1: prompt has half of a surrogate pair"),
        (['{"messages": [{"role": "x", "content": "y"}]}'], r"line 1: messages\[0\]: role 'x'"),
    ],
)
def test_prompt_lines_that_cannot_be_meant_are_refused(lines: list[str], says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        parse_chat_jsonl(lines)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------ loading a folder


def write_folder(folder: Path, **settings_: Any) -> Path:
    TOKENIZERS["byte_level"]._backend.save(str(folder / "tokenizer.json"))
    settings_ = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>", **settings_}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return folder


@pytest.mark.parametrize("settings_", [{}, {"add_prefix_space": False}])
def test_a_folder_loads_the_same_both_ways(tmp_path: Path, settings_: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, **settings_))
    assert (tokenizer._auto is None) == (not settings_)  # any key that could matter leaves it to transformers
    for text in [*CORPUS, "", "a<|im_end|>b<think>"]:
        assert tokenizer.encode(text, True) == TOKENIZERS["byte_level"].encode(text, True)
        check_stream(tokenizer, tokenizer.encode(text, True), [2] * 99, False)
    messages = [{"role": "user", "content": CORPUS[1]}]
    assert tokenizer.chat_ids(messages) == TOKENIZERS["byte_level"].chat_ids(messages)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no usable tokenizer in"):
        load_tokenizer(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_settings_that_are_nested_too_deeply_are_named(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        load_tokenizer(tmp_path)


def test_code_of_a_folder_runs_by_consent_only_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at a prompt"))
    with pytest.raises(CheckpointError, match="custom code"):
        load_tokenizer(folder)
    text = CORPUS[0]
    assert load_tokenizer(folder, trust_remote_code=True).encode(text, True) == TOKENIZERS["byte_level"].encode(
        text, True
    )


def test_the_built_in_tokenizer_is_the_one_transformers_loads() -> None:
    from transformers import AutoTokenizer

    from blockdraft.targets.smollm2 import ensure_target

    try:
        folder = ensure_target()
    except UnavailableError as error:
        pytest.skip(f"the built-in target cannot be fetched here: {error}")
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer._auto is None
    assert tokenizer.vocab_size == len(reference)
    for text in [*CORPUS, "", " ", "<|im_start|>x", "\u0000\u200d\U0001f98a" * 3]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids, False) == reference.decode(ids)
        check_stream(tokenizer, ids, [1] * len(ids), False)
    messages = [{"role": "user", "content": "Why is the sky blue? 🦊"}]
    theirs = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat_ids(messages) == theirs
