"""The lossless core: what the target samples from, and which proposals may stand.

Owns the processing of target logits into the distribution p, the acceptance rule with its residual, the
convention for reported logprobs, and the two random streams of a request. Pure functions on tensors of one
request. Must not know models, caches, words, stop rules or other requests.

Shape letters: T positions fed to the target, G = T-1 proposals, V vocabulary, M candidates per proposal.
Row i of a T-shaped tensor is the target's answer after the anchor and the first i proposals.

Processing order of a row (the same for plain decoding, where G = 0):
  1. logit_bias is added                                                  (OpenAI)
  2. repetition_penalty over prompt + generated ids: logit / r if logit > 0, else logit * r   (HF, vLLM)
  3. frequency_penalty * count + presence_penalty * [count > 0], generated ids only, is subtracted   (OpenAI)
  4. banned ids get -inf, and so do all that are not allowed (a grammar)
  5. temperature 0: argmax, lowest id among equals; otherwise divide by temperature
  6. top_k: exactly k ids stay, among equals the lowest ids
  7. softmax
  8. top_p: in descending order an id stays while the mass before it is < top_p, among equals the lowest ids
  9. min_p: an id stays if its probability is >= min_p * the largest one
 10. renormalise
Steps 1-3 and 6-8 stand as in vLLM; top_k before top_p is also the order of SGLang's kernels and of the
DFlash reference implementation; min_p last is SGLang's place for it (vLLM cuts by min_p before top_k).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.errors import RequestError

_SORT_PREFIXES = (512, 8192)  # so many largest probabilities are tried before a whole row is sorted for top_p


def check_number(name: str, value: object, low: float, high: float, advice: str = "") -> float:
    """`value` as a float inside [low, high]; a RequestError for anything else, NaN and booleans included."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and low <= value <= high):  # type: ignore[operator]
        hint = f"; {advice}" if advice else ""
        raise RequestError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}{hint}")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request samples. The order in which the fields act is in the module docstring.

    top_k, top_p and min_p never remove the most likely id, so with temperature 0 they change nothing.
    """

    temperature: float = 0.0
    """0 is greedy; otherwise 0.00001 to 100."""
    top_k: int | None = None
    """Number of ids kept; None keeps all."""
    top_p: float = 1.0
    """In (0, 1]; 1 keeps all."""
    min_p: float = 0.0
    """In [0, 1]; 0 keeps all."""
    repetition_penalty: float = 1.0
    """0.01 to 100 on ids of prompt and generated text (meaning of HF and vLLM); 1 is off."""
    frequency_penalty: float = 0.0
    """-2 to 2 per earlier occurrence in the generated text (meaning of OpenAI)."""
    presence_penalty: float = 0.0
    """-2 to 2 once for an id of the generated text (meaning of OpenAI)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these ids, -100 to 100."""

    def __post_init__(self) -> None:
        def store(name: str, low: float, high: float, advice: str = "") -> None:
            object.__setattr__(self, name, check_number(name, getattr(self, name), low, high, advice))

        store("temperature", 0.0, 100.0, "0 is greedy")
        if 0.0 < self.temperature < 1e-5:
            raise RequestError(
                f"temperature is {self.temperature!r}; it must be 0 or at least 0.00001; use 0 for greedy"
            )
        is_int = isinstance(self.top_k, int) and not isinstance(self.top_k, bool)
        if self.top_k is not None and (not is_int or self.top_k < 1):
            raise RequestError(f"top_k is {self.top_k!r}; it must be an integer >= 1; None keeps all ids")
        store("top_p", 0.0, 1.0, "1 keeps all ids")
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 and at most 1; use temperature 0 for greedy")
        store("min_p", 0.0, 1.0, "0 keeps all ids")
        store("repetition_penalty", 0.01, 100.0, "1 is off")
        store("frequency_penalty", -2.0, 2.0, "0 is off")
        store("presence_penalty", -2.0, 2.0, "0 is off")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """True if the target's most likely id is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the ids that came before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def check_vocab(self, vocab_size: int) -> None:
        """Nothing; a RequestError if logit_bias names an id that the target does not have."""
        for token_id in self.logit_bias:
            if token_id >= vocab_size:
                raise RequestError(
                    f"logit_bias names id {token_id}; the target has ids 0 to {vocab_size - 1}; remove it"
                )


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {bias!r}; it must map token ids to numbers from -100 to 100")
    for token_id in bias:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise RequestError(f"logit_bias names id {token_id!r}; ids must be integers >= 0")
    return {i: check_number(f"logit_bias of id {i}", value, -100.0, 100.0) for i, value in bias.items()}


