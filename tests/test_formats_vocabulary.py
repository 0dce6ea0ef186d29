"""A reduced draft vocabulary: on disk as speculators leaves it, in a draft as ids of the target, refused elsewhere."""

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
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft import formats
from blockdraft.accept import SamplingParams
from blockdraft.config import ConfidenceConfig, ConvConfig, DraftConfig, MarkovConfig, SelectorConfig
from blockdraft.draft import BlockRows, DraftModel
from blockdraft.engine import Engine, Request
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats.convert import convert
from blockdraft.inspection import inspect_checkpoint, render_text
from drafts import random_tensors
from engine_kit import hf_target, plain_ids, run_one, tiny_model
from exactness import pooled_chi_square_ok
from spark_kit import random_model, spark_config, spine_config
from test_draft_spark import Block
from test_engine_sampling import raw_table, table_model, target_distribution_table

IDS = [1, 3, 4, 9, 11, 17, 20, 26, 31]  # the mask, 3, is one of them
PROMPT = [3, 7, 1, 12, 5]


def reduced_config(**changes: Any) -> DraftConfig:
    plain = {"predicts_from_anchor": False, "confidence": None, "target_layer_ids": (0, 1)}
    return spark_config(None, **{**plain, "draft_vocab_size": len(IDS), **changes})


def reduced_checkpoint(*, own: tuple[str, ...] = ("embed_tokens.weight",)) -> formats.Checkpoint:
    config = reduced_config()
    tensors = random_tensors(config)
    tensors |= {name: torch.randn(formats.zlab.optional_tensors(config)[name]).bfloat16() for name in own}
    tensors["head_ids"] = torch.tensor(IDS)
    return formats.Checkpoint(config, tensors)


def reduced_draft(config: DraftConfig, ids: list[int], *, seed: int = 0) -> DraftModel:
    draft = random_model(config, seed=seed)
    draft.head_ids = torch.tensor(ids)
    return draft


def written(folder: Path, **changes: Any) -> Path:
    """A speculators checkpoint with some tensors of its file changed, None for gone."""
    formats.write(folder, reduced_checkpoint(), dialect="speculators")
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return folder


# ---- on disk ---------------------------------------------------------------------------------------------------------
def test_round_trip_bit_for_bit(tmp_path: Path) -> None:
    made = reduced_checkpoint()
    formats.write(tmp_path / "a", made, dialect="speculators", dtype=None)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert "head_ids" not in stored
    assert [row + offset for row, offset in enumerate(stored["d2t"].tolist())] == IDS
    assert stored["t2d"].nonzero()[:, 0].tolist() == IDS and stored["t2d"].shape == (32,)
    assert stored["lm_head.weight"].shape == (9, 24) and stored["embed_tokens.weight"].shape == (32, 24)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["draft_vocab_size"] == 9
    convert(tmp_path / "a", tmp_path / "b", "speculators")
    for folder in (tmp_path / "a", tmp_path / "b"):
        back = formats.read(folder)
        assert back.config == made.config and back.tensors.keys() == made.tensors.keys()
        assert all(torch.equal(back.tensors[name], tensor) for name, tensor in made.tensors.items())
        assert all(back.tensors[name].dtype == tensor.dtype for name, tensor in made.tensors.items())
    wide = formats.read(tmp_path / "a", dtype=torch.float32)
    assert wide.tensors["fc.weight"].dtype == torch.float32 and wide.tensors["head_ids"].dtype == torch.int64
    draft = DraftModel.from_checkpoint(made, dtype=torch.float64)
    assert draft.head_ids is not None and draft.head_ids.tolist() == IDS
    assert draft.state_dict().keys() == made.tensors.keys()


def test_rows_may_stand_in_any_order(tmp_path: Path) -> None:
    made = reduced_checkpoint()
    made.tensors["head_ids"] = torch.tensor(IDS[::-1])
    formats.write(tmp_path / "draft", made, dialect="speculators")
    assert formats.read(tmp_path / "draft").tensors["head_ids"].tolist() == IDS[::-1]


