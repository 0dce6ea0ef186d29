"""`blockdraft generate`: its options, and the prompts it reads.

Knows words and files; what a setting means is the library's.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.options import AllowMaskIsEos, BlockSize, TapStreamToRead, Threads, TrustRemoteCode
from blockdraft.cli.show import FetchProgress, as_json_object, compare_ways, note, watch
from blockdraft.errors import RequestError, shown

if TYPE_CHECKING:
    from blockdraft.engine import Engine, Request
    from blockdraft.text import Grammar, Prompt

DEFAULT_NEW_TOKENS = 256
MAX_THREADS = 1024


def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DRAFT] [PROMPT]", help="A draft (with --target) and a prompt; no prompt reads stdin."),
    ] = None,
    target: Annotated[str | None, typer.Option(help="Target: folder or hub id. Without it, the built-in pair.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSONL file, a {"prompt": ...} or {"messages": [...]} per line; - is stdin.'),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Plain first, then with the draft; same text?")] = False,
    width: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Block width (anchor + proposals): 2 to the trained one, which is the default, with the same steps at"
            " every run; auto is the fastest at every moment, plain steps included (steps are timed once, for 3 s).",
        ),
    ] = None,
    block_size: BlockSize = None,
    min_confidence: Annotated[
        float, typer.Option(help="End a block where the draft expects less acceptance (confidence head); 0 never.")
    ] = 0.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Length limit in tokens; without it 256, or what the context leaves.")
    ] = None,
    min_new_tokens: Annotated[int, typer.Option(help="No stop before so many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least probability relative to the likeliest token.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Over prompt and text; 1 is off.")] = 1.0,
    frequency_penalty: Annotated[float, typer.Option(help="Per occurrence in the text; 0 is off.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="For tokens that occur in the text; 0 is off.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS; may be repeated.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer is JSON that fits this schema (extra serve).")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="The answer matches this pattern as a whole (extra serve).")
    ] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="Stop id instead of the target's; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities and the N likeliest.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, float64, or auto: each half as it is stored.")
    ] = "float32",
    draft_dtype: Annotated[str | None, typer.Option(help="The draft's own, where it is not --dtype.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    device_map: Annotated[
        str | None,
        typer.Option(help='The target over several devices: auto, balanced, sequential, or JSON {"module": device}.'),
    ] = None,
    quantize: Annotated[
        str | None, typer.Option(help="int8 or nf4: the target's weights, while they are read (bitsandbytes).")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="int8: round the target's weights to 8 bits on the CPU. Faster; the text is that target's."),
    ] = None,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
    tap_stream: TapStreamToRead = None,
) -> None:
    """Watch tokens arrive, coloured by how they were won."""
    from blockdraft.accept import SamplingParams
    from blockdraft.engine import Request

    draft, prompt = _draft_and_prompt(words or [], target, no_draft, prompts)
    if compare and (no_draft or as_json):
        raise RequestError("--compare runs both ways and prints text; drop --no-draft and --json")
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs is shown in JSON only; add --json")
    if raw and system is not None:
        raise RequestError("--raw has no chat template, so --system has no place; drop one of the two")
    is_auto, fixed_width = _width(width)
    if is_auto and no_draft:
        raise RequestError("--width auto chooses among widths of a draft, and --no-draft takes none; drop one of them")
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=_biases(logit_bias or []),
    )
    settings: dict[str, Any] = {
        "max_new_tokens": DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "sampling": sampling,
        "stop_ids": frozenset(stop_id) if stop_id else None,
        "stop_strings": tuple(stop or ()),
        "seed": seed,
        "num_logprobs": logprobs,
        "width": fixed_width,
        "min_confidence": min_confidence,
        "grammar": _grammar(json_schema, regex),
        "speculate": False if no_draft else None if fixed_width is None and not min_confidence else True,
    }
    Request(prompt_ids=(0,), **settings)  # what is wrong with the options is said before anything is loaded
    asked = _read_prompts(prompt, prompts, system, raw)
    engine = _engine(
        draft,
        target,
        threads,
        dtype=dtype,
        draft_dtype=draft_dtype,
        device=device,
        device_map=_device_map(device_map),
        quantize=quantize,
        weights=weights,
        speculation="off" if no_draft else "required",
        trust_remote_code=trust_remote_code,
        allow_mask_is_eos=allow_mask_is_eos,
        block_size=block_size,
        tap_stream=tap_stream,
        width="adaptive" if is_auto else None,
    )
    requests = [_request(engine, item, settings, may_shorten=max_new_tokens is None) for item in asked]
    for request in requests:
        engine.check(request)
    _run(engine, requests, as_json=as_json, compare=compare)


def _run(engine: Engine, requests: list[Request], *, as_json: bool, compare: bool) -> None:
    from blockdraft.engine.adaptive import AdaptiveWidth

    if as_json:
        for completion in engine.run(requests):
            print(json.dumps(as_json_object(completion), ensure_ascii=False), flush=True)
    elif compare:
        compare_ways(engine, requests)
    else:
        for number, request in enumerate(requests):
            watch(engine, request, explain=number == 0)
    if isinstance(engine.width_policy, AdaptiveWidth):
        note(f"width auto: {engine.width_policy.report()}")


@dataclass(frozen=True)
class _Asked:
    """A prompt as given: a raw text, or messages for the chat template."""

    text: str | None
    messages: list[dict[str, str]] | None


def _draft_and_prompt(
    words: list[str], target: str | None, no_draft: bool, prompts: Path | None
) -> tuple[str | None, str | None]:
    if len(words) > 2:
        raise RequestError(f"{len(words)} words given; quote the prompt, and name at most one draft before it")
    names_draft = target is not None and not no_draft
    draft = words.pop(0) if words and names_draft else None
    if names_draft and draft is None:
        raise RequestError("--target needs its draft before the prompt, or --no-draft for plain decoding")
    if len(words) == 2:
        raise RequestError(
            "a draft needs --target, and --no-draft takes none; quote the prompt if the two words are one prompt"
        )
    if words and prompts is not None:
        raise RequestError("a prompt and --prompts were given; give one of them")
    if draft is not None and not words and prompts is None and sys.stdin.isatty():
        raise RequestError(
            f"no prompt: with --target the first word, {shown(draft)}, names the draft; give the prompt after it"
        )
    return draft, words[0] if words else None


def _read_prompts(prompt: str | None, prompts: Path | None, system: str | None, raw: bool) -> list[_Asked]:
    if prompts is not None:
        items = read_prompt_file(prompts)
        if raw:
            if any(item.text is None for item in items):
                raise RequestError('--raw continues plain text; use "prompt" lines, or drop --raw')
            return [_Asked(item.text, None) for item in items]
        return [_Asked(None, _with_system(item.as_messages(), system)) for item in items]
    if prompt is None:
        if sys.stdin.isatty():
            raise RequestError("no prompt; give one in quotes, pipe one in, or use --prompts FILE")
        prompt = _read_text(Path("-"), "the prompt").strip("\n")
    if not prompt.strip():
        raise RequestError("the prompt is empty; give some text")
    if raw:
        return [_Asked(prompt, None)]
    return [_Asked(None, _with_system([{"role": "user", "content": prompt}], system))]


def read_prompt_file(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file (- is stdin), one per line."""
    from blockdraft.text import parse_chat_jsonl

    # Not splitlines(): JSON strings may hold other line separators as they are.
    return parse_chat_jsonl(_read_text(path, "--prompts").split("\n"))


