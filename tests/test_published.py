"""Every published drafter: counted on the meta device, and each family run small, in the published layout."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockdraft import formats
from blockdraft.accept import SamplingParams
from blockdraft.config import MlaConfig
from blockdraft.draft import DraftModel
from blockdraft.draft.rope import rope_frequencies
from blockdraft.engine import Engine, Request
from blockdraft.formats import zlab
from blockdraft.inspection import count_parameters, inspect_checkpoint
from drafts import edited
from engine_kit import VOCAB, hf_target, plain_ids, tiny_model
from exactness import pooled_chi_square_ok
from gqa_kit import FromScratch
from test_engine_sampling import raw_table, table_model, target_distribution_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import published, shapes  # noqa: E402
from benchmarks.published import PUBLISHED, Published  # noqa: E402

KNOWN = {entry.name: entry for entry in PUBLISHED if entry.config is not None}
EXACT = 1e-10
PROMPT = [3, 7, 1, 12, 5]
TAPS = [0, 2]


# ---- sizes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("entry", KNOWN.values(), ids=KNOWN)
def test_the_model_has_the_tensors_that_a_file_is_asked_for(entry: Published) -> None:
    config = entry.read()
    with torch.device("meta"):
        model = DraftModel(
            config,
            has_embedding=published.EMBEDDING in entry.own,
            has_head=published.HEAD in entry.own,
            has_mask_embedding=published.MASK in entry.own,
        )
    made = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    optional = zlab.optional_tensors(config)
    assert made == zlab.expected_tensors(config) | {name: optional[name] for name in entry.own}
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == count_parameters(config, entry.own)["total"]
    assert entry.num_parameters in (None, total) and entry.num_tensors in (None, len(made))


@pytest.mark.parametrize(
    ("name", "num_parameters", "num_tensors"),
    [
        ("z-lab/Qwen3.8-27B-DFlash2", 1_924_404_480, 81),
        ("RadixArk/Kimi-K3.1-Dflash2-Preview", 2_784_811_008, 86),
        ("lightseekorg/kimi-k3-dflash2, 5 layers", 3_692_877_824, 87),
        ("lightseekorg/kimi-k3-dflash2, 6 layers", 4_179_425_280, 103),
        ("z-lab/Kimi-K2.5-DFlash", 3_479_277_056, 69),
        ("z-lab/Qwen3.6-27B-DFlash", 1_730_213_120, 58),
        ("canada-quant/GLM-5.3-Flash-DFlash2-G", 3_111_073_792, 129),
    ],
)
def test_counts(name: str, num_parameters: int, num_tensors: int) -> None:
    entry = KNOWN[name]
    config = entry.read()
    assert count_parameters(config, entry.own)["total"] == num_parameters
    assert len(zlab.expected_tensors(config)) + len(entry.own) == num_tensors


def test_the_table_of_shapes_is_up_to_date_and_agrees_with_what_is_published() -> None:
    document = shapes.document()
    assert (ROOT / "docs" / "shapes.md").read_text() == document
    assert "NOT" not in document
    assert all(f"| {entry.name} |" in document for entry in PUBLISHED)


# ---- each layout, small ----------------------------------------------------------------------------------------------
def is_latent(entry: Published) -> bool:
    return isinstance(entry.read().attention, MlaConfig)


def layout_of(entry: Published) -> tuple[Any, ...]:
    """What two drafters share whose files differ in numbers only."""
    raw: dict[str, Any] = dict(entry.config or {})
    rope = raw.get("rope_parameters") or raw["rope_scaling"]
    kinds = frozenset(raw.get("layer_types") or ["full_attention"])
    keys = frozenset({*raw, *raw["dflash_config"]} - {"aux_hidden_stream"})
    kind = rope.get("rope_type") or rope["type"]
    return raw["architectures"][0], keys, kinds, raw.get("is_causal"), kind, entry.own


# Of DFlash drafters on grouped-query attention that differ in numbers only, the first. Latent attention, DSpark, DSpine
# and other dialects have files of their own (test_formats_*).
LAYOUTS = {
    layout_of(entry): entry
    for entry in reversed(KNOWN.values())
    if entry.dialect == "z-lab" and entry.read().family in ("dflash", "dflash2") and not is_latent(entry)
}
GQA = {entry.name: entry for entry in LAYOUTS.values()}


def reduced(raw: dict[str, Any], vocab_size: int = VOCAB) -> dict[str, Any]:
    """A published config with every size made small: the same keys at the same places."""
    nest = raw["dflash_config"]
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "num_hidden_layers": 3,
        "num_target_layers": 3,
        "nest_mask_token_id": 1,
        "nest_target_layer_ids": TAPS,
    }
    if "layer_types" in raw:
        small["layer_types"] = [*raw["layer_types"][:2], raw["layer_types"][-1]]
    if raw.get("sliding_window") is not None:
        small["sliding_window"] = 7
    if "conv_group_size" in nest:
        small |= {"nest_conv_group_size": 8, "nest_selector_rank": 4, "nest_selector_top_k": 4}
    for place in ("rope_parameters", "rope_scaling"):
        if "original_max_position_embeddings" in raw.get(place, {}):
            small[place] = {**raw[place], "original_max_position_embeddings": 32}
    # The stream of Kimi K3 is one that a small Llama does not have.
    small |= {"nest_aux_hidden_stream": "prefix"} if "aux_hidden_stream" in nest else {}
    return edited(raw, **small)


def written(folder: Path, entry: Published, vocab_size: int = VOCAB) -> None:
    """Random weights as a publisher would leave them: their config.json, their names, their extra file."""
    raw = reduced(dict(entry.config or {}), vocab_size)
    config = zlab.config_from_dict(raw)
    generator = torch.Generator().manual_seed(len(entry.name))
    optional = zlab.optional_tensors(config)
    tensors = {}
    for name, shape in (zlab.expected_tensors(config) | {name: optional[name] for name in entry.own}).items():
        is_gain = "norm" in name and len(shape) == 1
        scale = 0.5 if "codebook" in name else 0.2
        tensors[name] = float(is_gain) + scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    if published.MASK in tensors:
        torch.save(tensors.pop(published.MASK), folder / "mask_embedding.pt")
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DraftModel]:
    folder = tmp_path_factory.mktemp("published")
    found = {}
    for index, (name, entry) in enumerate(GQA.items()):
        written(folder / str(index), entry)
        found[name] = DraftModel.from_checkpoint(formats.read(folder / str(index)))
        report = inspect_checkpoint(folder / str(index))
        assert sorted(report["weights"]["own"]) == sorted(entry.own)
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def ar_text(model: Any) -> list[int]:
    return plain_ids(model, PROMPT, 12)


@pytest.mark.parametrize("name", GQA)
def test_greedy_text_is_the_targets_own(
    loaded: dict[str, DraftModel], model: Any, ar_text: list[int], name: str
) -> None:
    """Every width of a block, in one batch, far past the window of 7."""
    draft = loaded[name]
    widths = range(2, draft.config.max_width + 1)
    engine = Engine(hf_target(model, TAPS), draft)
    requests = [Request(prompt_ids=PROMPT, max_new_tokens=12, stop_ids=frozenset(), width=width) for width in widths]
    for request, done in zip(requests, engine.run(requests), strict=True):
        assert list(done.token_ids) == ar_text
        assert done.stats.num_draft_tokens > 0 and done.speculation.width == request.width


@pytest.mark.parametrize("name", GQA)
def test_drafts_equal_a_forward_pass_from_scratch(loaded: dict[str, DraftModel], name: str) -> None:
    """Rounds of random acceptance and width over a cache, against one pass over the whole context."""
    draft = loaded[name]
    config = draft.config
    oracle, chance = FromScratch(draft), random.Random(name)
    torch.manual_seed(len(name))
    taps = torch.randn(32, config.num_taps, 32, dtype=torch.float64)
    table, head = (torch.randn(VOCAB, 32, dtype=torch.float64) for _ in range(2))
    table = table if draft.own_embedding is None else draft.own_embedding
    head = head if draft.own_head is None else draft.own_head
    cache = draft.new_cache()
    count = 5
    draft.inject(taps[:count], cache)
    for _ in range(3):
        width, anchor = chance.randint(2, config.block_size), chance.randrange(2, VOCAB)
        rows = table[[anchor] + [config.mask_token_id] * (width - 1)].clone()
        if draft.mask_embedding is not None:
            rows[1:] = draft.mask_embedding
        noise = draft.noise([anchor], width, lambda ids: table[ids])
        torch.testing.assert_close(noise[0], rows * config.input_embedding_scale, atol=EXACT, rtol=EXACT)
        hidden = draft(noise, [cache])[0]
        expected = oracle.hidden(taps[:count], rows)
        torch.testing.assert_close(hidden, expected, atol=EXACT, rtol=EXACT)
        proposal = draft.propose(hidden, anchor, hidden[1:] @ head.T, 0.0, None)
        assert proposal.ids_G.tolist() == oracle.proposals(expected, anchor, head)
        more = chance.randint(1, 8)
        draft.inject(taps[count : count + more], cache)
        count += more
    assert count > 7


@pytest.mark.parametrize(
    "name", ["z-lab/Qwen3.6-27B-DFlash", "z-lab/Qwen3.8-27B-DFlash2", "canada-quant/GLM-5.3-Flash-DFlash2-G"]
)
def test_the_law_of_sampled_text_is_kept(tmp_path: Path, name: str) -> None:
    """From disk, every width in one batch, past the window of 7: each next token after its one before."""
    table, params = table_model(), SamplingParams(temperature=0.9)
    raw_VV = raw_table(table)
    size = len(raw_VV)
    written(tmp_path / "draft", GQA[name], size)
    draft = DraftModel.from_checkpoint(formats.read(tmp_path / "draft"))
    most = draft.config.max_width
    engine = Engine(hf_target(table, TAPS), draft)
    requests = [
        Request(
            prompt_ids=[i % size],
            max_new_tokens=8,
            stop_ids=frozenset(),
            sampling=params,
            width=2 + i % (most - 1),
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


STRETCHED = {name: entry for name, entry in KNOWN.items() if entry.read().rope.kind != "default"}


@pytest.mark.parametrize("entry", STRETCHED.values(), ids=STRETCHED)
def test_tables_of_stretched_positions_are_those_of_transformers(entry: Published) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw, config = dict(entry.config or {}), entry.read()
    rope = {"rope_theta": config.rope.theta, **(raw.get("rope_parameters") or raw["rope_scaling"])}
    rope["rope_type"] = rope.pop("type", None) or rope["rope_type"]
    theirs = transformers.Qwen3Config(
        head_dim=config.attention.rope_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    want, want_factor = ROPE_INIT_FUNCTIONS[config.rope.kind](theirs, torch.device("cpu"))
    got, factor = rope_frequencies(config.rope, config.attention.rope_dim, torch.float32)
    torch.testing.assert_close(got, want, atol=0, rtol=1e-6)
    assert factor == want_factor