def test_a_full_vocabulary_has_no_map(tmp_path: Path) -> None:
    config = reduced_config(draft_vocab_size=None)
    formats.write(tmp_path / "draft", formats.Checkpoint(config, random_tensors(config)), dialect="speculators")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "draft" / "model.safetensors").keys()
    assert DraftModel.from_checkpoint(formats.read(tmp_path / "draft")).head_ids is None


def test_inspect_counts_the_rows_that_are_there(tmp_path: Path) -> None:
    report = inspect_checkpoint(written(tmp_path / "draft"))
    assert report["shape"]["draft_vocab_size"] == 9 and report["parameters"]["head"] == 9 * 24
    assert report["cost"]["head_bytes_per_step"] == 2 * 9 * 24
    assert report["num_tensors"] == report["weights"]["num_tensors"]
    assert report["weights"]["own"] == ["embed_tokens.weight", "lm_head.weight"]
    assert "vocab 32 (proposes among 9 of them)" in render_text(report, columns=120)


def flags(*ids: int) -> Tensor:
    return torch.zeros(32, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)


def offsets(*ids: int) -> Tensor:
    return torch.tensor(ids) - torch.arange(len(ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"t2d": flags(*IDS[:-1], 30)}, "t2d marks 9 ids for 9 rows, and 1 rows of d2t lead to ids that it does not"),
        ({"t2d": flags(*IDS, 30)}, "t2d marks 10 ids for 9 rows, and 0 rows of d2t"),
        ({"t2d": flags(*IDS[1:])}, "such as row 0, id 1; the two must come from one mapping"),
        ({"d2t": torch.tensor(IDS)}, "row 7 of d2t leads to id 33"),
        ({"d2t": offsets(*IDS[:-1], 32)}, "row 8 of d2t leads to id 32: the target's are 0 to 31"),
        ({"d2t": offsets(-1, *IDS[1:])}, "row 0 of d2t leads to id -1"),
        ({"d2t": offsets(*IDS[:-1], 1)}, "rows 0 and 8 of d2t lead to the same id 1"),
        ({"d2t": None}, "needs d2t \\[9\\] of I64 and t2d \\[32\\] of BOOL"),
        ({"t2d": None}, "needs d2t \\[9\\] of I64 and t2d \\[32\\] of BOOL"),
        ({"t2d": flags(*IDS)[:31]}, "needs d2t"),
        ({"t2d": flags(*IDS).long()}, "needs d2t"),
        ({"d2t": offsets(*IDS).int()}, "head_ids is I32"),
        ({"d2t": offsets(*IDS[:-1])}, "head_ids is \\[8\\], expected \\[9\\]"),
        ({"lm_head.weight": None}, "1 missing \\(lm_head.weight\\)"),
        ({"lm_head.weight": torch.ones(32, 24)}, "lm_head.weight is \\[32, 24\\], expected \\[9, 24\\]"),
        ({"head_ids": torch.tensor(IDS)}, "head_ids is no name of a file"),
    ],
)
def test_maps_that_are_not_sound(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        formats.read(written(tmp_path / "draft", **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [[*IDS[:-1], 32], [*IDS[:-1], 1]])
def test_ids_that_are_not_sound_are_not_written(tmp_path: Path, ids: list[int]) -> None:
    made = reduced_checkpoint()
    made.tensors["head_ids"] = torch.tensor(ids)
    with pytest.raises(CheckpointError, match="head_ids lead"):
        formats.write(tmp_path / "draft", made, dialect="speculators")
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("dialect", [*sorted(set(formats.DIALECTS) - {"speculators"}), "gguf"])
def test_other_dialects_refuse_it_by_name(tmp_path: Path, dialect: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot express a reduced draft vocabulary \(draft_vocab_size 9 of 32\)"):
        formats.write(tmp_path / "draft.gguf", reduced_checkpoint(), dialect=dialect)
    assert not (tmp_path / "draft.gguf").exists()
    with pytest.raises(ConfigError, match="z-lab layout cannot express a reduced draft vocabulary"):
        formats.zlab.config_to_dict(reduced_config())


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            reduced_config(
                draft_vocab_size=None,
                conv=ConvConfig(kernel_size=2, group_size=8),
                selector=SelectorConfig(rank=4, top_k=4),
            ),
            "a candidate selector",
        ),
        (reduced_config(draft_vocab_size=None, markov=MarkovConfig(rank=4, kind="vanilla")), "a Markov head"),
        (reduced_config(draft_vocab_size=None, confidence=ConfidenceConfig(reads_token=False)), "a confidence head"),
        (spine_config(), "adjacent injection"),
        (reduced_config(draft_vocab_size=None, predicts_from_anchor=True), "rows that predict from the anchor"),
    ],
)
def test_other_heads_refuse_it_by_name(config: DraftConfig, part: str) -> None:
    with pytest.raises(ConfigError, match=f"draft_vocab_size is 9 of vocab_size 32 beside {part}"):
        replace(config, draft_vocab_size=9)


