"""Quantised targets: what is loaded is what is stored, blocks are scored as their ids alone, the rest is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from blockdraft import Request, load
from blockdraft.errors import BlockdraftError, CheckpointError, PairError, UnavailableError
from blockdraft.targets import HFTarget, load_target
from blockdraft.targets.fused import FusedTarget
from blockdraft.targets.selftest import examine
from quantised_kit import by, write_compressed, write_fp8
from tiny_pair import TinyPair, changed_copy, run_cli
from tiny_targets import random_ids, tiny_model

TAPS = (1, 2)
REQUEST = Request(prompt_ids=[20, 30, 40], max_new_tokens=24)
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 64}


@pytest.fixture(scope="module")
def plain_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny_model("llama", dtype=torch.float32, **SIZES).save_pretrained(folder)
    return folder


def expected(folder: Path, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights)
    with torch.no_grad():
        found: Tensor = model(ids[None]).logits[0]
    return found


def scored(target: Any, ids: Tensor) -> Tensor:
    row = target.new_row()
    [found] = target.forward([ids], [row])
    target.free(row)
    return found.logits_TV


def relative(found: Tensor, reference: Tensor) -> float:
    return float((found.float() - reference).abs().max() / reference.abs().max())


def assert_takes_back(target: Any, *, limit: float = 1e-5) -> None:
    found = examine(target)
    assert found.error <= max(limit, 2 * found.noise) and found.contrast > 0.1


def assert_same_text(pair: TinyPair, target: Path, **settings: Any) -> None:
    engine = load(pair.draft, target, **settings)
    alone = Request(prompt_ids=REQUEST.prompt_ids, max_new_tokens=REQUEST.max_new_tokens, speculate=False)
    [drafted], [plain] = engine.run([REQUEST]), engine.run([alone])
    assert drafted.stats.num_draft_tokens > 0 and drafted.token_ids == plain.token_ids


# ---- FP8 -------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU its activations are rounded too")
def test_fp8_without_a_gpu_is_the_model_of_its_unpacked_blocks(plain_target: Path, tmp_path: Path) -> None:
    weights = write_fp8(plain_target, tmp_path / "fp8")
    target = load_target(tmp_path / "fp8", tap_layer_ids=TAPS, dtype=torch.float32)
    assert isinstance(target, FusedTarget) and target.dtype == torch.float32  # nothing of it is quantised any more
    reference = expected(plain_target, weights, random_ids(20))
    assert relative(scored(target, random_ids(20)), reference) < 1e-5
    assert relative(scored(load_target(plain_target), random_ids(20)), reference) > 1e-2


# ---- compressed-tensors ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["int", "float"])
def test_compressed_tensors(plain_target: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    weights = write_compressed(plain_target, tmp_path / "target", by("token", kind), kind)
    target = load_target(tmp_path / "target", tap_layer_ids=TAPS, dtype=torch.float32)
    assert isinstance(target, HFTarget)  # activations are rounded in the layers: no other form computes that
    reference = expected(plain_target, weights, random_ids(20))
    assert relative(scored(target, random_ids(20)), reference) < (0.5 if kind == "int" else 0.8)
    assert_takes_back(target, limit=5e-2)
    with torch.no_grad():
        hidden = torch.randn(2, 3, SIZES["hidden_size"])
        assert torch.allclose(target.logits(hidden), hidden @ weights["lm_head.weight"].T, atol=1e-4)
    half = load_target(tmp_path / "target", tap_layer_ids=TAPS, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and scored(half, random_ids(4)).dtype == torch.bfloat16


def test_weights_alone_are_exact(plain_target: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    weights = write_compressed(plain_target, tmp_path / "target", None, "float")
    target = load_target(tmp_path / "target", tap_layer_ids=TAPS, dtype=torch.float32)
    assert relative(scored(target, random_ids(20)), expected(plain_target, weights, random_ids(20))) < 1e-5
    assert_takes_back(target)


def test_activations_scaled_over_a_whole_forward_are_refused(plain_target: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    write_compressed(plain_target, tmp_path / "target", by("tensor", "int"), "int")
    with pytest.raises(PairError, match="scores a position by ids behind it too"):
        load_target(tmp_path / "target", tap_layer_ids=TAPS)
    assert load_target(tmp_path / "target").tap_layer_ids == ()  # without a draft it is what it is


# ---- bitsandbytes ----------------------------------------------------------------------------------------------------
@pytest.fixture
def quiet() -> None:
    pytest.importorskip("bitsandbytes")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def stored_by_bitsandbytes(source: Path, goal: Path, **settings: Any) -> Path:
    from transformers import BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=BitsAndBytesConfig(**settings))
    model.save_pretrained(goal)
    return goal


@pytest.mark.parametrize("head", ["plain", "quantised"])
def test_nf4(plain_target: Path, tmp_path: Path, quiet: None, head: str) -> None:
    from bitsandbytes.functional import dequantize_4bit

    skipped = {} if head == "plain" else {"llm_int8_skip_modules": ["none"]}
    folder = stored_by_bitsandbytes(
        plain_target, tmp_path / "nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32, **skipped,
    )  # fmt: skip
    target = load_target(folder, tap_layer_ids=TAPS)
    assert isinstance(target, HFTarget) and target.dtype == torch.float32
    weights, unrun = {}, AutoModelForCausalLM.from_pretrained(folder)  # a CPU may lay them out anew when they run
    for name, tensor in LlamaForCausalLM.from_pretrained(plain_target).state_dict().items():
        module = unrun.get_submodule(name.removesuffix(".weight"))
        state = getattr(module.weight, "quant_state", None)
        assert (state is not None) == (name.endswith("proj.weight") or (name.startswith("lm_head") and bool(skipped)))
        weights[name] = tensor if state is None else dequantize_4bit(module.weight.data, state)
    reference = expected(plain_target, weights, random_ids(20))
    assert relative(scored(target, random_ids(20)), reference) < 0.1  # some CPUs have products of two bytes only
    assert relative(scored(load_target(plain_target), random_ids(20)), reference) > 0.3
    assert_takes_back(target)
    hidden = torch.randn(2, 3, SIZES["hidden_size"])
    assert relative(target.logits(hidden), hidden @ weights["lm_head.weight"].T) < 1e-2
    assert torch.equal(target.embed(random_ids(4)), weights["model.embed_tokens.weight"][random_ids(4)])


def test_a_number_format_that_a_checkpoint_does_not_take_is_refused(
    plain_target: Path, tmp_path: Path, quiet: None
) -> None:
    folder = stored_by_bitsandbytes(plain_target, tmp_path / "nf4", load_in_4bit=True)
    with pytest.raises(CheckpointError, match="stays in the float32 that it was written in"):
        load_target(folder, dtype=torch.bfloat16)


def test_sizes_that_a_method_cannot_run_are_refused_in_one_line(tmp_path: Path, quiet: None) -> None:
    tiny_model("llama", dtype=torch.float32, **{**SIZES, "intermediate_size": 96}).save_pretrained(tmp_path)
    try:
        target = load_target(tmp_path, quantize="nf4", dtype=torch.float32)
    except CheckpointError as error:
        assert "bitsandbytes, whose layers cannot run it here" in str(error) and "\n" not in str(error)
    else:  # a machine whose kernels have no such limit
        assert_takes_back(target)


def test_int8_with_a_threshold_is_refused_with_a_draft(plain_target: Path, tmp_path: Path, quiet: None) -> None:
    folder = stored_by_bitsandbytes(plain_target, tmp_path / "int8", load_in_8bit=True)
    with pytest.raises(PairError, match="outlier threshold 6, which picks columns over all ids"):
        load_target(folder, tap_layer_ids=TAPS)
    # The reason: what is scored depends on what follows.
    target = load_target(folder)
    ids, other = random_ids(12), torch.cat([random_ids(6), random_ids(6, 1)])
    assert relative(scored(target, ids)[:6], scored(target, other)[:6].float()) > 1e-3
    rowwise = stored_by_bitsandbytes(plain_target, tmp_path / "rows", load_in_8bit=True, llm_int8_threshold=0.0)
    assert_takes_back(load_target(rowwise, tap_layer_ids=TAPS))


@pytest.mark.parametrize("mode", ["int8", "nf4"])
def test_quantised_while_it_is_read(tiny_pair: TinyPair, plain_target: Path, quiet: None, mode: Any) -> None:
    target = load_target(plain_target, tap_layer_ids=TAPS, dtype=torch.float32, quantize=mode)
    assert_takes_back(target)
    assert type(target._model.model.layers[0].mlp.up_proj).__name__ in ("Linear8bitLt", "Linear4bit")
    plain = scored(load_target(plain_target), random_ids(20))
    assert 1e-3 < relative(scored(target, random_ids(20)), plain) < 1.5
    if mode == "int8":
        assert_same_text(tiny_pair, tiny_pair.target, quantize=mode, draft_dtype="bfloat16")
        words = ["generate", *tiny_pair.arguments, "the fox", "--max-new-tokens", "8", "--json", "--quantize", mode]
        ran = run_cli(*words)
        assert ran.json_lines and ran.err == ""


def test_what_is_quantised_is_not_quantised_again(plain_target: Path, tmp_path: Path, quiet: None) -> None:
    folder = stored_by_bitsandbytes(plain_target, tmp_path / "nf4", load_in_4bit=True)
    with pytest.raises(UnavailableError, match=r"is quantised already \(bitsandbytes\)"):
        load_target(folder, quantize="nf4")


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("bitsandbytes", r"pip install 'blockdraft\[bitsandbytes\]'"),
        ("compressed-tensors", r"pip install 'blockdraft\[compressed-tensors\]'"),
        ("quanto", "pip install optimum-quanto"),
        ("gptq", "pip install gptqmodel"),
    ],
)
def test_a_package_that_is_not_there_is_named(
    plain_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, package: str
) -> None:
    monkeypatch.setattr("blockdraft.targets.quantised._is_there", lambda _module: False)
    entry = {"quant_method": method, "load_in_8bit": True, "bits": 4}
    folder = changed_copy(plain_target, tmp_path / "target", quantization_config=entry)
    with pytest.raises(UnavailableError, match=f"is quantised by {method}, .*{package}") as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_quantize_without_its_package(plain_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.targets.quantised._is_there", lambda _module: False)
    with pytest.raises(UnavailableError, match=r"blockdraft\[bitsandbytes\]"):
        load_target(plain_target, quantize="int8")


def test_an_unknown_method_is_refused_in_one_line(plain_target: Path, tmp_path: Path) -> None:
    folder = changed_copy(plain_target, tmp_path / "target", quantization_config={"quant_method": "magic"})
    with pytest.raises(BlockdraftError, match="magic") as caught:
        load_target(folder)
    assert "\n" not in str(caught.value) and json.loads((folder / "config.json").read_text())["quantization_config"]