# -------------------------------------------------------------------------------------- target distribution


def greedy_ids(
    logits_TV: Tensor,
    params: SamplingParams,
    *,
    history: Sequence[int],
    num_prompt: int,
    proposals: Sequence[int],
    banned: Sequence[Collection[int]] = (),
    allowed_TV: Tensor | None = None,
) -> Tensor:
    """The most likely id of every row, [T], on the logits' device: steps 1-4 and an argmax, no softmax.

    Arguments as for `target_distribution`; the temperature is not looked at.
    """
    return _adjusted(logits_TV, params, history, num_prompt, proposals, banned, allowed_TV).argmax(dim=-1)


def target_distribution(
    logits_TV: Tensor,
    params: SamplingParams,
    *,
    history: Sequence[int],
    num_prompt: int,
    proposals: Sequence[int],
    banned: Sequence[Collection[int]] = (),
    allowed_TV: Tensor | None = None,
) -> Tensor:
    """p_TV, the distribution the target samples from; float32, or float64 for float64 logits.

    `history` holds prompt and committed ids (the anchor is its last one), the first `num_prompt` of them the
    prompt; row i is processed with history + proposals[:i], so penalties are exact under speculation.
    `banned` gives the ids that each of the T rows must not emit; an empty sequence bans nothing.
    `allowed_TV` (bool) is true for the ids that each row may emit, None allows all; every row must keep an id whose
    logit is above -inf.
    Temperature 0 gives one-hot rows; a greedy caller saves them with `greedy_ids` and `accept_greedy`.
    """
    dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    adjusted_TV = _adjusted(logits_TV, params, history, num_prompt, proposals, banned, allowed_TV)
    if params.is_greedy:
        one_hot_TV = torch.zeros(logits_TV.shape, dtype=dtype, device=logits_TV.device)
        return one_hot_TV.scatter_(1, adjusted_TV.argmax(dim=-1, keepdim=True), 1.0)
    scores_TV = adjusted_TV.to(dtype)
    # relative to the row's maximum, so that a small temperature cannot overflow
    scores_TV = (scores_TV - scores_TV.amax(dim=-1, keepdim=True)) / params.temperature
    vocab_size = scores_TV.shape[1]
    top_k = vocab_size if params.top_k is None else min(params.top_k, vocab_size)
    if top_k < vocab_size:
        largest_TM = scores_TV.topk(top_k, dim=-1).values
        kept_TV = _largest(scores_TV, largest_TM[:, -1:], top_k)
        scores_TV = scores_TV.masked_fill(~kept_TV, float("-inf"))
    p_TV = scores_TV.softmax(dim=-1)
    if params.top_p < 1.0:
        p_TV = _cut_top_p(p_TV, params.top_p, top_k)
    if params.min_p > 0.0:
        p_TV = p_TV.masked_fill(p_TV < params.min_p * p_TV.amax(dim=-1, keepdim=True), 0.0)
    if params.top_p < 1.0 or params.min_p > 0.0:
        p_TV = p_TV / p_TV.sum(dim=-1, keepdim=True)
    return p_TV