# ---- in a draft ------------------------------------------------------------------------------------------------------
def likeliest(row_D: Tensor, head_RD: Tensor, ids: list[int], barred: int) -> int:
    scores = {token: float(row_D @ head_RD[row]) for row, token in enumerate(ids) if token != barred}
    return max(scores, key=lambda token: scores[token])


def test_proposals_are_those_of_the_formulas() -> None:
    seen = set()
    for seed in range(6):
        block = Block(reduced_config(block_size=6), seed=seed)
        block.model.head_ids = torch.tensor(IDS)
        wanted = [likeliest(row, block.head, IDS, 3) for row in block.predicting]
        for temperature in (0.0, 1.0):
            proposal = block.propose(temperature)
            assert proposal.ids_G.tolist() == wanted and proposal.q is None
        seen |= set(wanted)
    assert len(seen) > 3 and seen <= set(IDS) - {3}


def test_greedy_text_is_the_targets_own(tmp_path: Path) -> None:
    """From disk, every width; every proposal that the engine gets is an id of the head, the likeliest."""
    model = tiny_model()
    text = plain_ids(model, PROMPT, 18)
    made = reduced_draft(reduced_config(), IDS)
    formats.write(
        tmp_path / "d", formats.Checkpoint(made.config, dict(made.state_dict())), dialect="speculators", dtype=None
    )
    draft = DraftModel.from_checkpoint(formats.read(tmp_path / "d"))
    checked, propose = 0, draft.propose_rows

    def checking(blocks: Sequence[BlockRows], *args: Any, **options: Any) -> Any:
        nonlocal checked
        proposals = propose(blocks, *args, **options)
        assert draft.own_head is not None
        for block, proposal in zip(blocks, proposals, strict=True):
            rows = block.hidden_LD[1:]
            assert proposal.ids_G.tolist() == [likeliest(row, draft.own_head, IDS, 3) for row in rows]
            checked += len(proposal.ids_G)
        return proposals

    draft.propose_rows = checking  # type: ignore[method-assign]
    engine = Engine(hf_target(model, (0, 1)), draft)
    for width in range(2, 5):
        done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=18, stop_ids=frozenset(), width=width)
        assert list(done.token_ids) == text
    assert checked > 40


def test_the_law_of_sampled_text_is_kept() -> None:
    """A head of half of the target's ids: the others are only ever the target's own."""
    model, params = table_model(), SamplingParams(temperature=0.9)
    draft = reduced_draft(reduced_config(vocab_size=8, mask_token_id=0, draft_vocab_size=4), [0, 2, 5, 6])
    engine = Engine(hf_target(model, (0, 1)), draft)
    requests = [
        Request(prompt_ids=[i % 8], max_new_tokens=8, stop_ids=frozenset(), sampling=params, width=2 + i % 3, seed=i)
        for i in range(64)
    ]
    counts: list[Counter[int]] = [Counter() for _ in range(8)]
    accepted = 0
    for request, done in zip(requests, engine.run(requests), strict=True):
        accepted += done.stats.num_accepted_draft_tokens
        for before, token in itertools.pairwise([request.prompt_ids[-1], *done.token_ids]):
            counts[before][token] += 1
    assert accepted > 20
    laws = [dict(enumerate(row)) for row in target_distribution_table(raw_table(model), params).tolist()]
    assert pooled_chi_square_ok(list(zip(counts, laws, strict=True)), alpha=1e-5)
    assert not pooled_chi_square_ok(list(zip(counts, laws[1:] + laws[:1], strict=True)), alpha=1e-5)
