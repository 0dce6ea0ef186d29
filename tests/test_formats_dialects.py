"""Dialects: found by content, round trips of every family that each can express, refusals by name, conversion."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockdraft import formats
from blockdraft.cli import app as app_module
from blockdraft.config import DraftConfig, LayerConfig, RopeConfig, TargetFacts
from blockdraft.draft import DraftModel
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import Checkpoint
from blockdraft.formats.convert import convert
from drafts import (
    KIMI_V1,
    QWEN_V1,
    QWEN_V2,
    TINY_MLA,
    TINY_V1,
    TINY_V2,
    checkpoint,
    draft_configs,
    edited,
    random_tensors,
)

NAMES = ("z-lab", "speculators", "transformers", "torchspec")
EMBEDDING, HEAD, MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"
OWN = {
    "z-lab": {EMBEDDING, HEAD, MASK},
    "speculators": {EMBEDDING, HEAD},
    "transformers": set(),
    "torchspec": {EMBEDDING, HEAD},
}
SWA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Every family at a tiny size, and who can express it.
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "v1": (TINY_V1, set(NAMES)),
    "v1 bidirectional windows": (edited(TINY_V1, **SWA, is_causal=False), {"z-lab", "speculators", "transformers"}),
    "v1 causal windows": (edited(TINY_V1, **SWA), {"z-lab", "speculators"}),
    "v1 yarn": (edited(TINY_V1, rope_parameters=YARN), {"z-lab", "speculators", "transformers"}),
    "v1 bias": (edited(TINY_V1, attention_bias=True), {"z-lab", "speculators"}),
    "v1 causal": (edited(TINY_V1, is_causal=True), {"z-lab"}),
    "v1 other target width": (edited(TINY_V1, target_hidden_size=24), {"z-lab", "speculators", "torchspec"}),
    "v1 last layer": (edited(TINY_V1, nest_target_layer_ids=[1, 5]), {"z-lab", "transformers", "torchspec"}),
    "v2": (TINY_V2, {"z-lab", "speculators", "torchspec"}),
    "v2 bidirectional windows": (edited(TINY_V2, **SWA, is_causal=False), {"z-lab", "speculators", "torchspec"}),
    "v2 causal windows": (edited(TINY_V2, **SWA), {"z-lab", "speculators", "torchspec"}),
    "v2 scaled": (
        edited(TINY_V2, nest_output_multiplier=0.2, nest_final_logit_softcapping=20.0),
        {"z-lab", "torchspec"},
    ),
    "v2 mla": (TINY_MLA, {"z-lab", "torchspec"}),
    "v2 mla yarn": (edited(TINY_MLA, rope_parameters=YARN, is_causal=True), {"z-lab", "torchspec"}),
    "v2 mla one query": (edited(TINY_MLA, q_lora_rank=None), {"z-lab", "torchspec"}),
    "v2 mla norms": (edited(TINY_MLA, fc_norm=True), {"z-lab"}),
    "v2 mla stream": (edited(TINY_MLA, nest_aux_hidden_stream="attn_res"), {"z-lab", "torchspec"}),
}
_SPARK = {"projector_type": "dspark", "markov_rank": 3, "enable_confidence_head": True}
for _kind in ("vanilla", "gated", "rnn"):
    _nest = {**TINY_V1["dflash_config"], **_SPARK, "markov_head_type": _kind, "confidence_head_with_markov": True}
    _raw = {**TINY_V1, "architectures": ["DSparkDraftModel"], "dflash_config": _nest}
    FAMILIES[f"dspark {_kind}"] = (_raw, {"z-lab", "speculators"})
CASES = [(family, name) for family, (_, able) in FAMILIES.items() for name in NAMES if name in able]
REFUSED = [(family, name) for family, (_, able) in FAMILIES.items() for name in NAMES if name not in able]
TARGET = TargetFacts(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    num_layers=6,
    max_length=256,
    is_recurrent=False,
    eos_token_ids=(2,),
    pad_token_id=None,
)


def same(left: Checkpoint, right: Checkpoint) -> bool:
    return (
        left.config == right.config
        and left.tensors.keys() == right.tensors.keys()
        and all(
            left.tensors[name].dtype == right.tensors[name].dtype
            and torch.equal(left.tensors[name], right.tensors[name])
            for name in left.tensors
        )
    )


def raw_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("family", "name"), CASES)
def test_round_trip(tmp_path: Path, family: str, name: str) -> None:
    made = checkpoint(FAMILIES[family][0])
    made.tensors |= {key: t for key, t in random_tensors(made.config, own=True, seed=1).items() if key in OWN[name]}
    formats.write(tmp_path / "draft", made, dialect=name, dtype=None)
    assert formats.find_dialect(tmp_path / "draft").name == name
    assert formats.find_dialect(tmp_path / "draft" / "config.json").name == name
    assert same(formats.read(tmp_path / "draft"), made)
    header = formats.read_header(tmp_path / "draft", made.config)
    assert set(header) == set(made.tensors) - {MASK}
    back = convert(tmp_path / "draft", tmp_path / "back", "z-lab")
    assert (back.source_dialect, back.num_tensors) == (name, len(made.tensors))
    assert same(formats.read(tmp_path / "back"), made)


@pytest.mark.parametrize(("family", "name"), REFUSED)
def test_what_a_dialect_cannot_express_is_refused_and_leaves_nothing(tmp_path: Path, family: str, name: str) -> None:
    formats.write(tmp_path / "draft", checkpoint(FAMILIES[family][0]))
    with pytest.raises(ConfigError, match="cannot express") as caught:
        convert(tmp_path / "draft", tmp_path / "out", name)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


@pytest.mark.parametrize(
    ("name", "family", "what"),
    [
        ("speculators", "v1 causal", "a causal layer with full attention"),
        ("speculators", "v1 last layer", "a tap on the last target layer, 5"),
        ("speculators", "v2 mla", "latent attention"),
        ("speculators", "v2 scaled", "final_logit_softcapping 20.0"),
        ("speculators", "v2 mla norms", "latent attention"),
        ("transformers", "v2", "a dflash2 draft"),
        ("transformers", "v1 bias", "biases in attention (attention_bias)"),
        ("transformers", "v1 causal windows", "a causal layer"),
        ("transformers", "v1 other target width", "target_hidden_size 24"),
        ("torchspec", "v1 yarn", "rope_type 'yarn'"),
        ("torchspec", "v1 bias", "attention_bias"),
        ("torchspec", "v1 causal windows", "sliding or causal layers"),
        ("torchspec", "v2 mla norms", "fc_norm"),
    ],
)
def test_the_refusal_names_it(name: str, family: str, what: str) -> None:
    config = checkpoint(FAMILIES[family][0]).config
    with pytest.raises(ConfigError) as caught:
        formats.DIALECTS[name].config_to_dict(config)
    assert what in str(caught.value)


def test_windows_of_one_and_of_several_widths() -> None:
    config = checkpoint(TINY_V1).config
    one = dataclasses.replace(config, layers=(LayerConfig(is_causal=False, window=1),) * 2)
    with pytest.raises(ConfigError, match="a window of 1"):
        formats.DIALECTS["transformers"].config_to_dict(one)
    two = dataclasses.replace(config, layers=tuple(LayerConfig(is_causal=False, window=w) for w in (4, 5)))
    for name in ("z-lab", "speculators", "transformers"):
        with pytest.raises(ConfigError, match=r"windows \[4, 5\] differ"):
            formats.DIALECTS[name].config_to_dict(two)


@pytest.mark.parametrize("name", ["speculators", "transformers", "torchspec"])
def test_own_tensors_without_a_place(tmp_path: Path, name: str) -> None:
    formats.write(tmp_path / "draft", checkpoint(TINY_V1, own=True))
    with pytest.raises(CheckpointError, match="has no place for it"):
        convert(tmp_path / "draft", tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=draft_configs(), name=st.sampled_from(NAMES))
def test_any_config_comes_back_or_is_refused(config: DraftConfig, name: str) -> None:
    layout = formats.DIALECTS[name]
    try:
        raw = layout.config_to_dict(config)
    except ConfigError as error:
        assert "cannot express" in str(error) and name != "z-lab"
        return
    again = json.loads(json.dumps(raw, allow_nan=False))
    found = [other.name for other in formats.DIALECTS.values() if other.name != "z-lab" and other.detect(again, ())]
    assert found == ([] if name == "z-lab" else [name])
    assert layout.config_from_dict(again) == config


@pytest.mark.parametrize("raw", [QWEN_V1, QWEN_V2, KIMI_V1])
def test_published_configs_in_speculators(raw: dict[str, Any]) -> None:
    config = formats.zlab.config_from_dict(raw)
    layout = formats.DIALECTS["speculators"]
    made = layout.config_to_dict(config)
    assert made["aux_hidden_state_layer_ids"] == [tap + 1 for tap in raw["dflash_config"]["target_layer_ids"]]
    assert layout.config_from_dict(json.loads(json.dumps(made))) == config


# A published file: layer settings of another class, no number of target layers, and 32 of 64 ids.
PUBLISHED_SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [2, 5],
    "block_size": 4,
    "draft_vocab_size": 64,
    "dtype": "bfloat16",
    "mask_token_id": 60,
    "max_anchors": 3072,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "use_cache": True,
        "vocab_size": 64,
    },
}


def test_a_published_speculators_file() -> None:
    layout = formats.DIALECTS["speculators"]
    assert layout.config_from_dict(PUBLISHED_SPECULATORS, target=TARGET) == checkpoint(TINY_V1).config
    with pytest.raises(ConfigError, match=r"num_target_layers is missing.*--target"):
        layout.config_from_dict(PUBLISHED_SPECULATORS)
    reduced = {**PUBLISHED_SPECULATORS, "draft_vocab_size": 32}
    assert layout.config_from_dict(reduced, target=TARGET) == dataclasses.replace(
        checkpoint(TINY_V1).config, draft_vocab_size=32
    )


@pytest.mark.parametrize(
    ("algorithm", "free", "causal"),
    [("dflash", None, True), ("dflash", True, False), ("dflash2", None, False), ("dflash2", False, True)],
)
def test_causality_of_sliding_layers_in_speculators(algorithm: str, free: bool | None, causal: bool) -> None:
    layout = formats.DIALECTS["speculators"]
    raw = layout.config_to_dict(checkpoint(edited(TINY_V2 if algorithm == "dflash2" else TINY_V1, **SWA)).config)
    raw["sliding_window_non_causal"] = free
    del raw["transformer_layer_config"]["use_sliding_window"]  # the types of the layers decide
    config = layout.config_from_dict(raw)
    assert config.layers == (LayerConfig(is_causal=causal, window=5), LayerConfig(is_causal=False, window=None))


def test_the_layer_settings_are_those_of_transformers() -> None:
    from transformers import Qwen3Config

    config = checkpoint(edited(TINY_V2, **SWA, is_causal=False, rope_parameters=YARN)).config
    layer = formats.DIALECTS["speculators"].config_to_dict(config)["transformer_layer_config"]
    theirs = Qwen3Config(**layer)
    assert (theirs.sliding_window, theirs.layer_types) == (5, SWA["layer_types"])
    assert theirs.rope_parameters["factor"] == 4.0 and theirs.rope_parameters["rope_theta"] == 10000.0


ASSISTANT_LAYERS = [["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"]]


@pytest.mark.parametrize("types", ASSISTANT_LAYERS)
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 10000.0}, YARN])
@torch.no_grad()
def test_transformers_loads_what_is_written_and_computes_the_same(
    tmp_path: Path, types: list[str], rope: dict[str, Any]
) -> None:
    from transformers import AutoModel
    from transformers.cache_utils import DFlashCache

    slides = "sliding_attention" in types
    window = {"sliding_window": 5, "use_sliding_window": True} if slides else {}
    raw = edited(TINY_V1, layer_types=types, is_causal=False, rope_parameters=rope, **window)
    made = checkpoint(raw, dtype=torch.float32)
    made.tensors = {name: tensor * 0.2 for name, tensor in made.tensors.items()}
    formats.write(tmp_path / "draft", made, dialect="transformers", dtype=None)
    twin, loading = AutoModel.from_pretrained(
        tmp_path / "draft", dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert type(twin).__name__ == "MuseGlimmerAssistantModel" and not any(loading.values())
    theirs = DFlashCache(config=twin.config)
    theirs.activate_past_recording()
    model = DraftModel.from_checkpoint(formats.read(tmp_path / "draft"))
    cache = model.new_cache()
    for num_new in (9, 1, 4, 3):  # past the window
        taps, noise = torch.randn(num_new, 2, 32), torch.randn(1, 4, 32)
        positions = torch.arange(cache.num_positions, cache.num_positions + num_new + 4)[None]
        theirs.set_previous_accepted_tokens(num_new)
        want = twin(
            noise_embeds=noise, context_hidden_states=taps.flatten(1)[None], position_ids=positions, cache=theirs
        ).last_hidden_state
        theirs.crop(-4)
        model.inject(taps, cache)
        torch.testing.assert_close(model(noise, [cache]), want, atol=1e-5, rtol=1e-5)


def test_what_transformers_saves_is_read_with_its_target(tmp_path: Path) -> None:
    from transformers import AutoModel

    made = checkpoint(edited(TINY_V1, **SWA, is_causal=False), dtype=torch.float32)
    formats.write(tmp_path / "ours", made, dialect="transformers", dtype=None)
    twin = AutoModel.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    for name in ("vocab_size", "num_target_layers"):
        delattr(twin.config, name)
    twin.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=r"vocab_size is missing.*--target"):
        formats.read(tmp_path / "theirs")
    assert same(formats.read(tmp_path / "theirs", target=TARGET), made)


def test_torchspec_counts_taps_where_z_lab_counts_layers() -> None:
    layout = formats.DIALECTS["torchspec"]
    config = checkpoint(TINY_MLA).config
    raw = layout.config_to_dict(config)
    assert (raw["num_target_layers"], raw["target_num_hidden_layers"], raw["model_type"]) == (2, 6, "qwen3_dflash2")
    stated = {**raw, "num_target_layers": 6}
    del stated["target_num_hidden_layers"]
    assert layout.config_from_dict(stated) == layout.config_from_dict(raw) == config


def test_training_names_are_found_by_the_tensors(tmp_path: Path) -> None:
    """A file whose config is z-lab's and whose tensors have training names."""
    made = checkpoint(TINY_V1)
    formats.write(tmp_path, made, dialect="torchspec")
    (tmp_path / "config.json").write_text(json.dumps(TINY_V1))
    assert formats.find_dialect(tmp_path).name == "torchspec"
    assert same(formats.read(tmp_path), made)


