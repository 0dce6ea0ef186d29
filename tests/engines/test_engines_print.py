"""`launch --print`: whole commands against golden files, and what is refused before anything could start."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pairs import PAIRS, Pair, prepared, serve_hub, write_pair

from blockdraft.engines import ENGINES, render
from blockdraft.engines.command import Word
from blockdraft.errors import BlockdraftError, ConfigError, PairError, RequestError, UnavailableError

GOLDEN = Path(__file__).parent / "golden"
K3, K31, QWEN = PAIRS["kimi-k3-dflash2"], PAIRS["kimi-k3.1-dflash2-preview"], PAIRS["qwen3.8-27b-dflash2"]
# What the card of lightseekorg/kimi-k3-dflash2 documents, in its order.
K3_CARD = (
    "--speculative-algorithm DFLASH --speculative-num-steps 7 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 8 --speculative-draft-model-quantization unquant "
    "--attention-backend mla --drafter-attention-backend mla --sampling-backend flashinfer"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    places: dict[str, Path] = {}
    for name, pair in PAIRS.items():
        places |= write_pair(pair, tmp_path_factory.mktemp(name))
    return places


@pytest.fixture
def hub(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    serve_hub(monkeypatch, folders)


def printed(engine: str, pair: Pair, **changes: Any) -> str:
    """What golden files hold: the command, or why it is refused and the command of a build that does run it."""
    try:
        launch = prepared(engine, pair, **changes)
    except PairError as error:
        forced = prepared(engine, pair, **changes, is_own_build=True, is_degraded_allowed=True)
        return f"# refused: {error}\n# ---- with --own-build --allow-degraded\n{render(forced.command)}"
    notes = "".join(f"# note: {note}\n" for note in launch.notes)
    return notes + render(launch.command)


def check_golden(name: str, text: str) -> None:
    """Compare, or write them anew where BLOCKDRAFT_WRITE_GOLDEN is set."""
    place = GOLDEN / f"{name}.txt"
    if os.environ.get("BLOCKDRAFT_WRITE_GOLDEN"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    assert place.read_text() == text


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PAIRS)
def test_the_command_of_every_pair(engine: str, name: str) -> None:
    check_golden(f"{engine}/{name}", printed(engine, PAIRS[name]))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("engine", ENGINES)
def test_the_lines_of_two_nodes(engine: str) -> None:
    words = {"num_nodes": 2, "head": "10.0.0.1:25000", "gpus": "8xGB300"}
    lines = []
    for rank in range(2):
        launch = prepared(engine, K3, **words, node_rank=rank, is_own_build=True, is_degraded_allowed=True)
        replaced = launch.engine.nodes.is_replaced(launch.setting)
        lines.append(f"# ---- node {rank}\n{render(launch.command, is_replaced=replaced)}")
    check_golden(f"{engine}/two-nodes", "\n".join(lines))


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PAIRS)
def test_every_word_of_a_command_has_a_reason_and_can_be_pasted(engine: str, name: str) -> None:
    command = prepared(engine, PAIRS[name], is_own_build=True, is_degraded_allowed=True).command
    text = render(command)
    for word in (*command.flags, *command.variables):
        assert f"# {word.name}: {word.why.split()[0]}" in text and word.source
    code = "\n".join(line for line in text.splitlines() if not line.startswith(("#", "export ")))
    assert shlex.split(code.replace("\\\n", " ")) == command.argv


@pytest.mark.usefixtures("hub")
def test_the_line_of_kimi_k3_is_the_documented_one() -> None:
    """Kimi K3 in TokenSpeed, from checkpoint and machine: every flag of the card, with its value, in its order."""
    command = prepared("tokenspeed", K3).command
    card = shlex.split(K3_CARD)
    names = set(card[::2])
    ours = [word for flag in command.flags if flag.name in names for word in flag.words()]
    assert ours == card
    assert command.head == ("tokenspeed", "serve", "moonshotai/Kimi-K3")
    whole = shlex.join(command.argv)
    assert "--tensor-parallel-size 8" in whole and "--max-model-len 65536" in whole
    assert "--max-cudagraph-capture-size 16 --cudagraph-capture-sizes 1 2 4 8 16" in whole


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("width", [5, 8])
def test_kimi_k31_in_sglang_at_both_widths_of_its_card(width: int) -> None:
    launch = prepared("sglang", K31, width=width, is_own_build=True)
    flags = {flag.name: flag.values for flag in launch.command.flags}
    assert flags["--speculative-algorithm"] == ("DFLASH",)
    assert flags["--speculative-num-draft-tokens"] == (str(width),)
    assert flags["--speculative-draft-window-size"] == ("1024",)
    with pytest.raises(PairError, match=r"no DFlash 2 on latent attention.*--own-build"):
        prepared("sglang", K31, width=width)


@pytest.mark.usefixtures("hub")
def test_sglang_taps_the_mixture_so_the_prefix_stream_loses_acceptance_there() -> None:
    with pytest.raises(PairError, match="attention-residual mixture"):
        prepared("sglang", K3, tap_stream="prefix", is_own_build=True)
    assert prepared("sglang", K3, tap_stream="attn_res", is_own_build=True)


@pytest.mark.usefixtures("hub")
def test_vllm_is_told_the_proposals_and_not_the_width() -> None:
    launch = prepared("vllm", QWEN)
    [config] = [flag for flag in launch.command.flags if flag.name == "--speculative-config"]
    assert json.loads(config.values[0]) == {
        "method": "dflash",
        "model": "z-lab/Qwen3.8-27B-DFlash2",
        "num_speculative_tokens": 7,
    }
    assert launch.command.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("stream", "value"), [("prefix", "0"), ("attn_res", "1")])
def test_the_stream_of_kimi_k3_is_said_to_vllm_and_to_tokenspeed(stream: str, value: str) -> None:
    vllm = prepared("vllm", K3, tap_stream=stream, is_own_build=True)
    assert vllm.command.environment["VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"] == value
    other = prepared("tokenspeed", K3, tap_stream=stream)
    assert other.command.environment == {"TOKENSPEED_DFLASH_AUX_STREAM": stream}
    assert prepared("tokenspeed", K3).command.environment == {}


# ---- what the user adds --------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("hub")
def test_unknown_flags_pass_through_in_either_spelling() -> None:
    extra = ("--schedule-policy", "lpm", "--stream_interval=4", "--disable-radix-cache", "--cuda-graph-bs", "1", "2")
    command = prepared("sglang", QWEN, extra=extra).command
    assert command.flags[-4:] == (
        Word("--schedule-policy", ("lpm",), "yours", None),
        Word("--stream-interval", ("4",), "yours", None),
        Word("--disable-radix-cache", (), "yours", None),
        Word("--cuda-graph-bs", ("1", "2"), "yours", None),
    )


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("engine", "extra", "message"),
    [
        ("sglang", ("--speculative-num-draft-tokens", "6"), "contradicts --speculative-num-draft-tokens 8.*--width"),
        ("sglang", ("--speculative_dflash_block_size=6",), "contradicts --speculative-num-draft-tokens 8"),
        ("sglang", ("--tp", "4"), "contradicts --tp-size 2"),
        ("sglang", ("--speculative-algorithm", "EAGLE3"), "it follows from the pair; leave it out"),
        ("sglang", ("--pp-size", "2"), "one pipeline stage"),
        ("sglang", ("--speculative-num-steps", "3"), "drafted in one step"),
        ("vllm", ("--speculative-config", '{"method": "mtp"}'), "contradicts --speculative-config"),
        ("vllm", ("-tp", "4"), "contradicts --tensor-parallel-size 2"),
        ("vllm", ("--max-model-len", "4096"), "--context"),
        ("tokenspeed", ("--speculative-config", "{}"), "counts num_speculative_tokens as the width"),
        ("tokenspeed", ("--headless",), "nothing to probe"),
        ("tokenspeed", ("--speculative-eagle-topk", "4"), "a chain, no tree"),
        ("vllm", ("7", "--x"), "belongs to no flag"),
    ],
)
def test_what_contradicts_the_pair_is_refused(engine: str, extra: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prepared(engine, QWEN, extra=extra)


@pytest.mark.usefixtures("hub")
def test_the_same_value_is_no_contradiction_and_a_recommendation_gives_way() -> None:
    command = prepared("sglang", QWEN, extra=("--tp", "2", "--speculative-num-steps", "1")).command
    assert [flag.values for flag in command.flags if flag.name == "--tp-size"] == [("2",)]
    command = prepared("tokenspeed", QWEN, extra=("--sampling-backend", "triton")).command
    [word] = [flag for flag in command.flags if flag.name == "--sampling-backend"]
    assert word.values == ("triton",) and "flashinfer would be recommended" in word.why and word.source is None


# ---- what cannot be meant ------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("engine", "changes", "error", "message"),
    [
        ("trtllm", {}, RequestError, "sglang, vllm, tokenspeed"),
        ("sglang", {"width": 9}, RequestError, "2 to 8"),
        ("sglang", {"width": 1}, RequestError, "2 to 8"),
        ("tokenspeed", {"width": 5}, RequestError, "serves this draft at 8 only"),
        ("sglang", {"draft_window": 4}, RequestError, "at least the width"),
        ("vllm", {"draft_window": 512}, RequestError, "from the draft's file"),
        ("sglang", {"gpus": "eightH200"}, RequestError, "8xH200"),
        ("sglang", {"gpus": "8xH200", "num_nodes": 3}, RequestError, "same number"),
        ("sglang", {"num_nodes": 2}, RequestError, "--head HOST:PORT"),
        ("sglang", {"head": "a:1"}, RequestError, "several nodes"),
        ("sglang", {"num_nodes": 2, "head": "a:1", "node_rank": 2}, RequestError, "0 to 1"),
        ("sglang", {"num_nodes": 2, "head": "a"}, RequestError, "HOST:PORT"),
        ("sglang", {"tap_stream": "prefix"}, ConfigError, "for a Kimi K3 target only"),
        ("sglang", {"memory_fraction": 1.5}, RequestError, "between 0 and 1"),
        ("sglang", {"context": 0}, RequestError, "--context is 0"),
        ("sglang", {"engine_version": "newest"}, RequestError, "begin with numbers"),
        ("sglang", {"engine_version": "0.5.16"}, UnavailableError, "too old for DFlash 2: 0.5.23"),
        ("vllm", {"engine_version": "0.27.1"}, UnavailableError, "too old for DFlash 2: 0.28.0"),
    ],
)
def test_refused_in_one_line(engine: str, changes: dict[str, Any], error: type[BlockdraftError], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        prepared(engine, QWEN, **{"gpus": "2xH100", **changes})
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("version", "name"), [("0.5.16", "scheduler"), ("0.5.23", "radix-cache"), ("0.6", "radix-cache")]
)
def test_a_renamed_flag_follows_the_version(version: str, name: str) -> None:
    pair = dataclasses.replace(PAIRS["qwen3.6-27b-dflash"])
    names = [flag.name for flag in prepared("sglang", pair, engine_version=version).command.flags]
    assert [flag for flag in names if flag.startswith("--mamba")] == [f"--mamba-{name}-strategy"]


@pytest.mark.usefixtures("hub")
def test_a_pair_that_does_not_fit_is_not_launched() -> None:
    other = dataclasses.replace(QWEN, target="Qwen/Qwen3-8B")
    with pytest.raises(PairError, match=r"does not fit this target.*hidden_size"):
        prepared("sglang", other)