def _adjusted(
    logits_TV: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    num_prompt: int,
    proposals: Sequence[int],
    banned: Sequence[Collection[int]],
    allowed_TV: Tensor | None,
) -> Tensor:
    """The logits after steps 1-4; the very tensor that was given if there is nothing to do."""
    num_rows, vocab_size = logits_TV.shape
    assert num_rows == len(proposals) + 1, f"{num_rows} rows for {len(proposals)} proposals"
    assert 0 <= num_prompt <= len(history)
    assert not banned or len(banned) == num_rows, f"{len(banned)} banned sets for {num_rows} rows"
    has_bans = any(len(ids) > 0 for ids in banned)
    if not (params.logit_bias or params.has_penalties or has_bans or allowed_TV is not None):
        return logits_TV
    dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    adjusted_TV = logits_TV.to(dtype, copy=True)
    device = logits_TV.device
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        adjusted_TV[:, ids] += torch.tensor(list(params.logit_bias.values()), dtype=dtype, device=device)
    if params.has_penalties:
        adjusted_TV = _penalised(adjusted_TV, params, history, num_prompt, proposals)
    for row, ids_of_row in enumerate(banned):
        if ids_of_row:
            assert len(set(ids_of_row)) < vocab_size, "every id is banned"
            adjusted_TV[row, torch.tensor(sorted(ids_of_row), device=device)] = float("-inf")
    if allowed_TV is not None:
        assert allowed_TV.shape == logits_TV.shape, (
            f"{tuple(allowed_TV.shape)} allowed, {tuple(logits_TV.shape)} logits"
        )
        adjusted_TV.masked_fill_(~allowed_TV, float("-inf"))
    return adjusted_TV


def _penalised(
    logits_TV: Tensor,
    params: SamplingParams,
    history: Sequence[int],
    num_prompt: int,
    proposals: Sequence[int],
) -> Tensor:
    """Steps 2 and 3."""
    num_rows, vocab_size = logits_TV.shape
    history_ids = torch.tensor(list(history), dtype=torch.long)
    prompt_V = torch.bincount(history_ids[:num_prompt], minlength=vocab_size) > 0
    count_TV = torch.bincount(history_ids[num_prompt:], minlength=vocab_size).repeat(num_rows, 1)
    for index, token_id in enumerate(proposals):
        count_TV[index + 1 :, token_id] += 1
    prompt_V, count_TV = prompt_V.to(logits_TV.device), count_TV.to(logits_TV.device)
    generated_TV = count_TV > 0
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        scaled_TV = torch.where(logits_TV > 0, logits_TV / factor, logits_TV * factor)
        logits_TV = torch.where(generated_TV | prompt_V, scaled_TV, logits_TV)
    if params.frequency_penalty != 0.0:
        logits_TV = logits_TV - params.frequency_penalty * count_TV.to(logits_TV.dtype)
    if params.presence_penalty != 0.0:
        logits_TV = logits_TV - params.presence_penalty * generated_TV.to(logits_TV.dtype)
    return logits_TV


def _largest(values_TV: Tensor, last_T1: Tensor, num_kept: int | Tensor) -> Tensor:
    """Mask [T, V] of exactly `num_kept` ids a row, lowest first among equals; last_T1: smallest one kept."""
    kept_TV = values_TV >= last_T1
    if bool((kept_TV.sum(dim=-1, keepdim=True) == num_kept).all()):
        return kept_TV  # no row has more equals at its edge than it has room for
    above_TV = values_TV > last_T1
    equal_TV = values_TV == last_T1
    num_open_T1 = num_kept - above_TV.sum(dim=-1, keepdim=True)
    return above_TV | (equal_TV & (equal_TV.cumsum(dim=-1) <= num_open_T1))


def _cut_top_p(p_TV: Tensor, top_p: float, num_candidates: int) -> Tensor:
    """p_TV with zeros outside the top_p set, not renormalised; at most `num_candidates` a row are above 0."""
    for size in (*_SORT_PREFIXES, num_candidates):
        size = min(size, num_candidates)
        is_whole = size == num_candidates
        sorted_TM = p_TV.topk(size, dim=-1).values
        ends_TM = sorted_TM.double().cumsum(dim=-1)
        if is_whole or bool((ends_TM[:, -1] >= top_p).all()):
            break
    starts_TM = torch.cat((torch.zeros_like(ends_TM[:, :1]), ends_TM[:, :-1]), dim=-1)
    num_kept_T1 = (starts_TM < top_p).sum(dim=-1, keepdim=True)
    last_T1 = sorted_TM.gather(1, num_kept_T1 - 1)
    return p_TV.masked_fill(~_largest(p_TV, last_T1, num_kept_T1), 0.0)


