"""Drafts in the published layouts from disk: the law of sampled text, and DFlash 2 at identity as DFlash."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockdraft import formats
from blockdraft.accept import SamplingParams
from blockdraft.config import DraftConfig
from blockdraft.draft import BlockRows, DraftModel
from blockdraft.engine import Engine, Request
from drafts import TINY_MLA, TINY_V2, edited
from engine_kit import hf_target, run_one, tiny_model
from exactness import pooled_chi_square_ok
from test_engine_sampling import raw_table, table_model, target_distribution_table

TAPS = [0, 1, 2]
V2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
HEADS = {"enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 5}


def small(raw: dict[str, Any], vocab_size: int, **changes: Any) -> dict[str, Any]:
    places = {"vocab_size": vocab_size, "num_target_layers": 3, "eos_token_id": vocab_size - 1}
    return edited(raw, **places, nest_mask_token_id=1, nest_target_layer_ids=TAPS, **changes)


def v1(raw: dict[str, Any]) -> dict[str, Any]:
    return edited(raw, architectures=["DFlashDraftModel"], **{f"nest_{key}": ... for key in V2_KEYS})


def spark(kind: str) -> dict[str, Any]:
    heads = {f"nest_{key}": value for key, value in HEADS.items()}
    return edited(v1(TINY_V2), architectures=["DSparkDraftModel"], nest_markov_head_type=kind, **heads)


SPINE = {
    "architectures": ["DSpineDraftModel"],
    "is_causal": True,
    "dspine_config": {"transfer_rank": 7, "message_size": 5, "top_k": 4},
}
SWA = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
    "is_causal": True,
}
SAMPLED = {
    "dspark, vanilla": spark("vanilla"),
    "dspark, rnn, sliding": edited(spark("rnn"), **SWA),
    "dspine": edited(v1(TINY_V2), **SPINE),
    "latent v1": edited(v1(TINY_MLA), **SWA),
}


def written(folder: Path, raw: dict[str, Any], *, seed: int = 3) -> DraftConfig:
    """A random checkpoint as a publisher would leave it: config.json as it stands, published names, float64."""
    config = formats.zlab.config_from_dict(raw)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in formats.zlab.expected_tensors(config).items():
        is_gain = "norm" in name and len(shape) == 1
        tensors[name] = float(is_gain) + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return config


@pytest.mark.parametrize("name", SAMPLED)
def test_the_law_of_sampled_text_is_kept(tmp_path: Path, name: str) -> None:
    """Every width in one batch: each next token after its one before."""
    model, params = table_model(), SamplingParams(temperature=0.9)
    raw_VV = raw_table(model)
    size = len(raw_VV)
    config = written(tmp_path / "draft", small(SAMPLED[name], size))
    engine = Engine(hf_target(model, TAPS), DraftModel.from_checkpoint(formats.read(tmp_path / "draft")))
    requests = [
        Request(
            prompt_ids=[i % size],
            max_new_tokens=8,
            stop_ids=frozenset(),
            sampling=params,
            width=2 + i % (config.max_width - 1),
            seed=i,
        )
        for i in range(56)
    ]
    counts: list[Counter[int]] = [Counter() for _ in range(size)]
    accepted = 0
    for request, done in zip(requests, engine.run(requests), strict=True):
        accepted += done.stats.num_accepted_draft_tokens
        for before, token in itertools.pairwise([request.prompt_ids[-1], *done.token_ids]):
            counts[before][token] += 1
    assert accepted > 20
    laws = [dict(enumerate(row)) for row in target_distribution_table(raw_VV, params).tolist()]
    assert pooled_chi_square_ok(list(zip(counts, laws, strict=True)), alpha=1e-5)
    assert not pooled_chi_square_ok(list(zip(counts, laws[1:] + laws[:1], strict=True)), alpha=1e-5)


def at_identity(folder: Path, raw: dict[str, Any]) -> tuple[DraftModel, DraftModel]:
    """(DFlash 2 whose convolutions and selector do nothing, DFlash of the same weights), both from disk."""
    written(folder / "random", raw)
    made = formats.read(folder / "random")
    for name, tensor in made.tensors.items():
        if name.endswith("base_kernel"):
            tensor.zero_()[:, 0] = 1.0
        elif "kernel_projection" in name or name.endswith("successor_codebook"):
            tensor.zero_()
    formats.write(folder / "v2", made, dtype=None)
    config = formats.zlab.config_from_dict(v1(raw))
    kept = {name: made.tensors[name] for name in formats.zlab.expected_tensors(config)}
    formats.write(folder / "v1", formats.Checkpoint(config, kept), dtype=None)
    two, one = (DraftModel.from_checkpoint(formats.read(folder / name)) for name in ("v2", "v1"))
    return two, one


def steps(draft: DraftModel, model: Any, width: int, seed: int | None) -> tuple[list[list[int]], tuple[int, ...]]:
    """(proposals of every step, text) of one run; with a seed it samples, and the draft is still greedy."""
    proposals: list[list[int]] = []
    propose = draft.propose_rows

    def noting(blocks: Sequence[BlockRows], *args: Any, **options: Any) -> Any:
        found = propose([replace(block, temperature=0.0) for block in blocks], *args, **options)
        proposals.extend(proposal.ids_G.tolist() for proposal in found)
        return found

    draft.propose_rows = noting  # type: ignore[method-assign]
    try:
        done = run_one(
            Engine(hf_target(model, TAPS), draft),
            prompt_ids=[3, 7, 2, 12, 5],
            max_new_tokens=24,
            stop_ids=frozenset(),
            width=width,
            seed=seed,
            sampling=SamplingParams(temperature=0.0 if seed is None else 0.9),
        )
    finally:
        del draft.propose_rows
    return proposals, done.token_ids


@pytest.mark.parametrize("raw", [TINY_V2, edited(TINY_V2, **SWA), TINY_MLA], ids=["gqa", "gqa, sliding", "latent"])
def test_dflash_2_at_identity_proposes_and_writes_what_dflash_does(tmp_path: Path, raw: dict[str, Any]) -> None:
    two, one = at_identity(tmp_path, small(raw, 32))
    assert (two.config.family, one.config.family) == ("dflash2", "dflash")
    model = tiny_model()
    for width in range(2, two.config.block_size + 1):
        for seed in (None, 5):
            proposals, text = steps(two, model, width, seed)
            assert (proposals, text) == steps(one, model, width, seed)
            assert len({token for block in proposals for token in block}) > 2
            assert all(len(block) < width for block in proposals) and len(text) == 24


def test_the_comparison_sees_a_selector(tmp_path: Path) -> None:
    two, one = at_identity(tmp_path, small(TINY_V2, 32))
    with torch.no_grad():
        two.candidate_selector.successor_codebook.normal_(0.0, 3.0, generator=torch.Generator().manual_seed(1))
    model = tiny_model()
    assert steps(two, model, 4, None)[0] != steps(one, model, 4, None)[0]
