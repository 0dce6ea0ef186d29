"""The command line: words -> one library call -> exit code.

Owns options, their help, colours and the summary line. Every rule about what is allowed lives in the library; a
BlockdraftError is printed in one line and exits 2, anything else is our fault and keeps its traceback.
Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from blockdraft import __version__
from blockdraft.errors import BlockdraftError, RequestError, UnavailableError, shown

if TYPE_CHECKING:
    from blockdraft.engine import Completion, Engine, Request

app = typer.Typer(
    name="blockdraft",
    help="Block drafters for speculative decoding: several tokens per step, the target's own text.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COLOURS = {"first": "33", "accepted": "32", "bonus": "33"}
LEGEND = "\x1b[32maccepted proposals\x1b[0m and \x1b[33mthe target's own tokens\x1b[0m"
DEFAULT_NEW_TOKENS = 256
MAX_THREADS = 1024
# typer does not export the base of everything it says about a wrong command line; its child it does.
UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point of the `blockdraft` command."""
    _prepare_process()
    gc.disable()  # until the pair is loaded: nothing made on the way is garbage, and looking for it costs a tenth
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="blockdraft", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "blockdraft"
        raise SystemExit(_refused(f"{error.format_message().rstrip('.')}; see {command} --help")) from None
    except BlockdraftError as error:
        raise SystemExit(_refused(str(error))) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        raise SystemExit(141) from None
    except SystemExit:  # typer's answer to a closed pipe, and to nothing else in this mode
        raise SystemExit(141) from None
    finally:
        gc.enable()
    raise SystemExit(code or 0)


