"""The command: what it prints where, its exit codes, its options; on a tiny pair, most of it in this process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import blockdraft
from blockdraft.cli import app as app_module
from blockdraft.cli import generate as generate_module
from blockdraft.cli.show import painted
from blockdraft.stats import RequestStats
from blockdraft.text import load_tokenizer
from tiny_pair import BLOCK_SIZE, MAX_LENGTH, Ran, TinyPair, run_cli, without_colours

PROMPT = "the quick brown fox"
STATS_FIELDS = {
    "num_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "accepted_histogram",
    "num_emitted_tokens",
    "prefill_s",
    "decode_s",
}


def generate(pair: TinyPair, *arguments: str | Path, stdin: str = "", tokens: int = 12) -> Ran:
    return run_cli("generate", *pair.arguments, *arguments, "--max-new-tokens", str(tokens), stdin=stdin)


def generated(pair: TinyPair, *arguments: str | Path, stdin: str = "", tokens: int = 12) -> list[dict]:
    ran = generate(pair, *arguments, "--json", stdin=stdin, tokens=tokens)
    assert (ran.code, ran.err) == (0, "")
    return ran.json_lines


# --------------------------------------------------------------------------------- the real command, a process


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "blockdraft.cli", *map(str, arguments)]


def test_a_process_prints_the_text_and_one_line_of_numbers(tiny_pair: TinyPair) -> None:
    done = subprocess.run(
        command("generate", *tiny_pair.arguments, PROMPT, "--max-new-tokens", "12"), capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    [completion] = generated(tiny_pair, PROMPT)
    assert done.stdout.decode() == completion["text"] + "\n"
    assert re.fullmatch(
        r"\[12 tokens in \d+ steps, [\d.]+ a step; \d+ of \d+ proposals accepted \(width 5\); "
        r"[\d.]+ tok/s; prefill \d+ ms; length limit\]\n",
        done.stderr.decode(),
    )


def test_colours_on_a_terminal_change_nothing_else(tiny_pair: TinyPair) -> None:
    pty = pytest.importorskip("pty", reason="no pseudo-terminals here")
    own, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    arguments = command("generate", *tiny_pair.arguments, PROMPT, "--max-new-tokens", "12", "--compare")
    process = subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(own, 1 << 16):
            shown += part
    except OSError:  # the end of a terminal that nobody writes to any more
        pass
    assert process.wait(60) == 0
    os.close(own)
    lines = shown.decode().replace("\r\n", "\n")
    [completion] = generated(tiny_pair, PROMPT)
    text = completion["text"] + "\n"
    head, plain, legend, drafted, tail = re.fullmatch(
        r"(--- plain decoding\n)(.*\n)\[12 tokens in 11 steps; .*\]\n"
        r"--- with the draft\n(.*\n)(.*\n)\[12 tokens in .* a step; .*\]\n(--- the same text; .*\n)",
        lines,
        flags=re.DOTALL,
    ).groups()  # type: ignore[union-attr]
    assert (head, plain) == ("--- plain decoding\n", text)
    assert without_colours(legend) == "accepted proposals, the target's own tokens, first token\n"
    assert drafted != text == without_colours(drafted)
    assert "tokens a step" in tail and "\x1b" not in tail


def test_a_closed_pipe_ends_the_command_silently(tiny_pair: TinyPair) -> None:
    arguments = command("generate", *tiny_pair.arguments, PROMPT, "--max-new-tokens", "200")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_inspect_needs_no_torch_and_a_closed_pipe_is_no_fault(tiny_pair: TinyPair) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"sys.argv = ['blockdraft', 'inspect', {str(tiny_pair.draft)!r}, '--target', {str(tiny_pair.target)!r}]\n"
        "from blockdraft.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("pair       fits\n")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, b"")
    process.stderr.close()


def test_an_interrupt_exits_130(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "_engine", interrupt)
    ran = generate(tiny_pair, PROMPT)
    assert (ran.code, ran.out, ran.err) == (130, "", "")


# ------------------------------------------------------------------------------------------ prompts and texts


def test_every_way_to_give_one_prompt_is_the_same(tiny_pair: TinyPair, tmp_path: Path) -> None:
    [expected] = generated(tiny_pair, PROMPT)
    file = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": PROMPT}
    file.write_bytes(
        b"\xef\xbb\xbf"  # a byte order mark, as some editors write one
        + json.dumps({"prompt": PROMPT}).encode()
        + b"\r\n\r\n"
        + json.dumps({"messages": [message]}).encode()
    )
    piped = generated(tiny_pair, stdin=PROMPT + "\n")
    from_file = generated(tiny_pair, "--prompts", file)
    from_stdin = generated(tiny_pair, "--prompts", "-", stdin=json.dumps({"prompt": PROMPT}))
    for found in (*piped, *from_file, *from_stdin):
        assert (found["text"], found["token_ids"]) == (expected["text"], expected["token_ids"])
    assert (len(piped), len(from_file), len(from_stdin)) == (1, 2, 1)
    shown = generate(tiny_pair, "--prompts", file)
    assert shown.out == (expected["text"] + "\n") * 2 and shown.err.count("\n") == 2


def test_a_line_separator_inside_a_prompt_does_not_end_its_line(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one\u2028two\x85three"}\n', encoding="utf-8")
    assert len(generated(tiny_pair, "--prompts", file)) == 1


def test_raw_and_system_change_the_prompt(tiny_pair: TinyPair) -> None:
    texts = [generated(tiny_pair, PROMPT, *more)[0]["token_ids"] for more in ([], ["--raw"], ["--system", "a dog"])]
    assert len({tuple(ids) for ids in texts}) == 3


def test_json_fields(tiny_pair: TinyPair) -> None:
    [found] = generated(tiny_pair, PROMPT)
    assert set(found) == {"text", "token_ids", "finish_reason", "stop", "stats", "speculation"}
    assert found["finish_reason"] == "length" and found["stop"] is None and len(found["token_ids"]) == 12
    assert found["speculation"] == {"enabled": True, "width": BLOCK_SIZE, "reason": None}
    stats = found["stats"]
    assert set(stats) >= STATS_FIELDS
    RequestStats.from_json(stats).check()
    assert stats["num_emitted_tokens"] == 12
    assert stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"]
    assert sum(stats["accepted_histogram"]) <= stats["num_steps"] < 12
    assert stats["prefill_s"] > 0 and stats["decode_s"] > 0


def test_no_width_and_no_draft_changes_the_text(tiny_pair: TinyPair) -> None:
    [expected] = generated(tiny_pair, PROMPT, tokens=40)
    for width in (2, BLOCK_SIZE):
        [found] = generated(tiny_pair, PROMPT, "--width", str(width), tokens=40)
        assert found["token_ids"] == expected["token_ids"] and found["speculation"]["width"] == width
    ran = run_cli(*("generate", "--no-draft", "--target", tiny_pair.target, PROMPT, "--max-new-tokens", "40", "--json"))
    [plain] = ran.json_lines
    assert plain["token_ids"] == expected["token_ids"]
    assert plain["stats"]["num_steps"] == 39 and plain["stats"]["num_draft_tokens"] == 0
    assert plain["speculation"]["enabled"] is False and plain["speculation"]["reason"]


def test_the_default_length_limit_is_what_the_context_leaves(tiny_pair: TinyPair) -> None:
    [found] = run_cli("generate", *tiny_pair.arguments, PROMPT, "--raw", "--json").json_lines
    prompt = load_tokenizer(tiny_pair.target).encode(PROMPT, add_special_tokens=True)
    assert found["finish_reason"] == "length" and len(found["token_ids"]) == MAX_LENGTH - len(prompt)


def test_no_draft_is_not_blamed_in_the_numbers(tiny_pair: TinyPair) -> None:
    ran = run_cli("generate", "--no-draft", "--target", tiny_pair.target, PROMPT, "--max-new-tokens", "5")
    assert re.fullmatch(r"\[5 tokens in 4 steps; [\d.]+ tok/s; prefill \d+ ms; length limit\]\n", ran.err)


def test_compare(tiny_pair: TinyPair) -> None:
    [expected] = generated(tiny_pair, PROMPT)
    ran = generate(tiny_pair, PROMPT, "--compare")
    assert ran.code == 0 and ran.out == (expected["text"] + "\n") * 2
    lines = ran.err.splitlines()
    assert lines[0] == "--- plain decoding" and lines[2] == "--- with the draft" and len(lines) == 5
    assert re.fullmatch(
        r"--- the same text; [\d.]+ tokens a step; [\d.]+ tok/s plain, [\d.]+ with the draft \([\d.]+x\)", lines[4]
    )
    sampled = generate(tiny_pair, PROMPT, "--compare", "--temperature", "2")
    assert sampled.err.splitlines()[4].startswith("--- two samples of one distribution; ")


def test_seeds(tiny_pair: TinyPair) -> None:
    def ids(*more: str) -> list[int]:
        return generated(tiny_pair, PROMPT, "--temperature", "1.5", *more)[0]["token_ids"]

    assert ids("--seed", "7") == ids("--seed", "7") != ids("--seed", "8")
    assert ids() != ids()


def test_logprobs(tiny_pair: TinyPair) -> None:
    [found] = generated(tiny_pair, PROMPT, "--logprobs", "2")
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert found["logprobs"][0]["kind"] == "first"
    for entry in found["logprobs"]:
        assert len(entry["top"]) == 2 and entry["top"][0] == [entry["token_id"], entry["logprob"]]
    assert "logprobs" not in generated(tiny_pair, PROMPT)[0]


def test_stop_strings_and_stop_ids(tiny_pair: TinyPair) -> None:
    [whole] = generated(tiny_pair, PROMPT, tokens=30)
    stop = whole["text"][4:7]
    [cut] = generated(tiny_pair, PROMPT, "--stop", "never there", "--stop", stop, tokens=30)
    assert (cut["finish_reason"], cut["stop"]) == ("stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    chosen = whole["token_ids"][5]
    [at_id] = generated(tiny_pair, PROMPT, "--stop-id", str(chosen), tokens=30)
    end = whole["token_ids"].index(chosen) + 1
    assert at_id["stop"] == chosen and at_id["token_ids"] == whole["token_ids"][:end]
    [later] = generated(tiny_pair, PROMPT, "--stop-id", str(chosen), "--min-new-tokens", "10", tokens=30)
    assert chosen not in later["token_ids"][:9] and len(later["token_ids"]) >= 10


def test_an_answer_is_held_to_a_pattern_or_a_schema(tiny_pair: TinyPair, tmp_path: Path) -> None:
    [found] = generated(tiny_pair, PROMPT, "--regex", "(yes|no), [a-f]{3}", tokens=30)
    assert found["finish_reason"] == "stop" and re.fullmatch("(yes|no), [a-f]{3}", found["text"])
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["é", "日本"]}', encoding="utf-8")
    [found] = generated(tiny_pair, PROMPT, "--json-schema", str(schema), tokens=30)
    assert json.loads(found["text"]) in ("é", "日本")
    for content, arguments, message in (
        ("[1]", ["--json-schema", str(schema)], "the schema is a list; a JSON schema is an object"),
        ("{", ["--json-schema", str(schema)], "is not JSON: Expecting"),
        ('{"not": {}}', ["--json-schema", str(schema)], "keyword 'not' cannot be kept to"),
        ("{}", ["--json-schema", str(schema), "--regex", "a"], "give one of them"),
        ("{}", ["--json-schema", str(tmp_path / "none")], "name a file with a JSON schema"),
        ("{}", ["--regex", "(a"], "unclosed group"),
    ):
        schema.write_text(content, encoding="utf-8")
        assert message in run_cli("generate", *tiny_pair.arguments, PROMPT, *arguments).refusal


def test_a_logit_bias_decides(tiny_pair: TinyPair) -> None:
    [found] = generated(tiny_pair, PROMPT, "--logit-bias", "77=100")
    assert found["token_ids"] == [77] * 12


def test_pieces_keep_their_line_ends_outside_the_colours() -> None:
    assert painted("a\n\n b", "accepted") == "\x1b[32ma\x1b[0m\n\n\x1b[32m b\x1b[0m"
    assert painted("\n ", "bonus") == "\n "


# ----------------------------------------------------------------------------------- inspect, pull, the surface


def test_inspect(tiny_pair: TinyPair) -> None:
    ran = run_cli("inspect", tiny_pair.draft)
    assert ran.code == 0 and ran.err == "" and ran.out.startswith(f"draft      {tiny_pair.draft}\n")
    report = json.loads(run_cli("inspect", tiny_pair.draft, "--target", tiny_pair.target, "--json").out)
    assert report["family"] == "dflash2" and report["pair"]["fits"] is True


def test_pull_knows_one_pair() -> None:
    assert run_cli("pull", "llama").refusal == "no ready pair 'llama'; there is smollm2-135m"


def test_version_and_help() -> None:
    ran = run_cli("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"blockdraft {blockdraft.__version__}\n", "")
    shown = run_cli("--help")
    assert shown == run_cli() and shown.code == 0
    assert all(name in shown.out for name in OPTIONS)


OPTIONS = {
    "generate": [
        "--target",
        "--prompts",
        "--system",
        "--raw",
        "--no-draft",
        "--compare",
        "--width",
        "--block-size",
        "--min-confidence",
        "--max-new-tokens",
        "--min-new-tokens",
        "--temperature",
        "--top-k",
        "--top-p",
        "--min-p",
        "--repetition-penalty",
        "--frequency-penalty",
        "--presence-penalty",
        "--logit-bias",
        "--stop",
        "--json-schema",
        "--regex",
        "--stop-id",
        "--seed",
        "--logprobs",
        "--dtype",
        "--draft-dtype",
        "--device",
        "--device-map",
        "--quantize",
        "--weights",
        "--threads",
        "--json",
        "--trust-remote-code",
        "--allow-mask-is-eos",
        "--tap-stream",
    ],
    "train": [
        "--out",
        "--target",
        "--corpus",
        "--plan",
        "--json",
        "--stop-after",
        "--threads",
        "--no-gates",
        "--tracker",
    ],
    "corpus": ["--out", "--target", "--threads"],
    "inspect": [
        "--target",
        "--block-size",
        "--json",
        "--allow-mask-is-eos",
        "--plan",
        "--gpus",
        "--context",
        "--concurrency",
        "--acceptance",
        "--tp",
        "--price",
        "--kv-bits",
        "--target-gb",
        "--costs",
    ],
    "convert": ["--to", "--target", "--dtype", "--block-size", "--overwrite", "--allow-mask-is-eos"],
    "launch": [
        "--target",
        "--print",
        "--width",
        "--tap-stream",
        "--draft-window",
        "--gpus",
        "--tp",
        "--nodes",
        "--node-rank",
        "--head",
        "--context",
        "--concurrency",
        "--memory-fraction",
        "--host",
        "--port",
        "--block-size",
        "--engine-env",
        "--engine-version",
        "--own-build",
        "--allow-degraded",
        "--allow-mask-is-eos",
        "--floor",
        "--probes",
        "--probe-tokens",
        "--probe-timeout",
        "--startup-timeout",
        "--stop-grace",
        "--check-only",
    ],
    "bench": [
        "--target",
        "--url",
        "--engine",
        "--model",
        "--plain-url",
        "--effort",
        "--table",
        "--sets",
        "--data",
        "--haystack",
        "--lengths",
        "--format",
        "--widths",
        "--sampling",
        "--concurrency",
        "--rate",
        "--limit",
        "--max-new-tokens",
        "--samples",
        "--rounds",
        "--seed",
        "--out",
        "--name",
        "--report",
        "--compare",
        "--replay",
        "--predict",
        "--gpus",
        "--context",
        "--json",
        "--block-size",
        "--dtype",
        "--device",
        "--threads",
        "--trust-remote-code",
        "--allow-mask-is-eos",
        "--tap-stream",
    ],
    "serve": [
        "--target",
        "--config",
        "--speculation",
        "--dtype",
        "--draft-dtype",
        "--device",
        "--device-map",
        "--quantize",
        "--weights",
        "--block-size",
        "--tap-stream",
        "--trust-remote-code",
        "--allow-mask-is-eos",
        "--width",
        "--max-rows",
        "--memory-limit-mib",
        "--prefix-cache-mib",
        "--threads",
        "--host",
        "--port",
        "--model-name",
        "--api-key-file",
        "--cors-origin",
        "--allow-host",
        "--max-queue",
        "--max-body-bytes",
        "--max-n",
        "--max-tokens",
        "--default-max-tokens",
        "--request-timeout-s",
        "--drain-timeout-s",
        "--reply-format",
        "--page",
        "--access-log",
    ],
    "pull": ["--check"],
    "verify": [
        "--target",
        "--url",
        "--engine",
        "--model",
        "--plain-url",
        "--quick",
        "--thorough",
        "--seed",
        "--no-reference",
        "--out",
        "--json",
        "--block-size",
        "--dtype",
        "--device",
        "--threads",
        "--trust-remote-code",
        "--allow-mask-is-eos",
        "--tap-stream",
    ],
}


def test_the_options_are_the_frozen_ones() -> None:
    group = typer.main.get_command(app_module.app)
    found = {
        name: [option for parameter in one.params if parameter.param_type_name == "option" for option in parameter.opts]
        for name, one in group.commands.items()  # type: ignore[attr-defined]
    }
    assert {name: [o for o in options if o != "--help"] for name, options in found.items()} == OPTIONS
    for name in OPTIONS:
        ran = run_cli(name, "--help")
        assert ran.code == 0 and set(re.findall(r"--[a-z][a-z-]*", ran.out)) >= set(OPTIONS[name])


def test_the_command_line_answers_before_torch_is_there() -> None:
    started = time.process_time()
    run_cli("generate", "--help")
    assert time.process_time() - started < 1.0
