"""Targets from transformers: taps, rows of unequal length, exact rollback, for each attention-only family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from blockdraft.errors import CheckpointError, PairError, RequestError, UnavailableError
from blockdraft.packed import PackedLinear, can_pack
from blockdraft.targets import HFTarget, Row, load_target
from blockdraft.targets.fused import FusedTarget, can_fuse
from blockdraft.targets.hf_attention import use_grouped_attention_
from tiny_targets import ATTENTION_ONLY, ROUNDS_TO_FLOAT32, VOCAB, random_ids, tiny_model

TAPS = (0, 2, 3)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_models: dict[str, Any] = {}


def model_of(family: str) -> Any:
    if family not in _models:
        _models[family] = tiny_model(family)
    return _models[family]


FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fused llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "fused llama, tied, llama3 positions": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "fused mistral": ("mistral", {"sliding_window": None}),
    "fused qwen2": ("qwen2", {}),
    "fused qwen3": ("qwen3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}),
}


def fused_target(name: str) -> FusedTarget:
    family, changes = FUSED[name]
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that do something
                parameter.add_(torch.rand_like(parameter) * 0.5)
    assert can_fuse(model)
    made = FusedTarget(model, HFTarget(model).facts, TAPS, pack=False)
    made._model = model  # for the comparison with the plain model
    return made


@pytest.fixture(params=[*sorted(ATTENTION_ONLY), *FUSED])
def target(request: pytest.FixtureRequest) -> Any:
    if request.param in FUSED:
        yield fused_target(request.param)
        return
    made = HFTarget(model_of(request.param), TAPS)
    yield made
    made.close()


def fresh(target: HFTarget, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and taps of all ids from one forward on a new row."""
    row = target.new_row()
    (scored,) = target.forward([ids], [row])
    target.free(row)
    return scored.logits_TV, scored.taps_TNE


def num_hooks(model: Any) -> int:
    return sum(len(layer._forward_hooks) for layer in model.get_decoder().layers)


def same(found: Tensor, expected: Tensor, target: Any = None, *, to_plain: bool = False) -> None:
    rounds = target is not None and target.facts.model_type in ROUNDS_TO_FLOAT32
    rounds = rounds or (to_plain and isinstance(target, FusedTarget))  # the plain model norms in float32
    torch.testing.assert_close(found, expected, atol=1e-4 if rounds else 1e-10, rtol=0)


def test_taps_and_logits_are_those_of_the_plain_model(target: HFTarget) -> None:
    ids = random_ids(23)
    logits_TV, taps_TNE = fresh(target, ids)
    outputs: dict[int, Tensor] = {}
    handles = [
        layer.register_forward_hook(
            lambda _m, _a, out, i=i: outputs.update({i: out[0] if isinstance(out, tuple) else out})
        )
        for i, layer in enumerate(target._model.get_decoder().layers)
    ]
    with torch.no_grad():
        plain = target._model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    same(logits_TV, plain.logits[0], target, to_plain=True)
    for column, layer in enumerate(TAPS):
        same(taps_TNE[:, column], outputs[layer][0], target, to_plain=True)
        if layer + 1 < 4:  # transformers puts the normed state in the last place
            same(taps_TNE[:, column], plain.hidden_states[layer + 1][0], target, to_plain=True)
    assert not torch.equal(taps_TNE[:, -1], plain.hidden_states[-1][0])
    assert not logits_TV.is_inference() and not taps_TNE.is_inference()


def test_one_forward_equals_two(target: HFTarget) -> None:
    ids = random_ids(30)
    logits_TV, taps_TNE = fresh(target, ids)
    for cut in (1, 8, 9, 10, 22, 29):
        row = target.new_row()
        parts = [target.forward([part], [row])[0] for part in (ids[:cut], ids[cut:])]
        same(torch.cat([part.logits_TV for part in parts]), logits_TV, target)
        same(torch.cat([part.taps_TNE for part in parts]), taps_TNE, target)
        assert row.num_positions == 30
        target.free(row)