def _prepare_process() -> None:
    """Leave stderr to our own lines, and let no character that a terminal lacks end the program."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _refused(message: str) -> int:
    print(f"blockdraft: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_version(value: bool) -> None:
    if value:
        print(f"blockdraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


# ---- generate ----------------------------------------------------------------------------------------------------
@app.command()
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
    width: Annotated[int | None, typer.Option(help="Block width (anchor + proposals), 2 to the trained one.")] = None,
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
    stop_id: Annotated[list[int] | None, typer.Option(help="Stop id instead of the target's; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities and the N likeliest.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a target brings.")
    ] = False,
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
        "width": width,
        "speculate": False if no_draft else None if width is None else True,
    }
    Request(prompt_ids=(0,), **settings)  # what is wrong with the options is said before anything is loaded
    asked = _read_prompts(prompt, prompts, system, raw)
    engine = _engine(draft, target, dtype, device, threads, no_draft, trust_remote_code)
    requests = [_request(engine, item, settings, may_shorten=max_new_tokens is None) for item in asked]
    for request in requests:
        engine.check(request)
    if as_json:
        for completion in engine.run(requests):
            print(json.dumps(_as_json(completion), ensure_ascii=False), flush=True)
    elif compare:
        _compare(engine, requests)
    else:
        for number, request in enumerate(requests):
            _watch(engine, request, explain=number == 0)


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
    from blockdraft.text import parse_chat_jsonl

    if prompts is not None:
        # Not splitlines(): JSON strings may hold other line separators as they are.
        items = parse_chat_jsonl(_read_text(prompts, "--prompts").split("\n"))
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


def _read_text(path: Path, what: str) -> str:
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
        raise RequestError(
            f"{what} {shown(path)}: {error.strerror or error}; name a JSONL file, or - for stdin"
        ) from None


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


def _engine(
    draft: str | None,
    target: str | None,
    dtype: str,
    device: str,
    threads: int | None,
    no_draft: bool,
    trust_remote_code: bool,
) -> Engine:
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise RequestError(f"--threads is {threads}; it must be from 1 to {MAX_THREADS}")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    from blockdraft.engine import load

    engine = load(
        draft,
        target,
        dtype=dtype,
        device=device,
        speculation="off" if no_draft else "required",
        trust_remote_code=trust_remote_code,
        progress=_note,
    )
    gc.freeze()
    gc.enable()
    return engine


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


# ---- showing -----------------------------------------------------------------------------------------------------
def _watch(engine: Engine, request: Request, *, explain: bool) -> Completion:
    """Print the text as it is committed, then one line of numbers on stderr. `explain`: name the colours first."""
    ticket = engine.submit(request)
    speculates = engine.draft is not None and request.speculate is not False
    coloured = speculates and _has_colours(sys.stdout)
    if coloured and explain and _has_colours(sys.stderr):
        _note(LEGEND)
    for events in engine.follow(ticket):
        for event in events:
            if event.text:
                print(_painted(event.text, event.kind) if coloured else event.text, end="", flush=True)
    print(flush=True)
    completion = ticket.completion
    assert completion is not None
    _note(f"[{_summary(completion, is_plain_wanted=request.speculate is False)}]")
    return completion


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _painted(text: str, kind: str) -> str:
    """The text in its colour, line by line: no colour reaches over a line end."""
    return "\n".join(f"\x1b[{COLOURS[kind]}m{part}\x1b[0m" if part.strip() else part for part in text.split("\n"))


def _summary(completion: Completion, *, is_plain_wanted: bool) -> str:
    from blockdraft.stats import committed_acceptance_length, decode_tok_per_s

    stats, speculation = completion.stats, completion.speculation
    parts = [f"{stats.num_emitted_tokens} tokens in {stats.num_steps} steps"]
    if speculation.enabled or stats.num_draft_tokens:
        per_step = committed_acceptance_length([stats])
        if per_step is not None:
            parts[0] += f", {per_step:.2f} a step"
        used = f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} proposals accepted"
        parts.append(used if speculation.width is None else f"{used} (width {speculation.width})")
    speed = decode_tok_per_s([stats])
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    parts.append(f"prefill {stats.prefill_s * 1000:.0f} ms")
    if not speculation.enabled and not is_plain_wanted:
        parts.append(f"no draft: {speculation.reason}")
    if completion.finish_reason == "length":
        parts.append("length limit")
    return "; ".join(parts)


def _compare(engine: Engine, requests: list[Request]) -> None:
    from blockdraft.stats import committed_acceptance_length, decode_tok_per_s

    plain, drafted = [], []
    for number, request in enumerate(requests):
        _note("--- plain decoding")
        plain.append(_watch(engine, replace(request, speculate=False, width=None), explain=False))
        _note("--- with the draft")
        drafted.append(_watch(engine, replace(request, speculate=True), explain=number == 0))
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    is_greedy = requests[0].sampling.is_greedy
    if not is_greedy:
        verdict = "two samples of one distribution"
    elif same == len(requests):
        verdict = "the same text"
    else:
        verdict = f"the same text for {same} of {len(requests)} prompts"
    rates = [decode_tok_per_s([c.stats for c in side]) for side in (plain, drafted)]
    steps = committed_acceptance_length([c.stats for c in drafted])
    if steps is not None and rates[0] and rates[1]:
        ratio = rates[1] / rates[0]
        verdict += f"; {steps:.2f} tokens a step; {rates[0]:.1f} tok/s plain, {rates[1]:.1f} with the draft"
        verdict += f" ({ratio:.2f}x)"
    _note(f"--- {verdict}")
    if is_greedy and same < len(requests):
        _note("    greedy texts part where two tokens are equal up to rounding; --dtype float64 is the judge")


def _as_json(completion: Completion) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "stats": completion.stats.to_json(),
        "speculation": {
            "enabled": completion.speculation.enabled,
            "width": completion.speculation.width,
            "reason": completion.speculation.reason,
        },
    }
    if any(event.logprobs is not None for event in completion.events):
        shown["logprobs"] = [
            {
                "token_id": event.token_id,
                "kind": event.kind,
                "logprob": event.logprobs.logprob,
                "top": [list(pair) for pair in event.logprobs.top],
            }
            for event in completion.events
            if event.logprobs is not None
        ]
    return shown


# ---- inspect and pull --------------------------------------------------------------------------------------------
@app.command()
def inspect(
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Folder, config.json or hub id of a draft.")],
    target: Annotated[str | None, typer.Option(help="Target: folder, config.json or hub id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """What is this checkpoint, does it fit the target, what will it cost. Needs no torch, reads no weights."""
    from blockdraft.formats.source import locate
    from blockdraft.inspection import inspect_checkpoint, render_text

    found = locate(draft, what="draft", config_only=True)
    pair = None if target is None else locate(target, what="target", config_only=True)
    report = inspect_checkpoint(found, pair)
    print(json.dumps(report, indent=1) if as_json else render_text(report), end="\n" if as_json else "")


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pair to fetch.")] = "smollm2-135m",
) -> None:
    """Fetch a ready pair: check it, convert it once, and say where it is."""
    if name != "smollm2-135m":
        raise UnavailableError(f"no ready pair {shown(name)}; there is smollm2-135m")
    from blockdraft.engine.load import builtin_draft
    from blockdraft.targets.smollm2 import ensure_target

    print(f"target {ensure_target(progress=_note)}")
    print(f"draft  {builtin_draft()}")


if __name__ == "__main__":
    main()
