"""From names to an engine: required, optional and no speculation; dtypes; the built-in pair's names; taps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from blockdraft import Engine, PairError, Request, load
from blockdraft.errors import BlockdraftError
from blockdraft.formats.convert import convert
from engine_kit import draft_config
from tiny_pair import BLOCK_SIZE, MASK_ID, TinyPair, changed_copy, run_cli, write_draft

load_module = import_module("blockdraft.engine.load")
REQUEST = Request(prompt_ids=[20, 30, 40], max_new_tokens=16)


@pytest.fixture(scope="module")
def misfit(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound draft that was made for a target of another vocabulary."""
    config = draft_config(tiny_pair.facts, vocab_size=99, mask_token_id=MASK_ID)
    return write_draft(tmp_path_factory.mktemp("misfit") / "draft", config)


def plain(engine: Engine) -> tuple[int, ...]:
    [completion] = engine.run([Request(prompt_ids=[20, 30, 40], max_new_tokens=16, speculate=False)])
    assert completion.stats.num_draft_tokens == 0 and not completion.speculation.enabled
    return completion.token_ids


@pytest.mark.parametrize("mode", ["required", "optional"])
def test_a_draft_that_fits_is_used(tiny_pair: TinyPair, mode: str) -> None:
    engine = load(tiny_pair.draft, tiny_pair.target, speculation=mode)
    [completion] = engine.run([REQUEST])
    assert completion.stats.num_draft_tokens > 0
    assert (completion.speculation.enabled, completion.speculation.width) == (True, BLOCK_SIZE)
    assert completion.speculation.reason is None
    assert completion.token_ids == plain(engine)


def test_a_draft_that_does_not_fit_is_an_error_where_it_is_required(tiny_pair: TinyPair, misfit: Path) -> None:
    with pytest.raises(PairError, match="the draft is made for 99"):
        load(misfit, tiny_pair.target)


@pytest.mark.parametrize("draft", ["misfit", "nowhere", "the target", None])
def test_an_optional_draft_that_cannot_be_used_is_named_in_every_completion(
    tiny_pair: TinyPair, misfit: Path, draft: str | None
) -> None:
    place = {"misfit": misfit, "nowhere": "no/such/draft", "the target": tiny_pair.target, None: None}[draft]
    says = {"misfit": "made for 99", "nowhere": "no such folder", "the target": "LlamaForCausalLM", None: "no draft"}
    engine = load(place, tiny_pair.target, speculation="optional")
    assert engine.draft is None and engine.target.tap_layer_ids == ()
    for completion in engine.run([REQUEST, REQUEST]):
        speculation = completion.speculation
        assert not speculation.enabled and speculation.width is None and completion.stats.num_draft_tokens == 0
        assert speculation.reason is not None and says[draft] in speculation.reason
        assert speculation.reason.startswith("the draft was left out: ")
        assert completion.token_ids == plain(engine)
    with pytest.raises(BlockdraftError, match="the draft was left out"):
        engine.submit(Request(prompt_ids=[5], max_new_tokens=2, speculate=True))