def run_convert(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    from unittest import mock

    with mock.patch("sys.argv", ["blockdraft", "convert", *map(str, words)]), pytest.raises(SystemExit) as ended:
        app_module.main()
    out, err = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), out, err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = checkpoint(TINY_V2)
    formats.write(tmp_path / "draft", made)
    code, out, err = run_convert(capsys, tmp_path / "draft", tmp_path / "out", "--to", "speculators")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'out'}: 36 tensors (bfloat16), z-lab -> speculators, read back and equal\n"
    code, _, err = run_convert(capsys, tmp_path / "draft", tmp_path / "out", "--to", "torchspec")
    assert code == 2 and "is not empty" in err
    code, out, _ = run_convert(
        capsys, tmp_path / "draft", tmp_path / "out", "--to", "torchspec", "--overwrite", "--dtype", "float32"
    )
    assert code == 0 and "(float32), z-lab -> torchspec" in out
    assert {tensor.dtype for tensor in formats.read(tmp_path / "out").tensors.values()} == {torch.float32}
    for words, message in (
        (["--to", "onnx"], "--to is 'onnx'"),
        (["--to", "transformers"], "cannot express a dflash2 draft"),
        (["--to", "speculators", "--dtype", "int8"], "dtype is 'int8'"),
    ):
        code, _, err = run_convert(capsys, tmp_path / "draft", tmp_path / "none", *words)
        assert code == 2 and message in err and err.count("\n") == 1
    code, _, err = run_convert(capsys, tmp_path / "draft", tmp_path / "draft", "--to", "z-lab", "--overwrite")
    assert code == 2 and "is the source itself" in err
    assert same(formats.read(tmp_path / "draft"), made)