# ------------------------------------------------------------------------------------------------- logprobs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one emitted id; `top` holds (id, logprob), the most likely first, then the lowest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits_TV: Tensor, ids_T: Sequence[int], *, top_n: int) -> list[TokenLogprobs]:
    """Log-probabilities of the ids that rows 0..T-1 emitted, with the `top_n` most likely ids of each row.

    Convention: log-softmax of the target's raw logits, before bias, penalties, temperature and cuts (OpenAI's
    meaning, and vLLM's default `raw_logprobs`), so they do not depend on how an id was won.
    """
    num_rows, vocab_size = logits_TV.shape
    assert num_rows == len(ids_T) and 0 <= top_n <= vocab_size
    if num_rows == 0:
        return []
    scores_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    norm_T1 = scores_TV.logsumexp(dim=-1, keepdim=True)
    ids_T1 = torch.tensor(list(ids_T), dtype=torch.long, device=logits_TV.device)[:, None]
    chosen_T = (scores_TV.gather(1, ids_T1) - norm_T1)[:, 0].tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * num_rows
    if top_n > 0:
        last_T1 = scores_TV.topk(top_n, dim=-1).values[:, -1:]
        kept_TV = _largest(scores_TV, last_T1, top_n)
        top_ids_TM = kept_TV.nonzero()[:, 1].view(num_rows, top_n)
        values_TM = (scores_TV.gather(1, top_ids_TM) - norm_T1).tolist()
        pairs = (zip(*row, strict=True) for row in zip(top_ids_TM.tolist(), values_TM, strict=True))
        tops = [tuple(sorted(row, key=lambda pair: (-pair[1], pair[0]))) for row in pairs]
    return [TokenLogprobs(i, value, top) for i, value, top in zip(ids_T, chosen_T, tops, strict=True)]


# ----------------------------------------------------------------------------------------------- acceptance


@dataclass(frozen=True, eq=False, slots=True)
class OneHot:
    """q of a draft that chose its proposals without noise: all mass on them."""

    def probs_of(self, ids_G: Tensor) -> Tensor:
        """q_i(y_i), [G]."""
        return torch.ones(len(ids_G), dtype=torch.float64, device=ids_G.device)

    def row(self, index: int, ids_G: Tensor, vocab_size: int) -> Tensor:
        """The whole row q_index, [V] float64."""
        row_V = torch.zeros(vocab_size, dtype=torch.float64, device=ids_G.device)
        row_V[ids_G[index]] = 1.0
        return row_V


@dataclass(frozen=True, eq=False, slots=True)
class Dense:
    """q over the whole vocabulary: what each proposal was really drawn from, temperature included."""

    probs_GV: Tensor

    def probs_of(self, ids_G: Tensor) -> Tensor:
        """q_i(y_i), [G]."""
        return self.probs_GV.to(ids_G.device).gather(1, ids_G[:, None])[:, 0].double()

    def row(self, index: int, ids_G: Tensor, vocab_size: int) -> Tensor:
        """The whole row q_index, [V] float64."""
        assert self.probs_GV.shape[1] == vocab_size, "q and p have different vocabularies"
        return self.probs_GV[index].to(ids_G.device, torch.float64)


@dataclass(frozen=True, eq=False, slots=True)
class Sparse:
    """q over M candidates per proposal, zero elsewhere; a candidate listed twice has the sum of both."""

    ids_GM: Tensor
    probs_GM: Tensor

    def probs_of(self, ids_G: Tensor) -> Tensor:
        """q_i(y_i), [G]."""
        is_proposal_GM = self.ids_GM.to(ids_G.device) == ids_G[:, None]
        return (self.probs_GM.to(ids_G.device, torch.float64) * is_proposal_GM).sum(dim=-1)

    def row(self, index: int, ids_G: Tensor, vocab_size: int) -> Tensor:
        """The whole row q_index, [V] float64."""
        row_V = torch.zeros(vocab_size, dtype=torch.float64, device=ids_G.device)
        ids_M = self.ids_GM[index].to(ids_G.device)
        return row_V.index_add_(0, ids_M, self.probs_GM[index].to(ids_G.device, torch.float64))