def test_off_loads_no_draft(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a draft was read")

    monkeypatch.setattr(load_module, "read_checkpoint", never)
    engine = load(tiny_pair.draft, tiny_pair.target, speculation="off")
    [completion] = engine.run([REQUEST])
    assert completion.speculation.reason == "speculation is switched off" and engine.target.tap_layer_ids == ()


def test_one_request_of_two_may_do_without(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny_pair.draft, tiny_pair.target)
    assert engine.draft is not None
    rows_drafted = []
    forward = engine.draft.forward
    monkeypatch.setattr(
        engine.draft, "forward", lambda noise, caches: rows_drafted.append(len(caches)) or forward(noise, caches)
    )
    without = Request(prompt_ids=[20, 30, 40], max_new_tokens=16, speculate=False)
    used, unused = engine.run([REQUEST, without])
    assert used.token_ids == unused.token_ids
    assert unused.stats.num_draft_tokens == 0 and unused.stats.num_steps == 15
    assert unused.speculation.reason == "the request asked for plain decoding"
    assert set(rows_drafted) == {1} and len(rows_drafted) <= used.stats.num_steps


def test_the_taps_are_the_draft_s(tiny_pair: TinyPair, tmp_path: Path) -> None:
    engine = load(tiny_pair.draft, tiny_pair.target)
    assert engine.draft is not None
    assert engine.target.tap_layer_ids == engine.draft.config.target_layer_ids == (0, 1, 2)
    config = draft_config(tiny_pair.facts, target_layer_ids=(0, 2), mask_token_id=MASK_ID)
    other = load(write_draft(tmp_path / "draft", config), tiny_pair.target)
    assert other.target.tap_layer_ids == (0, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_a_dtype_holds_for_both_halves(tiny_pair: TinyPair, dtype: str) -> None:
    engine = load(tiny_pair.draft, tiny_pair.target, dtype=dtype)
    assert engine.draft is not None
    assert engine.target.dtype == engine.draft.dtype == getattr(torch, dtype)
    [completion] = engine.run([REQUEST])
    assert len(completion.token_ids) == 16 and completion.stats.num_draft_tokens > 0
    if dtype in ("float32", "float64"):
        assert completion.token_ids == plain(engine)


def test_without_names_the_built_in_pair_is_meant(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(load_module, "ensure_target", lambda progress: asked.append(progress) or tiny_pair.target)
    monkeypatch.setattr(load_module, "builtin_draft", lambda: tiny_pair.draft)

    def progress(_line: str, _done: float) -> None:
        pass

    engine = load(progress=progress)
    assert engine.draft is not None and asked == [progress]
    assert load(speculation="off").draft is None
    broken = changed_copy(tiny_pair.draft, tmp_path / "draft", vocab_size=99)
    monkeypatch.setattr(load_module, "builtin_draft", lambda: broken)
    assert "the draft was left out" in load(speculation="optional").draft_off_reason


def test_an_empty_name_is_not_no_name(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(**_: object) -> Path:
        raise AssertionError("the built-in target was not asked for")

    monkeypatch.setattr(import_module("blockdraft.engine.load"), "ensure_target", fetched)
    with pytest.raises(BlockdraftError):
        load(tiny_pair.draft, "")
    with pytest.raises(BlockdraftError):
        load(None, "", speculation="off")


def test_the_built_in_draft_stands_in_the_package() -> None:
    folder = load_module.builtin_draft()
    assert folder.parts[-3:] == ("blockdraft", "data", "smollm2-135m")


def test_the_block_of_a_draft_that_does_not_state_it(tiny_pair: TinyPair, tmp_path: Path) -> None:
    silent = changed_copy(tiny_pair.draft, tmp_path / "draft", block_size=None, nest_block_size=None)
    with pytest.raises(BlockdraftError, match="block_size is missing"):
        load(silent, tiny_pair.target)
    engine = load(silent, tiny_pair.target, block_size=4)
    [completion] = engine.run([REQUEST])
    assert completion.speculation.width == 4 and completion.token_ids == plain(engine)
    with pytest.raises(BlockdraftError, match=f"block_size is {BLOCK_SIZE} in the file and given as 4"):
        load(tiny_pair.draft, tiny_pair.target, block_size=4)
    with pytest.raises(BlockdraftError, match="block_size is 4 and speculation is off"):
        load(target=tiny_pair.target, speculation="off", block_size=4)
    words = ("generate", silent, "--target", tiny_pair.target, "hello", "--max-new-tokens", "4", "--json")
    [shown] = run_cli(*words, "--block-size", "3").json_lines
    assert shown["speculation"]["width"] == 3
    assert "block_size is missing" in run_cli(*words).refusal


def test_loading_is_silent(tiny_pair: TinyPair, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny_pair.draft, tiny_pair.target)
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize("dialect", ["speculators", "torchspec"])
def test_a_draft_of_another_dialect_runs_as_the_same_draft(tiny_pair: TinyPair, tmp_path: Path, dialect: str) -> None:
    config = draft_config(tiny_pair.facts, target_layer_ids=(0, 1), mask_token_id=MASK_ID)
    folders = [write_draft(tmp_path / "ours", config), tmp_path / "theirs"]
    convert(folders[0], folders[1], dialect)
    if dialect == "speculators":  # published files do not say how many layers the target has
        folders.append(changed_copy(folders[1], tmp_path / "published", num_target_layers=None))
    engines = [load(folder, tiny_pair.target) for folder in folders]
    runs = [engine.run([REQUEST])[0] for engine in engines]
    assert all(run.token_ids == plain(engines[0]) for run in runs)
    [work] = {(run.stats.num_steps, run.stats.num_draft_tokens, run.stats.num_accepted_draft_tokens) for run in runs}
    assert work[1] > 0
