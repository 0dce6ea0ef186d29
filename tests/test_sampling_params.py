"""SamplingParams: what is refused and how; the processing of logits into p; logprobs; seeds."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.accept import SamplingParams, greedy_ids, logprobs, request_generators, target_distribution
from blockdraft.errors import RequestError

INF, NAN = math.inf, math.nan
BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, NAN, INF, -INF, True, "1", None, 1e-6, 101],
    "top_k": [0, -1, 1.0, True, "4", NAN],
    "top_p": [0, 0.0, -0.1, 1.01, NAN, INF, True, None],
    "min_p": [-0.1, 1.01, NAN, True, None],
    "repetition_penalty": [0, -1, NAN, INF, True, 1e-30, 1000],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, True, "0"],
    "presence_penalty": [-2.1, 2.1, NAN, INF, False, "0"],
    "logit_bias": [
        {-1: 1.0}, {"3": 1.0}, {True: 1.0}, {1.0: 1.0}, {3: NAN}, {3: INF}, {3: True}, {3: 101}, {3: None},
        [3], None,
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_refused_in_one_line_that_names_the_field(name: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    text = str(error.value)
    assert name in text and "\n" not in text and "must" in text


def test_accepts_the_edges_and_stores_floats() -> None:
    params = SamplingParams(temperature=1, top_k=1, top_p=1, min_p=1, logit_bias={0: -100, 7: 100})
    assert isinstance(params.temperature, float) and isinstance(params.logit_bias[0], float)
    assert SamplingParams() == SamplingParams(temperature=0) and SamplingParams().is_greedy
    assert copy.deepcopy(params) == params and isinstance(hash(params), int)


def test_the_bias_is_a_copy_and_checked_against_the_vocabulary() -> None:
    bias = {9: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[10] = 2.0
    assert params.logit_bias == {9: 1.0}
    params.check_vocab(10)
    with pytest.raises(RequestError, match=r"id 9.*0 to 8"):
        params.check_vocab(9)


def distribution(logits: object, params: SamplingParams, **kwargs: object) -> torch.Tensor:
    logits_TV = torch.as_tensor(logits, dtype=torch.float64)
    arguments: dict[str, object] = {"history": [0], "num_prompt": 1, "proposals": [0] * (len(logits_TV) - 1)}
    return target_distribution(logits_TV, params, **{**arguments, **kwargs})  # type: ignore[arg-type]


def by_hand(logits: list[float], temperature: float, top_k: int | None, top_p: float, min_p: float) -> list[float]:
    """The documented order, with lists."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    top = max(logits)
    weights = {i: math.exp((logits[i] - top) / temperature) for i in order}
    total = sum(weights.values())
    probs = {i: weights[i] / total for i in order}
    kept, before = [], 0.0
    for i in order:
        if top_p == 1.0 or before < top_p:
            kept.append(i)
        before += probs[i]
    kept = [i for i in kept if probs[i] >= min_p * probs[order[0]]]
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(logits))]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda x: x / 3), min_size=1, max_size=9),
    temperature=st.sampled_from([0.3, 0.6, 1.0, 1.3]),
    top_k=st.sampled_from([None, 1, 2, 4, 20]),
    top_p=st.sampled_from([1.0, 0.903, 0.601, 0.05]),
    min_p=st.sampled_from([0.0, 0.2001, 1.0]),
)
def test_the_documented_order(
    logits: list[float], temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = distribution([logits, logits[::-1]], params)
    for row, values in zip(got.tolist(), (logits, logits[::-1]), strict=True):
        assert row == pytest.approx(by_hand(values, temperature, top_k, top_p, min_p), abs=1e-12)


def test_top_k_comes_before_top_p_and_ties_keep_the_lowest_ids() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    # after top_k=2 the first id alone holds 0.57 > 0.55; before it, it would hold 0.4
    assert distribution(row, SamplingParams(temperature=1, top_k=2, top_p=0.55)).tolist() == [[1, 0, 0, 0]]
    assert distribution([[1.0] * 6], SamplingParams(temperature=1, top_k=4))[0].tolist() == [0.25] * 4 + [
        0,
        0,
    ]
    assert distribution([[1.0] * 5], SamplingParams(temperature=1, top_p=0.5))[0, 3:].tolist() == [0, 0]
    assert distribution([[2.0, 5.0, 5.0]], SamplingParams())[0].tolist() == [0, 1, 0]


def test_large_rows_use_the_sorted_prefix_and_agree_with_a_whole_sort() -> None:
    generator = torch.Generator().manual_seed(3)
    logits_TV = torch.randn(3, 9000, generator=generator) * torch.tensor([[6.0], [1.0], [0.0]])
    got = target_distribution(
        logits_TV, SamplingParams(temperature=1, top_p=0.9), history=[0], num_prompt=1, proposals=[1, 2]
    )
    for i, row in enumerate(logits_TV.double().tolist()):
        want = torch.tensor(by_hand(row, 1.0, None, 0.9, 0.0))
        # float32 may disagree about the one id at the edge of the set
        assert int(((got[i] > 0) != (want > 0)).sum()) <= 1
        torch.testing.assert_close(got[i], want.float(), atol=5e-4, rtol=1e-3)


def test_small_temperature_and_infinite_logits_stay_finite() -> None:
    got = target_distribution(
        torch.tensor([[1e4, 1e4 - 1, -INF]]),
        SamplingParams(temperature=1e-5),
        history=[0],
        num_prompt=1,
        proposals=[],
    )
    assert got.dtype == torch.float32 and got.tolist() == [[1, 0, 0]]
    hot = distribution([[1.0, -INF, 1.0]], SamplingParams(temperature=100.0))
    assert hot.tolist() == [[0.5, 0, 0.5]]


def test_penalties_follow_the_proposals_row_by_row() -> None:
    """Row i under speculation equals a plain row whose history really holds the proposals."""
    generator = torch.Generator().manual_seed(1)
    logits_TV = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    params = SamplingParams(
        temperature=0.9,
        repetition_penalty=1.7,
        frequency_penalty=0.6,
        presence_penalty=-0.4,
        logit_bias={2: 1.5, 6: -9},
    )
    history, proposals = [5, 5, 1, 3, 1], [1, 4, 4]
    got = distribution(logits_TV, params, history=history, num_prompt=3, proposals=proposals)
    for i in range(4):
        past = history + proposals[:i]
        values = logits_TV[i].tolist()
        for token, bias in params.logit_bias.items():
            values[token] += bias
        for token in set(past):
            values[token] *= 1 / 1.7 if values[token] > 0 else 1.7
        for token in set(past[3:]):
            values[token] -= 0.6 * past[3:].count(token) - 0.4
        assert got[i].tolist() == pytest.approx(by_hand(values, 0.9, None, 1.0, 0.0), abs=1e-12)


def test_banned_ids_are_per_row_and_beat_the_bias() -> None:
    params = SamplingParams(logit_bias={1: 100.0})
    logits_TV = torch.zeros(3, 4, dtype=torch.bfloat16)
    banned = [{1, 0}, {1}, ()]
    arguments = {"history": [0, 2], "num_prompt": 2, "proposals": [2, 3], "banned": banned}
    assert greedy_ids(logits_TV, params, **arguments).tolist() == [2, 0, 1]  # type: ignore[arg-type]
    warm = SamplingParams(temperature=1.0, logit_bias={1: 100.0})
    assert target_distribution(logits_TV, warm, **arguments)[:2, 1].tolist() == [0, 0]  # type: ignore[arg-type]
    assert logits_TV.eq(0).all(), "the caller's logits were changed"


def test_greedy_rows_are_one_hot_and_equal_greedy_ids() -> None:
    logits_TV = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)).bfloat16()
    for params in (SamplingParams(), SamplingParams(repetition_penalty=3.0, top_k=2, top_p=0.5, min_p=0.3)):
        arguments = {"history": [1, 2], "num_prompt": 1, "proposals": [3, 4]}
        ids = greedy_ids(logits_TV, params, **arguments)  # type: ignore[arg-type]
        p_TV = target_distribution(logits_TV, params, **arguments)  # type: ignore[arg-type]
        assert p_TV.dtype == torch.float32 and p_TV.sum() == 3 and p_TV.argmax(-1).tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logprobs_are_raw_log_softmax(dtype: torch.dtype) -> None:
    logits_TV = torch.randn(3, 9, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits_TV[1] = 1.0
    want = logits_TV.double().log_softmax(-1)
    got = logprobs(logits_TV, [8, 0, 3], top_n=5)
    for i, entry in enumerate(got):
        order = sorted(range(9), key=lambda j: (-float(logits_TV[i, j]), j))[:5]
        assert [token for token, _ in entry.top] == order
        assert entry.logprob == pytest.approx(float(want[i, entry.token_id]), abs=1e-6)
        assert [value for _, value in entry.top] == pytest.approx(want[i, order].tolist(), abs=1e-6)
    assert [entry.token_id for entry in got] == [8, 0, 3]
    assert logprobs(logits_TV, [1, 1, 1], top_n=0)[2].top == () and logprobs(logits_TV[:0], [], top_n=2) == []


def streams(seed: int | None) -> list[list[float]]:
    return [torch.rand(8, generator=generator).tolist() for generator in request_generators(seed)]


def test_a_seed_reproduces_two_different_streams() -> None:
    assert streams(7) == streams(7) and streams(2**63 - 1) == streams(2**63 - 1)
    every = [stream for seed in (0, 1, 2, 7, 2**32, 2**32 + 1) for stream in streams(seed)]
    assert all(a != b for a, b in itertools.combinations(every, 2))


def test_unseeded_requests_differ() -> None:
    every = [stream for _ in range(5) for stream in streams(None)]
    assert all(a != b for a, b in itertools.combinations(every, 2))


def test_the_two_streams_are_uncorrelated() -> None:
    pairs = torch.stack(
        [torch.stack([torch.rand((), generator=g) for g in request_generators(s)]) for s in range(4000)]
    )
    assert abs(float(torch.corrcoef(pairs.T)[0, 1])) < 4 / math.sqrt(4000)


@pytest.mark.parametrize("seed", [True, -1, 1.0, "1", 2**63])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(RequestError, match="seed is"):
        request_generators(seed)  # type: ignore[arg-type]