@pytest.mark.parametrize("num_prompt", [0, 3, 8, 12, 40])
def test_rollback_then_forward_equals_fresh_prefill(target: HFTarget, num_prompt: int) -> None:
    prompt, block, more = random_ids(num_prompt, 1), random_ids(7, 2), random_ids(5, 3)
    for keep in range(8):
        row = target.new_row()
        if num_prompt:
            target.forward([prompt], [row], num_logits=0)
        target.forward([block], [row])
        target.rollback([row], [keep])
        assert row.num_positions == num_prompt + keep
        (scored,) = target.forward([more], [row])
        logits_TV, taps_TNE = fresh(target, torch.cat([prompt, block[:keep], more]))
        same(scored.logits_TV, logits_TV[num_prompt + keep :], target)
        same(scored.taps_TNE, taps_TNE[num_prompt + keep :], target)
        target.free(row)


def test_rollback_right_after_prefill_and_in_two_steps(target: HFTarget) -> None:
    prompt, more = random_ids(33, 1), random_ids(4, 2)
    for steps in ([20], [30, 11], [32, 31, 2], [0]):
        row = target.new_row()
        target.forward([prompt], [row], num_logits=1)
        for keep in steps:
            target.rollback([row], [keep])
        (scored,) = target.forward([more], [row])
        logits_TV, _ = fresh(target, torch.cat([prompt[: steps[-1]], more]))
        same(scored.logits_TV, logits_TV[steps[-1] :], target)


def test_forty_steps_of_every_acceptance_length_far_beyond_the_window(target: HFTarget) -> None:
    ids = random_ids(200, 4)
    logits_TV, taps_TNE = fresh(target, ids)
    row = target.new_row()
    target.forward([ids[:21]], [row], num_logits=0)
    at = 21
    for step in range(40):
        kept = step % 6
        block = torch.cat([ids[at : at + kept], random_ids(6 - kept, 100 + step)])
        (scored,) = target.forward([block], [row])
        same(scored.logits_TV[:kept], logits_TV[at : at + kept], target)
        same(scored.taps_TNE[:kept], taps_TNE[at : at + kept], target)
        target.rollback([row], [kept])
        at += kept
    assert row.num_positions == at > 100


def test_rows_of_unequal_length_do_not_see_each_other(target: HFTarget) -> None:
    texts = [random_ids(n, n) for n in (3, 17, 31)]
    rows = [target.new_row() for _ in texts]
    target.forward(texts, rows, num_logits=1)
    blocks = [random_ids(n, 50 + n) for n in (4, 1, 6)]
    target.forward(blocks, rows)
    target.rollback(rows, [2, 0, 6])
    last = [random_ids(n, 70 + n) for n in (1, 5, 3)]
    scored = target.forward(last, rows)
    for text, block, keep, end, one in zip(texts, blocks, [2, 0, 6], last, scored, strict=True):
        logits_TV, taps_TNE = fresh(target, torch.cat([text, block[:keep], end]))
        same(one.logits_TV, logits_TV[-len(end) :], target)
        same(one.taps_TNE, taps_TNE[-len(end) :], target)


def test_num_logits_keeps_the_last_positions(target: HFTarget) -> None:
    ids = random_ids(12)
    logits_TV, taps_TNE = fresh(target, ids)
    for count in (0, 1, 5, 12):
        (scored,) = target.forward([ids], [target.new_row()], num_logits=count)
        same(scored.logits_TV, logits_TV[12 - count :], target)
        same(scored.taps_TNE, taps_TNE, target)
        assert scored.logits_TV.dtype == target.dtype


def test_num_logits_of_a_model_that_gives_them_all_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    plain = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *args, cache=None, logits_to_keep=0, **kwargs: plain(*args, cache=cache, **kwargs)
    )
    target, ids = HFTarget(model, TAPS), random_ids(12)
    logits_TV, _ = fresh(target, ids)
    for count in (0, 1, 5, 12, 20):
        (scored,) = target.forward([ids], [target.new_row()], num_logits=count)
        same(scored.logits_TV, logits_TV[12 - min(count, 12) :])
        for one in target.forward([ids, ids], [target.new_row(), target.new_row()], num_logits=count):
            same(one.logits_TV, logits_TV[12 - min(count, 12) :])
    target.close()