def test_keys_beside_the_draft_are_named_where_they_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids of a text and settings of training have no place in what is written; nothing else is left out."""
    formats.write(tmp_path / "draft", checkpoint(TINY_V1))
    raw = {**raw_of(tmp_path / "draft"), "eos_token_id": 2, "pad_token_id": None, "num_anchors": 512}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw))
    for name in NAMES:
        done = convert(tmp_path / "draft", tmp_path / name, name)
        assert done.left_out == ("eos_token_id", "num_anchors")
        assert convert(tmp_path / name, tmp_path / f"{name} again", "z-lab").left_out == ()
    out = run_convert(capsys, tmp_path / "draft", tmp_path / "out", "--to", "z-lab")[1]
    assert out.splitlines()[1:] == ["not carried over, it says nothing of the draft itself: eos_token_id, num_anchors"]


def test_the_command_takes_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = checkpoint(TINY_V1)
    formats.write(tmp_path / "draft", made, dialect="speculators")
    raw = {key: value for key, value in raw_of(tmp_path / "draft").items() if key != "num_target_layers"}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw))
    code, _, err = run_convert(capsys, tmp_path / "draft", tmp_path / "out", "--to", "z-lab")
    assert code == 2 and "--target" in err
    target = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6}
    (tmp_path / "target.json").write_text(json.dumps({**target, "max_position_embeddings": 256}))
    words = (tmp_path / "draft", tmp_path / "out", "--to", "z-lab", "--target", tmp_path / "target.json")
    assert run_convert(capsys, *words)[0] == 0
    assert same(formats.read(tmp_path / "out"), made)


def test_a_copy_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dialect that forgets a setting is found out by reading back."""
    raw = edited(TINY_V1, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, rope_theta=500.0)
    formats.write(tmp_path / "draft", checkpoint(raw))
    formats.write(tmp_path / "out", checkpoint(TINY_V2))
    broken = formats.DIALECTS["torchspec"]

    def forgets(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
        return broken.config_to_dict(dataclasses.replace(config, rope=RopeConfig(theta=10000.0)), dtype=dtype)

    table = {**formats.DIALECTS, "torchspec": dataclasses.replace(broken, config_to_dict=forgets)}
    monkeypatch.setattr("blockdraft.formats.convert.DIALECTS", table)
    with pytest.raises(CheckpointError, match="not the one that was written"):
        convert(tmp_path / "draft", tmp_path / "out", "torchspec", overwrite=True)
    assert same(formats.read(tmp_path / "out"), checkpoint(TINY_V2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "out"]


def test_the_help_names_every_dialect() -> None:
    source = Path(formats.__file__).parent.parent / "cli" / "convert.py"
    text = source.read_text()
    assert [name for name in formats.DIALECTS if name not in text] == []
