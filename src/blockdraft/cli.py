"""The command line: words -> one library call -> exit code.

Owns options, their help, colours and the summary line. Every rule about what is allowed lives in the library; a
BlockdraftError is printed in one line and exits 2, anything else is our fault and keeps its traceback.
Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from blockdraft import __version__
from blockdraft.errors import BlockdraftError, RequestError, UnavailableError

if TYPE_CHECKING:
    from blockdraft.engine import Completion, Engine, Request

app = typer.Typer(
    name="blockdraft",
    help="Block drafters for speculative decoding: several tokens per step, the target's own text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COLOURS = {"first": "36", "accepted": "32", "bonus": "33"}
MEANINGS = {"first": "first token", "accepted": "accepted proposal", "bonus": "the target's own"}


def main() -> None:
    """Entry point of the `blockdraft` command."""
    try:
        app()
    except BlockdraftError as error:
        print(f"blockdraft: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _show_version(value: bool) -> None:
    if value:
        print(f"blockdraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# ---- generate ------------------------------------------------------------------------------------------------------------
@app.command()
def generate(
    words: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[DRAFT] [PROMPT]", help="A draft (with --target) and a prompt; no prompt reads stdin."),
    ] = None,
    target: Annotated[Optional[str], typer.Option(help="Target: folder or hub id. Without it, the built-in pair.")] = None,
    prompts: Annotated[
        Optional[Path], typer.Option(help='JSONL file, a {"prompt": ...} or {"messages": [...]} per line; - is stdin.')
    ] = None,
    system: Annotated[Optional[str], typer.Option(help="System message of the chat.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")] = False,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Plain first, then with the draft; same text?")] = False,
    width: Annotated[Optional[int], typer.Option(help="Block width (anchor + proposals), 2 to the trained one.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length limit in tokens.")] = 256,
    min_new_tokens: Annotated[int, typer.Option(help="No stop before so many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[Optional[int], typer.Option(help="Sample among so many tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Least probability relative to the likeliest token.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Over prompt and text; 1 is off.")] = 1.0,
    frequency_penalty: Annotated[float, typer.Option(help="Per occurrence in the text; 0 is off.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="For tokens that occur in the text; 0 is off.")] = 0.0,
    logit_bias: Annotated[Optional[list[str]], typer.Option(help="ID=BIAS; may be repeated.")] = None,
    stop: Annotated[Optional[list[str]], typer.Option(help="Stop string; may be repeated.")] = None,
    stop_id: Annotated[Optional[list[int]], typer.Option(help="Stop id instead of the target's; may be repeated.")] = None,
    seed: Annotated[Optional[int], typer.Option(help="Same seed, same tokens.")] = None,
    logprobs: Annotated[Optional[int], typer.Option(help="With --json: log-probabilities and the N likeliest.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Annotated[Optional[int], typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code that a target brings.")] = False,
) -> None:
    """Watch tokens arrive, coloured by how they were won."""
    from blockdraft.accept import SamplingParams

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
    asked = _read_prompts(prompt, prompts, system, raw)
    settings = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "sampling": sampling,
        "stop_ids": None if not stop_id else frozenset(stop_id),
        "stop_strings": tuple(stop or ()),
        "seed": seed,
        "num_logprobs": logprobs,
        "width": width,
        "speculate": None if width is None and not no_draft else not no_draft,
    }
    engine = _engine(draft, target, dtype, device, threads, no_draft, trust_remote_code)
    requests = [_request(engine, item, settings) for item in asked]
    if as_json:
        for completion in engine.run(requests):
            print(json.dumps(_as_json(completion), ensure_ascii=False), flush=True)
    elif compare:
        _compare(engine, requests)
    else:
        for request in requests:
            _watch(engine, request)


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
    return draft, words[0] if words else None


def _read_prompts(prompt: str | None, prompts: Path | None, system: str | None, raw: bool) -> list[_Asked]:
    from blockdraft.text import parse_chat_jsonl

    if prompts is not None:
        if str(prompts) != "-" and not prompts.is_file():
            raise RequestError(f"--prompts {prompts}: no such file; name a JSONL file, or - for stdin")
        try:
            text = sys.stdin.read() if str(prompts) == "-" else prompts.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"--prompts {prompts}: not UTF-8 text ({error.reason}); save it as UTF-8") from None
        items = parse_chat_jsonl(text.splitlines())
        if raw:
            if any(item.text is None for item in items):
                raise RequestError('--raw continues plain text; use "prompt" lines, or drop --raw')
            return [_Asked(item.text, None) for item in items]
        return [_Asked(None, _with_system(item.as_messages(), system)) for item in items]
    if prompt is None:
        if sys.stdin.isatty():
            raise RequestError("no prompt; give one in quotes, pipe one in, or use --prompts FILE")
        prompt = sys.stdin.read().strip("\n")
    if not prompt.strip():
        raise RequestError("the prompt is empty; give some text")
    if raw:
        return [_Asked(prompt, None)]
    return [_Asked(None, _with_system([{"role": "user", "content": prompt}], system))]


def _with_system(messages: list[dict[str, str]], system: str | None) -> list[dict[str, str]]:
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise RequestError("the prompt has a system message of its own; drop --system")
    return [{"role": "system", "content": system}, *messages]


def _biases(words: list[str]) -> dict[int, float]:
    biases = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            biases[int(name)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {word}: give ID=BIAS, such as 42=-1.5") from None
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
    if threads is not None:
        if threads < 1:
            raise RequestError(f"--threads is {threads}; it must be at least 1")
        import torch

        torch.set_num_threads(threads)
    from blockdraft.engine import load

    return load(
        draft,
        target,
        dtype=dtype,
        device=device,
        speculation="off" if no_draft else "required",
        trust_remote_code=trust_remote_code,
        progress=_note,
    )


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _request(engine: Engine, asked: _Asked, settings: dict[str, Any]) -> Request:
    from blockdraft.engine import Request

    assert engine.tokenizer is not None
    if asked.messages is not None:
        ids = engine.tokenizer.chat_ids(asked.messages, add_generation_prompt=True)
    else:
        ids = engine.tokenizer.encode(asked.text or "", add_special_tokens=True)
    return Request(prompt_ids=ids, **settings)


# ---- showing ---------------------------------------------------------------------------------------------------------------
def _watch(engine: Engine, request: Request) -> Completion:
    """Print the text as it is committed, then one line of numbers on stderr."""
    colour = sys.stdout.isatty()
    ticket = engine.submit(request)
    for events in engine.follow(ticket):
        for event in events:
            if event.text:
                print(_painted(event.text, event.kind) if colour else event.text, end="", flush=True)
    print(flush=True)
    completion = ticket.completion
    assert completion is not None
    legend = "  ".join(_painted(MEANINGS[kind], kind) for kind in COLOURS) if colour else ""
    _note(f"[{_summary(completion)}]" + (f"  {legend}" if legend else ""))
    return completion


def _painted(text: str, kind: str) -> str:
    return "".join(f"\x1b[{COLOURS[kind]}m{part}\x1b[0m" if part.strip() else part for part in _lines(text))


def _lines(text: str) -> Iterator[str]:
    yield from text.splitlines(keepends=True)


def _summary(completion: Completion) -> str:
    from blockdraft.stats import committed_acceptance_length, decode_tok_per_s

    stats = completion.stats
    per_step = committed_acceptance_length([stats])
    speed = decode_tok_per_s([stats])
    parts = [f"{stats.num_emitted_tokens} tokens in {stats.num_steps} steps"]
    if per_step is not None:
        parts.append(f"{per_step:.2f} tokens per step")
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    parts.append(f"prefill {stats.prefill_s * 1000:.0f} ms")
    if completion.speculation.reason is not None:
        parts.append(f"no speculation: {completion.speculation.reason}")
    else:
        parts.append(f"width {completion.speculation.width}, {stats.num_accepted_draft_tokens} of "
                     f"{stats.num_draft_tokens} proposals accepted")  # fmt: skip
    return ", ".join(parts) + f", {completion.finish_reason}"


def _compare(engine: Engine, requests: list[Request]) -> None:
    from blockdraft.stats import committed_acceptance_length, decode_tok_per_s

    plain, drafted = [], []
    for request in requests:
        _note("--- plain decoding")
        plain.append(_watch(engine, replace(request, speculate=False, width=None)))
        _note("--- with the draft")
        drafted.append(_watch(engine, replace(request, speculate=True)))
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    rates = [decode_tok_per_s([c.stats for c in side]) for side in (plain, drafted)]
    steps = committed_acceptance_length([c.stats for c in drafted])
    verdict = "the same text" if same == len(requests) else f"the same text for {same} of {len(requests)} prompts"
    line = f"--- {verdict}"
    if steps is not None and rates[0] and rates[1]:
        line += f"; {steps:.2f} tokens per step; {rates[0]:.1f} tok/s plain, {rates[1]:.1f} tok/s with the draft"
        line += f" ({rates[1] / rates[0]:.2f}x)"
    _note(line)
    if requests[0].sampling.is_greedy and same < len(requests):
        _note("    greedy texts part where two tokens are equally likely up to rounding; float64 is the judge")


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


# ---- inspect and pull --------------------------------------------------------------------------------------------------------
@app.command()
def inspect(
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Folder, config.json or hub id of a draft.")],
    target: Annotated[Optional[str], typer.Option(help="Target: folder, config.json or hub id.")] = None,
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
        raise UnavailableError(f"no ready pair {name!r}; there is smollm2-135m")
    from blockdraft.engine.load import builtin_draft
    from blockdraft.targets.smollm2 import ensure_target

    print(f"target {ensure_target(progress=_note)}")
    print(f"draft  {builtin_draft()}")


if __name__ == "__main__":
    main()
