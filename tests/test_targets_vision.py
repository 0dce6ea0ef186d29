"""Models with vision as targets of text: their language model is found, read, tapped and taken back."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.errors import PairError
from blockdraft.inspection import read_target_facts
from blockdraft.targets import load_target
from blockdraft.targets.stored import find_target
from tiny_targets import random_ids
from vision_kit import WRAPPERS, text_model, vision_model

TAPS = (1, 2)


@pytest.fixture(scope="module", params=sorted(WRAPPERS))
def wrapper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    name = request.param
    model, folder = vision_model(name), tmp_path_factory.mktemp(name)
    model.save_pretrained(folder)
    return name, model, folder


def test_text_is_scored_tapped_and_taken_back_as_by_the_language_model_alone(wrapper: tuple[str, Any, Path]) -> None:
    """Two rows in turns, with blocks of which a random part is kept, against one forward of the text model."""
    name, model, folder = wrapper
    target = load_target(folder, tap_layer_ids=TAPS, pack=False)
    reference = text_model(name, model) or model
    assert target.facts.model_type == WRAPPERS[name][0] and target.dtype == torch.float64
    draw = random.Random(1)
    rows, texts = [target.new_row(), target.new_row()], [[], []]
    for turn in range(14):
        ids = [random_ids(draw.choice((1, 6, 9)), 10 * turn + row).tolist() for row in range(2)]
        scored = target.forward([torch.tensor(x) for x in ids], rows)
        for row in range(2):
            whole = torch.tensor(texts[row] + ids[row])[None]
            with torch.no_grad():
                expected = reference(input_ids=whole, output_hidden_states=True)
            scale = expected.logits.abs().max()
            fed = len(ids[row])
            assert (scored[row].logits_TV - expected.logits[0, -fed:]).abs().max() < 2e-5 * scale
            for number, tap in enumerate(TAPS):
                hidden = expected.hidden_states[tap + 1][0, -fed:]
                assert (scored[row].taps_TNE[:, number] - hidden).abs().max() < 2e-5 * hidden.abs().max()
        keep = [draw.randint(0, len(x)) for x in ids]
        target.rollback(rows, keep)
        texts = [text + x[:kept] for text, x, kept in zip(texts, ids, keep, strict=True)]
    assert all(row.num_positions == len(text) > 20 for row, text in zip(rows, texts, strict=True))


def test_its_facts_are_those_of_the_text_part(wrapper: tuple[str, Any, Path]) -> None:
    _, model, folder = wrapper
    facts = find_target(folder).facts
    text = model.config.get_text_config(decoder=True)
    assert (facts.vocab_size, facts.hidden_size, facts.num_layers) == (61, 32, 4)
    assert facts.max_length == text.max_position_embeddings == 256
    read = read_target_facts(folder)
    assert (read.model_type, read.num_layers, read.is_recurrent) == (facts.model_type, 4, facts.is_recurrent)
    assert set(read.eos_token_ids) == set(facts.eos_token_ids)


def test_a_family_that_is_refused_is_refused_inside_a_wrapper_too(tmp_path: Path) -> None:
    text = {"model_type": "mamba", "num_hidden_layers": 2, "vocab_size": 61, "hidden_size": 32}
    config = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairError, match="'mamba'"):
        load_target(tmp_path)