def test_embed_and_logits_are_the_bare_matrices(target: HFTarget) -> None:
    ids = torch.tensor([[3, 4], [5, 6]])
    weight = target._model.get_input_embeddings().weight
    same(target.embed(ids), weight[ids])
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    same(target.logits(hidden), hidden @ target._model.get_output_embeddings().weight.T)


def test_the_taps_of_a_model_whose_layers_add_constants() -> None:
    model = tiny_model("llama")
    for index, layer in enumerate(model.model.layers):
        layer.forward = lambda hidden_states, *_, index=index, **kw: _add(hidden_states, index, **kw)
    ids = random_ids(5)
    target = HFTarget(model, (0, 1, 3))
    _, taps_TNE = fresh(target, ids)
    start = target.embed(ids)
    for column, total in enumerate((1.0, 11.0, 1111.0)):
        same(taps_TNE[:, column], start + total)


def _add(hidden: Tensor, index: int, **kwargs: Any) -> Tensor:
    state = hidden.new_zeros(1, 2, hidden.shape[1], 8)
    kwargs["cache"].update(state, state, index)
    return hidden + 10.0**index


def test_two_targets_on_one_model_keep_apart_and_close_takes_the_hooks_off() -> None:
    model = tiny_model("llama")
    one, two, bare = HFTarget(model, (0,)), HFTarget(model, (1, 3)), HFTarget(model)
    ids = random_ids(6)
    _, first = fresh(one, ids)
    _, second = fresh(two, ids)
    _, none = fresh(bare, ids)
    assert first.shape == (6, 1, 32) and second.shape == (6, 2, 32) and none.shape == (6, 0, 32)
    assert not torch.equal(first[:, 0], second[:, 0])
    with pytest.raises(ValueError, match="another target"):
        one.forward([ids], [two.new_row()])
    for target in (one, two, bare):
        target.close()
    assert num_hooks(model) == 0


@pytest.mark.parametrize("taps", [(4,), (-1,), (0, 0), (1.0,), (True,)])
def test_taps_that_do_not_fit_are_refused(taps: Any) -> None:
    model = model_of("llama")
    before = num_hooks(model)
    with pytest.raises(PairError, match=r"4 layers.*0\.\.3"):
        HFTarget(model, taps)
    assert num_hooks(model) == before


