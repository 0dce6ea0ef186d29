"""Stop strings, streamed text and log-probabilities under speculation (cases S02, S12)."""

from __future__ import annotations

import pytest
import torch

from blockdraft.accept import SamplingParams
from blockdraft.engine import Engine, Request
from blockdraft.text import Tokenizer
from engine_kit import (
    Continuation,
    bigram_model,
    draft_config,
    hf_target,
    plain_ids,
    random_draft,
    run_one,
    tiny_model,
)

NO_STOP = frozenset()
LETTERS = "abcdefghijklmnopqrstuvwxyz .!?-\n"


def letters_tokenizer() -> Tokenizer:
    """One character per id: 32 ids, as many as the tiny target has."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend=backend)


def alphabet_engine(*, oracle: bool, width_text: int = 60) -> tuple[Engine, str]:
    model = bigram_model(lambda token: (token + 1) % 32)
    text = plain_ids(model, [0], width_text)
    target = hf_target(model)
    draft = Continuation(draft_config(target.facts), [[0, *text]]) if oracle else None
    return Engine(target, draft, tokenizer=letters_tokenizer()), "".join(LETTERS[i] for i in text)


@pytest.mark.parametrize("stop", ["b", "c", "hi", "ijk", "opqrst", "z .", "abc"])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_s02_stop_strings_end_text_ids_and_logprobs_together(stop, width):
    engine, full = alphabet_engine(oracle=True)
    fields = {
        "prompt_ids": [0],
        "max_new_tokens": 50,
        "stop_ids": NO_STOP,
        "stop_strings": (stop,),
        "num_logprobs": 2,
    }
    events = [e for step in engine.stream(Request(width=width, **fields)) for e in step]
    plain, _ = alphabet_engine(oracle=False)
    want = run_one(plain, **fields)
    at = full.find(stop)
    assert want.text == (full[:at] if at >= 0 else full[:50])
    assert len(want.token_ids) == (at + len(stop) if at >= 0 else 50)
    assert [e.token_id for e in events] == list(want.token_ids)
    assert "".join(e.text for e in events) == want.text
    assert [e.logprobs.token_id for e in events] == list(want.token_ids)
    assert [e.logprobs.logprob for e in events] == pytest.approx([e.logprobs.logprob for e in want.events], abs=1e-9)
    assert want.finish_reason == ("stop" if at >= 0 else "length") and want.stop == (stop if at >= 0 else None)


def test_s02_several_stop_strings_and_one_that_spans_steps():
    for width in (2, 3, 8):
        engine, full = alphabet_engine(oracle=True)
        done = run_one(
            engine,
            prompt_ids=[0],
            max_new_tokens=50,
            stop_ids=NO_STOP,
            stop_strings=("xyz", "hijklmn", "ghijklmnop"),
            width=width,
        )
        assert done.text == full[: full.find("hijklmn")] and done.stop == "hijklmn"
        done.stats.check()
        assert done.stats.num_emitted_tokens == len(done.token_ids)


def test_a_stop_string_before_min_new_tokens_does_not_count():
    for oracle in (False, True):
        engine, full = alphabet_engine(oracle=oracle)
        fields = {"prompt_ids": [0], "max_new_tokens": 50, "stop_ids": NO_STOP}
        done = run_one(engine, stop_strings=("de", "qrs"), min_new_tokens=8, **fields)
        assert done.text == full[: full.find("qrs")] and done.stop == "qrs"


def test_text_of_all_events_is_the_decoded_text():
    model = tiny_model()
    target = hf_target(model)
    tokenizer = letters_tokenizer()
    engine = Engine(target, random_draft(draft_config(target.facts)), tokenizer=tokenizer)
    done = run_one(engine, prompt_ids=[3, 1], max_new_tokens=50, stop_ids=NO_STOP)
    assert done.text == "".join(e.text for e in done.events) == tokenizer.decode(done.token_ids)


def test_the_end_id_is_in_the_ids_and_not_in_the_text():
    engine, full = alphabet_engine(oracle=True)
    done = run_one(engine, prompt_ids=[0], max_new_tokens=50, stop_ids=frozenset({5}))
    assert done.token_ids[-1] == 5 and done.text == full[:4]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("accepted", [0, 2, 7])
def test_s12_logprobs_are_those_of_plain_scoring(params, accepted):
    """Accepted, corrected and bonus tokens alike: the raw log-probability of the id given the text before it."""
    model = tiny_model()
    target = hf_target(model)
    text = plain_ids(model, [3, 1], 40)
    wrong = None if accepted == 7 else accepted
    draft = Continuation(draft_config(target.facts), [[3, 1, *text]], wrong=lambda step: wrong)
    done = run_one(
        Engine(target, draft),
        prompt_ids=[3, 1],
        max_new_tokens=25,
        stop_ids=NO_STOP,
        sampling=params,
        num_logprobs=5,
        seed=3,
    )
    kinds = {event.kind for event in done.events}
    assert {"bonus", "first"} <= kinds and (accepted == 0 or not params.is_greedy or "accepted" in kinds)
    with torch.inference_mode():
        logits = model(torch.tensor([[3, 1, *done.token_ids]])).logits[0]
    want_TV = torch.log_softmax(logits, -1)
    for index, event in enumerate(done.events):
        row = want_TV[1 + index]
        assert event.logprobs.token_id == event.token_id
        assert event.logprobs.logprob == pytest.approx(float(row[event.token_id]), abs=1e-9)
        best = row.topk(5)
        assert [i for i, _ in event.logprobs.top] == best.indices.tolist()
        assert [v for _, v in event.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_stop_strings_without_a_tokenizer_are_refused():
    from blockdraft.errors import RequestError

    engine = Engine(hf_target(tiny_model()))
    with pytest.raises(RequestError, match="need a tokenizer"):
        engine.submit(Request(prompt_ids=[1], max_new_tokens=3, stop_strings=("x",)))


def bytes_tokenizer() -> Tokenizer:
    """256 byte tokens and a letter, as in vocabularies with byte fallback: a run of bytes is text when it has ended."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocab = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "a": 256, "?": 257}
    backend = Backend(models.BPE(vocab, [], unk_token="?", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend=backend)


def test_a_stop_string_that_the_length_limit_completes_is_the_reason():
    accented = "é".encode()
    follow = {256: accented[0], accented[0]: accented[1]}
    engine = Engine(hf_target(bigram_model(lambda t: follow.get(t, 256), vocab=258)), tokenizer=bytes_tokenizer())
    fields = {"prompt_ids": [256], "max_new_tokens": 2, "stop_ids": NO_STOP}
    stopped = run_one(engine, stop_strings=("é",), **fields)
    assert stopped.token_ids == tuple(accented)
    assert (stopped.text, stopped.finish_reason, stopped.stop) == ("", "stop", "é")
    whole = run_one(engine, stop_strings=("ü",), **fields)
    assert (whole.text, whole.finish_reason, whole.stop) == ("é", "length", None)
