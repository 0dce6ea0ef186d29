"""The rule tables themselves: whole, sourced, consistent, and the document that is made of them."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import engines as page  # noqa: E402
from pairs import PAIRS, prepared, serve_hub, write_pair  # noqa: E402

from blockdraft.engines import ENGINES, floor_of  # noqa: E402
from blockdraft.engines.cards import CARDS, COLLAPSED  # noqa: E402
from blockdraft.engines.confirm import Watch  # noqa: E402
from blockdraft.engines.measure import from_counters, from_log, from_replies  # noqa: E402
from blockdraft.engines.setting import Version, read_machine  # noqa: E402
from blockdraft.errors import UnavailableError  # noqa: E402


def test_the_document_is_what_the_tables_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ROOT / "docs" / "engines.md"
    monkeypatch.setattr(sys, "argv", ["engines", "--check", str(place)])
    assert page.main() == 0, capsys.readouterr().out
    text = place.read_text()
    for name in (
        "lightseekorg/kimi-k3-dflash2, 5 layers",
        "tencent/Qwen3.8-27B-DSpine-b16",
        "z-lab/Qwen3-8B-DFlash-b16",
    ):
        assert f"| {name} |" in text


def test_the_matrix_says_of_latent_attention_what_was_measured() -> None:
    """MLA DFlash 2 loads in neither SGLang 0.5.23 nor vLLM 0.32; TokenSpeed runs it."""
    head, rows = "", {}
    for line in page.document().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| draft |"):
            head = line
        elif line.startswith(("| lightseekorg", "| z-lab/Qwen3.8")):
            rows[cells[0]] = cells[2:]
    columns = [cell.strip() for cell in head.strip("|").split("|")][2:]
    mla = dict(zip(columns, rows["lightseekorg/kimi-k3-dflash2, 5 layers"], strict=True))
    assert mla["SGLang 0.5.23"].startswith("fails") and mla["vLLM 0.32.0"].startswith("fails")
    assert mla["TokenSpeed 0.1.0"].startswith("works") and mla["TokenSpeed 0.1.0 without dflash2.py"].startswith(
        "fails"
    )
    gqa = dict(zip(columns, rows["z-lab/Qwen3.8-27B-DFlash2"], strict=True))
    assert gqa["vLLM 0.27.1"].startswith("fails") and gqa["vLLM 0.28.0"].startswith("works")


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_every_rule_names_its_source_and_its_reason(engine: object) -> None:
    assert dataclasses.is_dataclass(engine)
    rules = [*engine.flags, *engine.variables, *engine.forbidden, *engine.supports, *engine.readings, *engine.alarms]  # type: ignore[attr-defined]
    assert rules and all(rule.source for rule in rules)
    texts = [getattr(rule, "why", getattr(rule, "text", "line")) for rule in rules]
    assert all(texts)
    names = [flag.name for flag in engine.flags]  # type: ignore[attr-defined]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"--[a-z0-9-]+", name) for name in names)
    assert {one.feature for one in engine.supports} - {None} <= set(engine.features)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("older", "newer"), [("0.5.16", "0.5.23"), ("0.9.0", "0.10.0"), ("0.28.0rc1", "0.28.1"), ("0.27.1", "0.28")]
)
def test_versions_are_compared_by_number(older: str, newer: str) -> None:
    assert Version(older) < Version(newer) and not Version(newer) < Version(older)
    assert Version("0.32") == Version("0.32.0") == Version("0.32.0.dev7+cu130")


def test_machines() -> None:
    machine = read_machine("8xGB300", 2)
    assert (machine.num_gpus, machine.gpu, machine.total_gpus) == (4, "GB300", 8)
    assert read_machine("2 x RTX-3090", 1).gpu == "RTX-3090" and read_machine("4", 1).total_gpus == 4
    assert read_machine(None, 2).total_gpus == 2


# ---- acceptance ----------------------------------------------------------------------------------------------------
def test_acceptance_by_hand() -> None:
    replies = [
        {"choices": [{"meta_info": {"spec_verify_ct": 10, "spec_num_correct_drafts": 23}}]},
        {"choices": [{}], "meta_info": {"spec_verify_ct": 30, "spec_num_correct_drafts": 17}},
    ]
    assert from_replies(replies).length == 1 + 40 / 40
    before = {"spec_decode_num_drafts": 100.0, "spec_decode_num_accepted_tokens": 900.0}
    after = {"spec_decode_num_drafts": 120.0, "spec_decode_num_accepted_tokens": 950.0}
    assert from_counters(before, after).length == 1 + 50 / 20
    lines = ["RequestStats(x, output_tokens=101, y, acc_len=4.0, z)", "RequestStats(output_tokens=61, acc_len=2.0)"]
    found = from_log([*lines, "RequestStats(output_tokens=9, acc_len=None)", "Req: 1 Finish!"])
    assert found.length == pytest.approx(160 / (25 + 30)) and found.num_steps == 55 and found.num_accepted == 105
    for nothing in (
        lambda: from_replies([{"choices": [{}]}]),
        lambda: from_counters(after, after),
        lambda: from_log([]),
    ):
        with pytest.raises(UnavailableError, match="without a single step"):
            nothing()


def test_floors() -> None:
    name = "lightseekorg/kimi-k3-dflash2"
    assert floor_of(name, 8, None).length == pytest.approx(1 + 1.780 / 2)
    assert floor_of("RadixArk/kimi-k3.1-dflash2-preview", 5, None).length == pytest.approx(1 + 2.231564 / 2)
    assert floor_of(name, 5, None).length == floor_of("./draft", 8, None).length == COLLAPSED
    assert floor_of(name, 8, 3.5).length == 3.5
    for cards in CARDS.values():
        for card in cards:
            assert all(COLLAPSED < length <= card.width for length in card.lengths.values())


# ---- the log -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "taps"),
    [
        ("Using Eagle3 auxiliary layers from config: (6, 20, 34, 48, 62)", (5, 19, 33, 47, 61)),
        ("INFO [x.py:27] Using auxiliary layers from speculative config: [6, 20]", (5, 19)),
        ("Kimi-K3 aux hidden capture: layers=(20, 38) mode=prefix_only (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=0)", (19, 37)),
    ],
)
def test_vllm_counts_layers_from_one(
    line: str, taps: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = PAIRS["qwen3.8-27b-dflash2"]
    serve_hub(monkeypatch, write_pair(pair, tmp_path))
    watch = Watch(ENGINES["vllm"], prepared("vllm", pair).setting)
    watch.feed(line)
    assert watch.said["taps"] == taps
    assert bool(watch.contradictions()) == (taps != (5, 19, 33, 47, 61))


def test_the_stream_of_kimi_k3_is_confirmed_by_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = PAIRS["kimi-k3-dflash"]
    serve_hub(monkeypatch, write_pair(pair, tmp_path))
    watch = Watch(ENGINES["vllm"], prepared("vllm", pair).setting)
    watch.feed("Kimi-K3 aux hidden capture: layers=(2,) mode=prefix_only (VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=0)")
    assert "stream: the draft declares attn_res, the engine took prefix" in watch.contradictions()