def test_past_the_maximum_length_nothing_runs() -> None:
    target = HFTarget(tiny_model("llama", max_position_embeddings=16))
    long, short = target.new_row(), target.new_row()
    target.forward([random_ids(14)], [long])
    with pytest.raises(RequestError, match=r"14 \+ 3 .* at most 16"):
        target.forward([random_ids(2), random_ids(3)], [short, long])
    assert (short.num_positions, long.num_positions) == (0, 14)
    target.forward([random_ids(2)], [long])
    assert long.num_positions == 16


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_forward_that_fails_leaves_every_row_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFTarget, "way", None)  # one row after another
    target = HFTarget(model_of(family), TAPS)
    ids = [random_ids(20, 1), random_ids(25, 2)]
    rows = [target.new_row(), target.new_row()]
    target.forward(ids, rows)
    layer = target._layers[2]
    calls = 0

    def fail_on_the_second_row(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(fail_on_the_second_row)
    with pytest.raises(KeyboardInterrupt):
        target.forward([random_ids(4, 3), random_ids(70, 4)], rows)
    handle.remove()
    assert [row.num_positions for row in rows] == [20, 25]
    scored = target.forward([random_ids(3, 5), random_ids(3, 6)], rows)
    for text, more, one in zip(ids, [random_ids(3, 5), random_ids(3, 6)], scored, strict=True):
        same(one.logits_TV, fresh(target, torch.cat([text, more]))[0][-3:])
    target.close()


def test_calls_that_break_the_contract_are_named() -> None:
    target = HFTarget(model_of("llama"))
    row = target.new_row()
    with pytest.raises(ValueError, match="at least one id"):
        target.forward([random_ids(0)], [row])
    with pytest.raises(ValueError, match="no row twice"):
        target.forward([random_ids(1), random_ids(1)], [row, row])
    target.forward([random_ids(3)], [row])
    for keep in (-1, 4):
        with pytest.raises(ValueError, match="cannot keep"):
            target.rollback([row], [keep])
    target.rollback([row], [2])
    with pytest.raises(ValueError, match="cannot keep"):
        target.rollback([row], [3])
    target.free(row)
    target.free(row)
    assert row.num_bytes == 0
    with pytest.raises(ValueError, match="freed"):
        target.forward([random_ids(1)], [row])


def test_a_sliding_row_stays_small() -> None:
    target = HFTarget(tiny_model("mistral", max_position_embeddings=4096))
    row = target.new_row()
    sizes = []
    for chunk in range(40):
        target.forward([random_ids(50, chunk)], [row], num_logits=0)
        sizes.append(row.num_bytes)
    per_position = 4 * 2 * 2 * 8 * 8
    assert max(sizes) <= per_position * (50 + 8 + 64)
    whole = HFTarget(tiny_model("llama", max_position_embeddings=4096))
    row = whole.new_row()
    for chunk in range(10):
        whole.forward([random_ids(50, chunk)], [row], num_logits=0)
    assert per_position * 500 <= row.num_bytes <= per_position * 1000


def test_a_rotary_table_that_moves_with_the_length_caps_the_length() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    assert HFTarget(model).facts.max_length == 32
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert HFTarget(tiny_model("llama", rope_parameters=dynamic)).facts.max_length == 256


def test_facts_come_from_what_is_in_memory() -> None:
    model = tiny_model("llama")
    model.resize_token_embeddings(64)
    model.generation_config.eos_token_id = [2, 7]
    facts = HFTarget(model).facts
    assert (facts.vocab_size, facts.eos_token_ids, facts.pad_token_id) == (64, (2, 7), 0)
    assert (facts.hidden_size, facts.num_layers, facts.max_length) == (32, 4, 256)


# ---- loading ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_fuses_what_has_a_fused_form(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_model("llama", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(tmp_path)
    fused = load_target(tmp_path, tap_layer_ids=TAPS, dtype=dtype)
    plain = load_target(tmp_path, tap_layer_ids=TAPS, dtype=dtype, fused=False)
    assert type(fused) is FusedTarget and type(plain) is HFTarget and fused.facts == plain.facts
    found, expected = (fresh(target, random_ids(40))[0].float() for target in (fused, plain))
    assert (found - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.1) * expected.abs().max()
    tiny_model("gemma2").save_pretrained(tmp_path / "other")
    assert type(load_target(tmp_path / "other")) is HFTarget
    with pytest.raises(UnavailableError, match="no fused form"):
        load_target(tmp_path / "other", fused=True)


def test_a_fused_form_that_computes_something_else_is_refused() -> None:
    model = tiny_model("llama")
    facts = HFTarget(model).facts
    model.model.layers[2].self_attn.scaling *= 2  # the fused form takes the first layer's for all
    with pytest.raises(PairError, match="off by"):
        FusedTarget(model, facts, TAPS, pack=False)


def test_windows_and_positions_that_change_with_the_length_are_not_fused() -> None:
    assert not can_fuse(tiny_model("mistral")) and not can_fuse(tiny_model("qwen3"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    assert not can_fuse(tiny_model("llama", rope_parameters=dynamic))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_packs_on_the_cpu_and_stays_near_the_plain_model(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_model("llama", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(tmp_path)
    packed = load_target(tmp_path, tap_layer_ids=TAPS, dtype=dtype, fused=False)
    plain = load_target(str(tmp_path), tap_layer_ids=TAPS, dtype=dtype, pack=False, fused=False)
    head = packed._model.get_output_embeddings()
    assert isinstance(head, PackedLinear) == can_pack(torch.nn.Linear(4, 4).to(dtype))
    assert not isinstance(plain._model.get_output_embeddings(), PackedLinear)
    ids = random_ids(20)
    limit = 1e-4 if dtype == torch.float32 else 0.2
    for found, expected in zip(fresh(packed, ids), fresh(plain, ids), strict=True):
        assert found.dtype == dtype
        assert (found - expected).abs().max() <= limit * expected.abs().max()
    assert torch.equal(packed.embed(ids), plain.embed(ids))
    assert packed.logits(packed.embed(ids)).shape == (20, VOCAB)


def test_load_says_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        load_target(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_target(tmp_path)
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        load_target(tmp_path / "config.json")
    with pytest.raises(PairError, match="4 layers"):
        load_target(tmp_path, tap_layer_ids=(1, 9))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_target(tmp_path)


def test_load_of_an_unknown_name_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match="give a local folder"):
        load_target("nobody/blockdraft-no-such-model")


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_the_grouped_attention_gives_what_the_stock_one_gives(family: str) -> None:
    stock, grouped = HFTarget(tiny_model(family), TAPS), HFTarget(tiny_model(family), TAPS)
    assert use_grouped_attention_(grouped._model) and not use_grouped_attention_(grouped._model)
    rows = [target.new_row() for target in (stock, grouped)]
    for step, count in enumerate((1, 7, 40, 5, 1, 8, 1, 32, 33)):
        ids = random_ids(count, step)
        scored = [target.forward([ids], [row])[0] for target, row in zip((stock, grouped), rows, strict=True)]
        same(scored[1].logits_TV, scored[0].logits_TV)
        same(scored[1].taps_TNE, scored[0].taps_TNE)


def test_a_model_with_its_own_attention_keeps_it() -> None:
    for family in ("gemma2", "gpt_oss"):
        model = tiny_model(family)
        kept = model.config._attn_implementation
        assert not use_grouped_attention_(model) and model.config._attn_implementation == kept


# ---- any order of calls ----


class RowsInAnyOrder(RuleBasedStateMachine):
    """Whatever is fed, taken back, opened or freed: a row's next logits are those of a fresh prefill."""

    family = "llama"

    def __init__(self) -> None:
        super().__init__()
        self.target = HFTarget(model_of(self.family), (1, 3))
        self.rows: list[tuple[Row, list[int], int]] = []  # row, ids it holds, how many came last

    @rule()
    @precondition(lambda self: len(self.rows) < 3)
    def open(self) -> None:
        self.rows.append((self.target.new_row(), [], 0))

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def free(self, data: st.DataObject) -> None:
        row, _, _ = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.target.free(row)

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.rows) < 3)
    def clone(self, data: st.DataObject) -> None:
        row, ids, _ = data.draw(st.sampled_from(self.rows))
        length = data.draw(st.integers(0, len(ids))) if self.target.can_truncate else len(ids)
        self.rows.append((self.target.copy(row, length), ids[:length], 0))

    @rule(data=st.data(), is_prefill=st.booleans())
    @precondition(lambda self: self.rows)
    def forward(self, data: st.DataObject, is_prefill: bool) -> None:
        """One row or several, each with as many ids as it likes."""
        indices = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, unique=True))
        counts = [data.draw(st.integers(1, 14)) for _ in indices]
        if any(len(self.rows[index][1]) + count > 120 for index, count in zip(indices, counts, strict=True)):
            return
        blocks = [random_ids(count, data.draw(st.integers(0, 5))) for count in counts]
        rows = [self.rows[index][0] for index in indices]
        scored = self.target.forward(blocks, rows, num_logits=0 if is_prefill else None)
        for index, new, one in zip(indices, blocks, scored, strict=True):
            row, ids, _ = self.rows[index]
            ids = ids + new.tolist()
            logits_TV, taps_TNE = fresh(self.target, torch.tensor(ids))
            same(one.logits_TV, logits_TV[len(ids) :] if is_prefill else logits_TV[-len(new) :])
            same(one.taps_TNE, taps_TNE[-len(new) :])
            self.rows[index] = (row, ids, len(new))

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def rollback(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.rows) - 1))
        row, ids, last = self.rows[index]
        keep = data.draw(st.integers(0, last))
        self.target.rollback([row], [keep])
        self.rows[index] = (row, ids[: len(ids) - last + keep], keep)

    @invariant()
    def lengths_agree(self) -> None:
        assert all(row.num_positions == len(ids) for row, ids, _ in self.rows)

    def teardown(self) -> None:
        self.target.close()


class SlidingRowsInAnyOrder(RowsInAnyOrder):
    family = "qwen3"


_machine: Callable[..., Any] = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRows = RowsInAnyOrder.TestCase
TestRows.settings = _machine
TestSlidingRows = SlidingRowsInAnyOrder.TestCase
TestSlidingRows.settings = _machine