def _read_text(path: Path, what: str, wanted: str = "a JSONL file, or - for stdin") -> str:
    """The text of a file, of stdin for "-"; without a byte order mark."""
    try:
        if str(path) == "-":
            source = getattr(sys.stdin, "buffer", None)
            return sys.stdin.read() if source is None else source.read().decode("utf-8-sig")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{what} {path}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise RequestError(f"{what} {shown(path)}: {error.strerror or error}; name {wanted}") from None


def _with_system(messages: list[dict[str, str]], system: str | None) -> list[dict[str, str]]:
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise RequestError("the prompt has a system message of its own; drop --system")
    return [{"role": "system", "content": system}, *messages]


def _biases(words: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            token_id, bias = int(name), float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {shown(word)}: give ID=BIAS, such as 42=-1.5") from None
        if token_id in biases:
            raise RequestError(f"--logit-bias names id {token_id} twice; give one of the two")
        biases[token_id] = bias
    return biases


def _width(words: str | None) -> tuple[bool, int | None]:
    """(whether --width is auto, the number that it is otherwise)."""
    if words is None or words == "auto":
        return words is not None, None
    try:
        return False, int(words)
    except ValueError:
        raise RequestError(f"--width is {shown(words)}; give a number from 2 to the trained width, or auto") from None


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """What --json-schema or --regex holds the answer to."""
    from blockdraft.text import Grammar

    if json_schema is not None and regex is not None:
        raise RequestError("--json-schema and --regex were given; give one of them")
    if regex is not None:
        return Grammar.regex(regex)
    if json_schema is None:
        return None
    text = _read_text(json_schema, "--json-schema", "a file with a JSON schema")
    try:
        return Grammar.json_schema(json.loads(text))
    except ValueError as error:
        raise RequestError(f"--json-schema {shown(json_schema)} is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"--json-schema {shown(json_schema)} is not JSON: it is nested too deeply") from None


def _device_map(words: str | None) -> Any:
    """The device map that --device-map names or spells out as JSON."""
    if words is None or not words.lstrip().startswith("{"):
        return words
    try:
        return json.loads(words)
    except ValueError as error:
        raise RequestError(f"--device-map {shown(words)} is not JSON ({error}); give a name or an object") from None


def _engine(draft: str | None, target: str | None, threads: int | None, **settings: Any) -> Engine:
    set_threads(threads)
    from blockdraft.engine import load

    fetching = FetchProgress()
    try:
        engine = load(draft, target, progress=fetching, **settings)
    finally:
        fetching.close()
    if engine.tap_choice is not None:
        note(str(engine.tap_choice))
    gc.freeze()
    gc.enable()
    return engine


def _request(engine: Engine, asked: _Asked, settings: dict[str, Any], *, may_shorten: bool) -> Request:
    from blockdraft.engine import Request

    assert engine.tokenizer is not None
    if asked.messages is not None:
        ids = engine.tokenizer.chat_ids(asked.messages, add_generation_prompt=True)
    else:
        ids = engine.tokenizer.encode(asked.text or "", add_special_tokens=True)
    request = Request(prompt_ids=ids, **settings)
    room = engine.target.facts.max_length - len(ids)
    least = max(1, request.min_new_tokens)
    if may_shorten and least <= room < request.max_new_tokens:
        request = replace(request, max_new_tokens=room)
    return request


def set_threads(threads: int | None) -> None:
    """Set torch's CPU threads; None leaves them as they are."""
    if threads is None:
        return
    if not 1 <= threads <= MAX_THREADS:
        raise RequestError(f"--threads is {threads}; it must be from 1 to {MAX_THREADS}")
    import torch

    torch.set_num_threads(threads)
