"""Bad requests, prompts, options and pairs: the class of the error, one clear line, exit code 2, never a traceback."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft import Engine, Request, SamplingParams, load
from blockdraft.errors import (
    BlockdraftError,
    CheckpointError,
    ConfigError,
    PairError,
    RequestError,
    UnavailableError,
)
from engine_kit import draft_config
from tiny_pair import BLOCK_SIZE, MASK_ID, MAX_LENGTH, TinyPair, changed_copy, run_cli, write_draft

NAN, INF = math.nan, math.inf


def said(error: type[BlockdraftError], action: Callable[[], object]) -> str:
    """The message of the error that `action` must raise, checked to be of this very class and one line."""
    with pytest.raises(BlockdraftError) as caught:
        action()
    assert caught.type is error, caught.value
    message = str(caught.value)
    assert message.strip() == message != "" and "\n" not in message and len(message) < 600
    return message


# --------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": "fox"}, "prompt_ids is text"),
        ({"prompt_ids": b"fox"}, "prompt_ids is text"),
        ({"prompt_ids": [1, -2]}, "prompt_ids holds -2"),
        ({"prompt_ids": [True]}, "prompt_ids holds True"),
        ({"prompt_ids": [1.0]}, "prompt_ids holds 1.0"),
        ({"prompt_ids": ["7"]}, "prompt_ids holds '7'"),
        ({"prompt_ids": [None]}, "prompt_ids holds None"),
        ({"prompt_ids": [[1]]}, r"prompt_ids holds \[1\]"),
        ({"prompt_ids": 5}, "prompt_ids is 5"),
        ({"prompt_ids": None}, "prompt_ids is None"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": "9"}, "max_new_tokens is '9'"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 9}, "min_new_tokens is 9, above max_new_tokens 8"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"width": 1}, "width is 1; .* at least 2"),
        ({"width": 0}, "width is 0"),
        ({"width": -3}, "width is -3"),
        ({"width": "4"}, "width is '4'"),
        ({"width": 3, "speculate": False}, "width is 3 while speculation is off"),
        ({"speculate": "yes"}, "speculate is 'yes'"),
        ({"speculate": 1}, "speculate is 1"),
        ({"stop_strings": ("",)}, "empty stop string"),
        ({"stop_strings": "ab", "stop_ids": {-1}}, "stop_ids holds -1"),
        ({"stop_strings": (3,)}, "stop string must be text, not int"),
        ({"stop_strings": 3}, "stop_strings is 3"),
        ({"stop_strings": ("x" * 1000,)}, "stop string of 1000 characters"),
        ({"stop_strings": tuple(map(str, range(40)))}, "40 stop strings"),
        ({"stop_ids": [1, "2"]}, "stop_ids holds '2'"),
        ({"stop_ids": 7}, "stop_ids is 7"),
        ({"num_logprobs": -1}, "num_logprobs is -1"),
        ({"num_logprobs": True}, "num_logprobs is True"),
        ({"sampling": {"temperature": 1}}, "sampling is .*SamplingParams"),
    ],
)
def test_a_request_that_means_nothing(fields: dict[str, Any], says: str) -> None:
    message = said(RequestError, lambda: Request(**{"prompt_ids": [5], "max_new_tokens": 8, **fields}))
    assert_says(message, says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": INF}, "repetition_penalty is inf"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ({"presence_penalty": -3}, "presence_penalty is -3"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias names id '5'"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias names id -5"),
        ({"logit_bias": {5: NAN}}, "logit_bias of id 5 is nan"),
        ({"logit_bias": {5: 101}}, "logit_bias of id 5 is 101"),
    ],
)
def test_sampling_that_means_nothing(fields: dict[str, Any], says: str) -> None:
    assert_says(said(RequestError, lambda: SamplingParams(**fields)), says)


@pytest.fixture(scope="module")
def engine(tiny_pair: TinyPair) -> Engine:
    return load(tiny_pair.draft, tiny_pair.target)


@pytest.fixture(scope="module")
def plain_engine(tiny_pair: TinyPair) -> Engine:
    return load(None, tiny_pair.target, speculation="off")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt_ids": [5] * MAX_LENGTH}, f"prompt of {MAX_LENGTH} tokens"),
        ({"max_new_tokens": 10**30}, f"max_new_tokens {10**30}"),
        ({"prompt_ids": [10**6]}, "prompt_ids holds 1000000"),
        ({"prompt_ids": [2**70]}, f"prompt_ids holds {2**70}"),
        ({"stop_ids": {10**6}}, "stop_ids holds 1000000"),
        ({"num_logprobs": 10**6}, "num_logprobs is 1000000"),
        ({"width": BLOCK_SIZE + 1}, f"width is {BLOCK_SIZE + 1}; .* at most {BLOCK_SIZE}"),
        ({"sampling": SamplingParams(logit_bias={10**6: 1.0})}, "logit_bias names id 1000000"),
    ],
)
def test_a_request_that_this_engine_cannot_serve(engine: Engine, fields: dict[str, Any], says: str) -> None:
    request = Request(**{"prompt_ids": [5], "max_new_tokens": 8, **fields})
    good = Request(prompt_ids=[5], max_new_tokens=2)
    for action in (
        lambda: engine.check(request),
        lambda: engine.submit(request),
        lambda: engine.run([good, request]),
        lambda: next(engine.stream(request)),
    ):
        assert_says(said(RequestError, action), says)
    assert (engine.num_waiting, engine.num_running) == (0, 0)


@pytest.mark.parametrize("fields", [{"width": 3}, {"speculate": True}])
def test_speculation_that_is_asked_of_an_engine_without_a_draft(plain_engine: Engine, fields: dict[str, Any]) -> None:
    request = Request(prompt_ids=[5], max_new_tokens=2, **fields)
    assert_says(said(RequestError, lambda: plain_engine.submit(request)), "speculation is switched off")


def assert_says(message: str, pattern: str) -> None:
    assert re.search(pattern, message), message


# ------------------------------------------------------------------------------------------------------ pairs


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 999}, "vocabulary rows: the draft is made for 99|vocabulary rows: .* the target has 999"),
        ({"hidden_size": 64}, "width of the taps: the draft is made for 32, the target has 64"),
        ({"num_hidden_layers": 5}, "target layers: the draft is made for 3, the target has 5"),
        ({"num_hidden_layers": 2}, r"taps \[2\] do not exist: the target's last layer is 1"),
        ({"model_type": "jamba"}, "family 'jamba' has recurrent state that is out of reach"),
        ({"layer_types": ["linear_attention"] * 3}, "a cache of its own config that its forward cannot use"),
        ({"eos_token_id": MASK_ID}, f"mask id {MASK_ID} is the target's end of text id"),
    ],
)
def test_a_target_that_the_draft_does_not_fit(
    tiny_pair: TinyPair, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    target = changed_copy(tiny_pair.target, tmp_path / "other", **changes)
    assert_says(said(PairError, lambda: load(tiny_pair.draft, target)), says)


def test_a_draft_with_other_ids_is_refused_even_with_a_head_of_its_own(tiny_pair: TinyPair, tmp_path: Path) -> None:
    from blockdraft.formats import zlab

    config = draft_config(tiny_pair.facts, v2=False, vocab_size=40, mask_token_id=MASK_ID)
    shapes = zlab.expected_tensors(config) | zlab.optional_tensors(config)
    zlab.write(tmp_path / "draft", zlab.Checkpoint(config, {n: torch.ones(s) for n, s in shapes.items()}))
    assert_says(said(PairError, lambda: load(tmp_path / "draft", tiny_pair.target)), "40 ids and the target")


def test_a_draft_with_its_own_embedding_and_head_may_have_its_own_width(tiny_pair: TinyPair, tmp_path: Path) -> None:
    from blockdraft.formats import zlab

    config = draft_config(tiny_pair.facts, hidden_size=16, mask_token_id=MASK_ID)
    shapes = zlab.expected_tensors(config) | zlab.optional_tensors(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    zlab.write(tmp_path / "draft", zlab.Checkpoint(config, tensors))
    request = Request(prompt_ids=[9, 10, 11], max_new_tokens=12)
    [found] = load(tmp_path / "draft", tiny_pair.target).run([request])
    [plain] = load(None, tiny_pair.target, speculation="off").run([request])
    assert found.token_ids == plain.token_ids and found.stats.num_draft_tokens > 0


def missing(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.draft, folder / "nowhere"


def swapped(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.target, pair.draft


def draft_twice(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.draft, pair.draft


def target_twice(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.target, pair.target


def empty_draft(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    (folder / "draft").mkdir()
    return folder / "draft", pair.target


def empty_target(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    (folder / "target").mkdir()
    return pair.draft, folder / "target"


def config_as_draft(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.draft / "config.json", pair.target


def config_as_target(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.draft, pair.target / "config.json"


def cut(file: Path, keep: float = 0.5) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def copied(folder: Path, pair: TinyPair) -> TinyPair:
    shutil.copytree(pair.draft, folder / "draft")
    shutil.copytree(pair.target, folder / "target")
    return TinyPair(folder / "target", folder / "draft")


def truncated_draft(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    cut(both.draft / "model.safetensors")
    return both.draft, both.target


def truncated_target(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    cut(both.target / "model.safetensors")
    return both.draft, both.target


def target_without_weights(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    (both.target / "model.safetensors").unlink()
    return both.draft, both.target


def target_without_a_tensor(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    from safetensors.torch import load_file, save_file

    both = copied(folder, pair)
    tensors = load_file(both.target / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, both.target / "model.safetensors", metadata={"format": "pt"})
    return both.draft, both.target


def broken_target_config(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    cut(both.target / "config.json")
    return both.draft, both.target


def broken_draft_config(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    (both.draft / "config.json").write_bytes(b"\xff\xfe{}")
    return both.draft, both.target


def senseless_target_config(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.draft, changed_copy(pair.target, folder / "target", num_attention_heads="many")


def no_tokenizer(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    (both.target / "tokenizer.json").unlink()
    return both.draft, both.target


def broken_tokenizer(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    cut(both.target / "tokenizer.json")
    return both.draft, both.target


def broken_tokenizer_config(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    (both.target / "tokenizer_config.json").write_text("[1]")
    return both.draft, both.target


def template_in_another_encoding(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    both = copied(folder, pair)
    (both.target / "chat_template.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    return both.draft, both.target


def unknown_family(folder: Path, pair: TinyPair) -> tuple[Path, Path]:
    return pair.draft, changed_copy(pair.target, folder / "target", model_type="lama")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (missing, CheckpointError, "target '.*nowhere': no such folder"),
        (swapped, ConfigError, "describes a draft"),
        (draft_twice, ConfigError, "describes a draft: give the model that it drafts for"),
        (target_twice, ConfigError, "LlamaForCausalLM"),
        (empty_draft, CheckpointError, "draft is empty"),
        (empty_target, CheckpointError, "target is empty|has no config.json"),
        (config_as_draft, CheckpointError, "config.json is a file"),
        (config_as_target, CheckpointError, "config.json is a file"),
        (truncated_draft, CheckpointError, "model.safetensors"),
        (truncated_target, CheckpointError, "target cannot be loaded"),
        (target_without_weights, CheckpointError, "target cannot be loaded"),
        (target_without_a_tensor, CheckpointError, r"lacks 1 tensors .*model.layers.1.mlp.up_proj.weight"),
        (broken_target_config, ConfigError, "config.json is not a JSON file"),
        (broken_draft_config, ConfigError, "config.json is not a JSON file"),
        (senseless_target_config, CheckpointError, "target cannot be loaded.*num_attention_heads"),
        (no_tokenizer, CheckpointError, "no usable tokenizer in .*there is no tokenizer.json"),
        (broken_tokenizer, CheckpointError, "tokenizer.json cannot be read"),
        (broken_tokenizer_config, CheckpointError, "tokenizer_config.json must hold a JSON object"),
        (template_in_another_encoding, CheckpointError, "chat_template.jinja is not UTF-8"),
        (unknown_family, CheckpointError, "target cannot be loaded.*lama"),
    ],
)
def test_a_pair_that_cannot_be_loaded(
    tiny_pair: TinyPair, tmp_path: Path, make: Any, error: type[BlockdraftError], says: str
) -> None:
    draft, target = make(tmp_path, tiny_pair)
    assert_says(said(error, lambda: load(draft, target)), says)


@pytest.mark.parametrize("make", [truncated_target, senseless_target_config, broken_target_config, draft_twice])
def test_a_target_that_cannot_be_loaded_even_without_a_draft(tiny_pair: TinyPair, tmp_path: Path, make: Any) -> None:
    _, target = make(tmp_path, tiny_pair)
    error = ConfigError if make in (draft_twice, broken_target_config) else CheckpointError
    assert "target" in said(error, lambda: load(None, target, speculation="off"))


def test_a_recurrent_target_out_of_reach_is_refused_by_name(tmp_path: Path) -> None:
    raw = {
        "architectures": ["RwkvForCausalLM"],
        "model_type": "rwkv",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    message = said(PairError, lambda: load(None, tmp_path, speculation="off"))
    assert "rwkv" in message and "recurrent" in message


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"dtype": "int8"}, RequestError, "dtype is 'int8'; allowed are float32, bfloat16, float16, float64"),
        ({"dtype": torch.float32}, RequestError, "dtype is torch.float32"),
        ({"dtype": ["float32"]}, RequestError, r"dtype is \['float32'\]"),
        ({"device": "gpu"}, RequestError, "device is 'gpu'"),
        ({"device": ""}, RequestError, "device is ''"),
        ({"device": "cuda:-1"}, RequestError, "device is 'cuda:-1'"),
        ({"device": "cpu:0"}, RequestError, "device is 'cpu:0'"),
        ({"device": "cuda:x\ny"}, RequestError, "device is"),
        ({"device": 0}, RequestError, "device is 0"),
        ({"device": "cuda:99"}, UnavailableError, "device is 'cuda:99', and this machine has"),
        ({"speculation": "maybe"}, RequestError, "speculation is 'maybe'"),
        ({"speculation": True}, RequestError, "speculation is True"),
        ({"max_rows": 0}, RequestError, "max_rows is 0"),
        ({"max_rows": 2.5}, RequestError, "max_rows is 2.5"),
        ({"target": None}, PairError, "needs its target"),
        ({"draft": None}, PairError, "has no draft"),
        ({"draft": ""}, CheckpointError, "draft is given as ''"),
        ({"target": " "}, CheckpointError, "target is given as ' '"),
        ({"draft": "x" * 9000}, CheckpointError, "draft 'xxx"),
        ({"draft": "two\nlines"}, CheckpointError, r"draft 'two\\nlines'"),
        ({"draft": "~nobody-of-that-name/draft"}, CheckpointError, "draft '~nobody-of-that-name/draft'"),
        ({"draft": "nul\0nul"}, CheckpointError, "draft 'nul"),
    ],
)
def test_arguments_of_load(
    tiny_pair: TinyPair, arguments: dict[str, Any], error: type[BlockdraftError], says: str
) -> None:
    assert_says(said(error, lambda: load(**{"draft": tiny_pair.draft, "target": tiny_pair.target, **arguments})), says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_gpu(tiny_pair: TinyPair) -> None:
    message = said(UnavailableError, lambda: load(tiny_pair.draft, tiny_pair.target, device="cuda"))
    assert message == "device is 'cuda', and this machine has 0 CUDA devices; use cpu"


# -------------------------------------------------------------------------------------------- the command line


PAIR = "PAIR"  # stands for the words that name the tiny pair


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        ([PAIR, ""], b"", "the prompt is empty"),
        ([PAIR, " \n\t "], b"", "the prompt is empty"),
        ([PAIR], b"", "the prompt is empty"),
        ([PAIR], b"\n\n", "the prompt is empty"),
        ([PAIR], b"caf\xe9", "the prompt -: not UTF-8 text"),
        ([PAIR, "fox " * 400], b"", f"above the target's {MAX_LENGTH} positions"),
        ([PAIR, "one", "two"], b"", "3 words given"),
        (["one", "two"], b"", "a draft needs --target"),
        (["one", "two", "three"], b"", "3 words given"),
        ([PAIR, "hi", "--width", "1"], b"", "width is 1"),
        ([PAIR, "hi", "--width", "9"], b"", "width is 9; the draft was trained for at most 5"),
        ([PAIR, "hi", "--width", "x"], b"", "--width"),
        ([PAIR, "hi", "--widht", "3"], b"", "--widht.*--width.*see blockdraft generate --help"),
        ([PAIR, "hi", "--width"], b"", "--width"),
        ([PAIR, "hi", "--temperature", "nan"], b"", "temperature is nan"),
        ([PAIR, "hi", "--temperature", "-1"], b"", "temperature is -1"),
        ([PAIR, "hi", "--temperature", "hot"], b"", "--temperature"),
        ([PAIR, "hi", "--top-p", "1.5"], b"", "top_p is 1.5"),
        ([PAIR, "hi", "--top-k", "-1"], b"", "top_k is -1"),
        ([PAIR, "hi", "--min-p", "2"], b"", "min_p is 2"),
        ([PAIR, "hi", "--logit-bias", "5"], b"", "--logit-bias '5'"),
        ([PAIR, "hi", "--logit-bias", "a=b"], b"", "--logit-bias 'a=b'"),
        ([PAIR, "hi", "--logit-bias", "5=inf"], b"", "logit_bias of id 5 is inf"),
        ([PAIR, "hi", "--logit-bias", "5=1", "--logit-bias", "5=2"], b"", "names id 5 twice"),
        ([PAIR, "hi", "--logit-bias", "999999=1"], b"", "logit_bias names id 999999"),
        ([PAIR, "hi", "--stop", ""], b"", "an empty stop string"),
        ([PAIR, "hi", "--stop-id", "-4"], b"", "stop_ids holds -4"),
        ([PAIR, "hi", "--stop-id", "999999"], b"", "stop_ids holds 999999"),
        ([PAIR, "hi", "--max-new-tokens", "0"], b"", "max_new_tokens is 0"),
        ([PAIR, "hi", "--max-new-tokens", "1000000000000000000000"], b"", "above the target's"),
        ([PAIR, "hi", "--min-new-tokens", "300"], b"", "min_new_tokens is 300"),
        ([PAIR, "hi", "--seed", "-1"], b"", "seed is -1"),
        ([PAIR, "hi", "--logprobs", "3"], b"", "add --json"),
        ([PAIR, "hi", "--logprobs", "-3", "--json"], b"", "num_logprobs is -3"),
        ([PAIR, "hi", "--dtype", "int4"], b"", "dtype is 'int4'"),
        ([PAIR, "hi", "--device", "tpu"], b"", "device is 'tpu'"),
        ([PAIR, "hi", "--threads", "0"], b"", "--threads is 0"),
        ([PAIR, "hi", "--threads", "99999999999999"], b"", "--threads is 99999999999999"),
        ([PAIR, "hi", "--compare", "--json"], b"", "drop --no-draft and --json"),
        ([PAIR, "hi", "--raw", "--system", "x"], b"", "--system has no place"),
        ([PAIR, "hi", "--prompts", "-"], b"{}", "a prompt and --prompts"),
        ([PAIR, "--prompts", "nowhere.jsonl"], b"", "--prompts 'nowhere.jsonl': No such file"),
        ([PAIR, "--prompts", "x" * 5000], b"", "--prompts 'xxx.*File name too long"),
        ([PAIR, "--prompts", "."], b"", "--prompts '.': Is a directory"),
        ([PAIR, "--prompts", "-"], b"", "prompt file is empty"),
        ([PAIR, "--prompts", "-"], b"\n \n", "prompt file is empty"),
        ([PAIR, "--prompts", "-"], b'{"prompt": "\xff"}', "--prompts -: not UTF-8 text"),
        ([PAIR, "--prompts", "-"], b'{"prompt": "a"}\n{"promt": "b"}', "line 2: unknown key 'promt'.*'prompt'"),
        ([PAIR, "--prompts", "-"], b'{"prompt": "a"', "line 1 is not valid JSON"),
        ([PAIR, "--prompts", "-"], b"[" * 200_000, "line 1 is not valid JSON"),
        ([PAIR, "--prompts", "-"], b'{"prompt": ' + b"9" * 9000 + b"}", "line 1"),
        ([PAIR, "--prompts", "-"], b'{"prompt": "  "}', "line 1: the prompt is empty"),
        ([PAIR, "--prompts", "-"], b'{"messages": []}', "line 1: messages is empty"),
        ([PAIR, "--prompts", "-", "--raw"], b'{"messages": [{"role": "user", "content": "a"}]}', "drop --raw"),
        (
            [PAIR, "--prompts", "-", "--system", "x"],
            b'{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}]}',
            "system message of its own",
        ),
        (
            [PAIR, "--prompts", "-", "--max-new-tokens", "9"],
            b'{"prompt": "a"}\n{"prompt": "' + b"fox " * 400 + b'"}',
            f"above the target's {MAX_LENGTH} positions",
        ),
        (["hi", "--target", "nowhere/at/all"], b"x", "target 'nowhere/at/all': no such folder"),
        (["--target", "some/where"], b"x", "--target needs its draft"),
        (["--no-draft", "--target", "nowhere/at/all", "hi"], b"", "target 'nowhere/at/all': no such folder"),
        (["--no-draft", "--width", "3", "hi"], b"", "width is 3 while speculation is off"),
        (["--no-draft", "--compare", "hi"], b"", "drop --no-draft"),
        (["--no-draft", "--min-confidence", "0.5", "hi"], b"", "min_confidence is 0.5 while speculation is off"),
        ([PAIR, "--min-confidence", "0.5", "hi"], b"", "no confidence head"),
        (["--min-confidence", "2", "hi"], b"", "min_confidence is 2"),
    ],
)
def test_generate_refuses_in_one_line(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], stdin: bytes, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for a in arguments for word in (tiny_pair.arguments if a is PAIR else [a])]
    assert_says(run_cli("generate", *words, stdin=stdin).refusal, says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect"], "DRAFT"),
        (["inspect", "nowhere"], "draft 'nowhere': no such folder"),
        (["inspect", "TARGET"], "LlamaForCausalLM"),
        (["inspect", "DRAFT", "--target", "DRAFT"], "describes a draft"),
        (["inspect", "DRAFT", "--target", "nowhere"], "target 'nowhere': no such folder"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["pull", "a"], "no ready pair 'a'"),
        (["serv"], "No such command 'serv'"),
        (["--verbose"], "--verbose"),
    ],
)
def test_other_commands_refuse_in_one_line(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"TARGET": str(tiny_pair.target), "DRAFT": str(tiny_pair.draft)}
    assert_says(run_cli(*(names.get(word, word) for word in arguments)).refusal, says)


def test_a_cache_folder_in_nobody_s_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", "~nobody-of-that-name/cache")
    assert_says(run_cli("generate", "hi").refusal, "BLOCKDRAFT_CACHE is '~nobody-of-that-name/cache'")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ 1 + 'a' }}", "{% for %}", "{{ messages[7].x.y }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails(tiny_pair: TinyPair, tmp_path: Path, template: str) -> None:
    both = copied(tmp_path, tiny_pair)
    (both.target / "chat_template.jinja").write_text(template)
    assert_says(run_cli("generate", *both.arguments, "hi").refusal, "chat template refuses these messages")


def test_a_tokenizer_of_another_target(tiny_pair: TinyPair, tmp_path: Path) -> None:
    both = copied(tmp_path, tiny_pair)
    raw = json.loads((both.target / "tokenizer.json").read_text("utf-8"))
    token, old = max(raw["model"]["vocab"].items(), key=lambda item: item[1])
    raw["model"]["vocab"][token] = old + 1000
    text = {"content": "zzz", "id": old + 2000, "special": True}
    raw["added_tokens"].append({**raw["added_tokens"][0], **text})
    (both.target / "tokenizer.json").write_text(json.dumps(raw))
    ran = run_cli("generate", *both.arguments, "zzz", "--raw")
    assert_says(ran.refusal, "prompt_ids holds .*use the target's tokenizer")


def in_a_process(*arguments: str | Path, **environment: str) -> str:
    command = [sys.executable, "-m", "blockdraft.cli", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("blockdraft: "), done.stderr
    return done.stderr


def test_a_hub_id_that_cannot_be_fetched(tiny_pair: TinyPair, tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert_says(
        in_a_process("inspect", "nobody/nothing", **offline), "draft 'nobody/nothing': no such folder, and the hub"
    )
    words = (tiny_pair.draft, "--target", "nobody/nothing", "hi")
    assert_says(in_a_process("generate", *words, **offline), "target 'nobody/nothing': no such folder, and the hub")


def test_a_pair_that_does_not_fit_in_a_process(tiny_pair: TinyPair, tmp_path: Path) -> None:
    other = write_draft(tmp_path / "draft", draft_config(tiny_pair.facts, vocab_size=99, mask_token_id=MASK_ID))
    message = in_a_process("generate", other, "--target", tiny_pair.target, "hi")
    assert_says(message, "does not fit this target .*the draft is made for 99")