def accept(
    proposals_G: Tensor | Sequence[int],
    q: OneHot | Dense | Sparse,
    p_TV: Tensor,
    generator: torch.Generator | None,
) -> tuple[int, int]:
    """(num_accepted, next_id): how many leading proposals stand, and the target's own id after them.

    Proposal y_i stands iff u * q_i(y_i) < p_i(y_i), u uniform in [0, 1). The first that falls is replaced by
    a draw from normalise(max(p_i - q_i, 0)), or from p_i where that has no mass; if none falls, the next id
    is a draw from the last row. The emitted law is p for every q that is the true conditional law of the
    proposals (top_k and top_p act on p only; an honest q needs none).
    `generator` must be independent of the one the draft drew from; None is enough if p is one-hot everywhere,
    since certain outcomes take no random number. G = 0 is plain decoding.
    """
    ids_G = torch.as_tensor(proposals_G, dtype=torch.long, device=p_TV.device)
    num_proposals = len(ids_G)
    assert p_TV.shape[0] == num_proposals + 1, f"{p_TV.shape[0]} rows of p for {num_proposals} proposals"
    if num_proposals > 0:
        p_of_G = p_TV[:-1].gather(1, ids_G[:, None])[:, 0].double()
        # waits for the device once for all rows
        pairs = torch.stack((p_of_G, q.probs_of(ids_G)), dim=1).tolist()
        for index, (p_of, q_of) in enumerate(pairs):
            assert p_of >= 0.0 and q_of > 0.0, f"proposal {index}: p={p_of}, q={q_of}; NaN, or no draw from q"
            if not _stands(p_of, q_of, generator):
                p_V = p_TV[index].double()
                residual_V = (p_V - q.row(index, ids_G, len(p_V))).clamp_(min=0.0)
                return index, _draw(residual_V if bool(residual_V.any()) else p_V, generator)
    return num_proposals, _draw(p_TV[-1].double(), generator)


def accept_greedy(proposals_G: Tensor | Sequence[int], greedy_T: Tensor | Sequence[int]) -> tuple[int, int]:
    """(num_accepted, next_id) for a greedy target: what `accept` gives for one-hot rows at `greedy_T`.

    Proposals stand while they equal the target's most likely id; the next id is the target's at that place.
    """
    proposals, greedy = (x.tolist() if isinstance(x, Tensor) else list(x) for x in (proposals_G, greedy_T))
    assert len(greedy) == len(proposals) + 1, f"{len(greedy)} target ids for {len(proposals)} proposals"
    num_accepted = 0
    while num_accepted < len(proposals) and proposals[num_accepted] == greedy[num_accepted]:
        num_accepted += 1
    return num_accepted, greedy[num_accepted]


def _stands(p_of: float, q_of: float, generator: torch.Generator | None) -> bool:
    """The ratio test u * q < p; certain outcomes take no random number."""
    if p_of == 0.0 or q_of <= p_of:
        return p_of > 0.0
    return _uniform(generator) * q_of < p_of


def _draw(weights_V: Tensor, generator: torch.Generator | None) -> int:
    """One id with probability proportional to its weight (float64, not normalised); never one of weight 0."""
    support = weights_V.nonzero()[:, 0]
    assert len(support) > 0, "nothing to draw from"
    if len(support) == 1:
        return int(support[0])
    ends = weights_V[support].cumsum(dim=0)
    mark = ends[-1:] * _uniform(generator)
    place = torch.searchsorted(ends, mark, right=True).clamp_(max=len(support) - 1)
    return int(support[place])


def _uniform(generator: torch.Generator | None) -> float:
    """One number of [0, 1) with 53 random bits; the only place where acceptance takes randomness."""
    assert generator is not None, "sampling needs the request's acceptance generator"
    return float(torch.rand((), dtype=torch.float64, generator=generator, device=generator.device))


def request_generators(seed: int | None) -> tuple[torch.Generator, torch.Generator]:
    """(draft generator, acceptance generator) of one request, on the CPU: a seed means the same anywhere.

    The two streams are independent of each other; a seed gives the same two again, None gives fresh ones.
    """
    if seed is None:
        seed = secrets.randbits(63)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise RequestError(f"seed is {seed!r}; it must be an integer from 0 to 2**63 - 1; None is a fresh one")
    generators = []
    for role in (0, 1):
        digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8, person=bytes([role])).digest()
        # torch's CPU generator uses the low 32 bits; the role in the lowest keeps the two apart for any seed
        state = (int.from_bytes(digest, "little") >> 1) & ~1 | role
        generators.append(torch.Generator().manual_seed(state))
    return generators[0], generators[1]
