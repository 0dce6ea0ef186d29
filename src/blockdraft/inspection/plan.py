"""Will it fit, how fast will it be, and at which load does speculation stop paying: a plan from configs alone.

A roofline and nothing measured, unless a table of measured steps is given. Every assumption is a field of the result.
N requests at a time, B positions scored of each in a step, M = N B.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from blockdraft.config import DraftConfig, MlaConfig
from blockdraft.errors import CheckpointError, PairError, RequestError, shown
from blockdraft.inspection.costs import all_tensors, cache_bytes, step_cost
from blockdraft.inspection.plan_gpus import Gpu
from blockdraft.inspection.plan_target import TargetShape

BANDWIDTH_SHARE = 0.8  # of the data sheet's, that a step of decoding reaches
FLOPS_SHARE = 0.6
LAYER_FLOOR_S = 15e-6  # launches and the sums over GPUs, per layer and forward
STEP_FLOOR_S = 200e-6  # acceptance, bookkeeping, scheduling
RESERVED_BYTES = 2.0 * 2**30  # activations and CUDA graphs, each GPU
CONTEXT_BYTES = 0.5 * 2**30  # the driver's own, each GPU
# Parts of a draft that every GPU holds whole: what joins the taps, mixes rows and picks candidates.
_WHOLE_PARTS = ("fc.weight", "candidate_selector.", "_conv.", "norm", "markov_head.", "confidence_head.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on each GPU, for N requests of the full context."""

    target_weights: float
    draft_weights: float
    target_cache: float
    target_state: float
    draft_cache: float
    reserved: float
    available: float

    @property
    def total(self) -> float:
        parts = (self.target_weights, self.draft_weights, self.target_cache, self.target_state, self.draft_cache)
        return sum(parts) + self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.available


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many requests at a time on one replica. Times of one step in seconds; `width` the best, 1 if none pays.

    `full_speed_up` is that of the draft's own width, `tok_per_s` of the replica.
    """

    num_requests: int
    memory: Memory
    plain_s: float
    width: int
    step_s: float
    length: float
    speed_up: float
    full_speed_up: float
    tok_per_s_each: float
    tok_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`num_gpus` in all, `tensor_parallel` for each of `num_replicas`. `stops_at`: first load where nothing pays."""

    gpu: Gpu
    num_gpus: int
    tensor_parallel: int
    num_replicas: int
    context: int
    loads: tuple[Load, ...]
    max_requests: int
    stops_at: int | None
    survival: tuple[float, ...]
    usd_per_gpu_hour: float | None
    assumptions: tuple[str, ...]

    def usd_per_million(self, load: Load) -> float | None:
        """Cost of a million tokens at this load on every replica, None without a price."""
        if self.usd_per_gpu_hour is None:
            return None
        return self.usd_per_gpu_hour * self.tensor_parallel / 3600.0 / load.tok_per_s * 1e6

    def gpu_hours_per_million(self, load: Load) -> float:
        return self.tensor_parallel / 3600.0 / load.tok_per_s * 1e6


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Seconds of a step that somebody measured: of the target by positions scored, of the draft by requests."""

    target: tuple[tuple[float, float], ...]
    draft: tuple[tuple[float, float], ...]


def read_costs(path: Path) -> MeasuredCosts:
    """`{"target": [[positions, seconds], ...], "draft": [[requests, seconds], ...]}`. Raises CheckpointError."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"the costs {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"the costs {path} are no JSON: {shown(error)}") from None
    if not isinstance(raw, Mapping) or set(raw) != {"target", "draft"}:
        raise CheckpointError(f"the costs {path} must hold exactly target and draft, each a list of [count, seconds]")
    return MeasuredCosts(_curve(path, "target", raw["target"]), _curve(path, "draft", raw["draft"]))


def _curve(path: Path, name: str, raw: object) -> tuple[tuple[float, float], ...]:
    if not isinstance(raw, list) or len(raw) < 2:
        raise CheckpointError(f"the costs {path}: {name} needs at least two pairs of [count, seconds]")
    try:
        points = tuple((float(count), float(seconds)) for count, seconds in raw)
    except (TypeError, ValueError):
        raise CheckpointError(f"the costs {path}: {name} holds something else than pairs of numbers") from None
    counts = [count for count, _ in points]
    if counts != sorted(set(counts)) or not all(0 < seconds < math.inf for _, seconds in points):
        raise CheckpointError(f"the costs {path}: counts of {name} must rise, and seconds be above 0")
    return points


def _at(points: Sequence[tuple[float, float]], count: float) -> float:
    """Between the points by a line, beyond them along the last one; never below the first."""
    if count <= points[0][0]:
        return points[0][1]
    segments = list(pairwise(points))
    (left, low), (right, high) = next((pair for pair in segments if count <= pair[1][0]), segments[-1])
    return max(low + (high - low) * (count - left) / (right - left), points[0][1])


def read_survival(text: str, num_proposals: int) -> tuple[float, ...]:
    """`4.2` or `0.86,0.71,...` -> P(at least i proposals are accepted) for i = 1 ... num_proposals.

    One number is tokens per step at the draft's own width; the survivals are then geometric, which real ones are not.
    """
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise RequestError(f"--acceptance is {shown(text)}: tokens per step, or one share for each position") from None
    if len(numbers) == 1:
        return _geometric(numbers[0], num_proposals)
    if len(numbers) != num_proposals:
        raise RequestError(f"--acceptance has {len(numbers)} positions: this draft proposes {num_proposals}")
    if any(not 0 <= number <= 1 for number in numbers) or numbers != sorted(numbers, reverse=True):
        raise RequestError(f"--acceptance is {shown(text)}: shares between 0 and 1 that never rise")
    return tuple(numbers)


def _geometric(length: float, num_proposals: int) -> tuple[float, ...]:
    if not 1 <= length <= num_proposals + 1:
        raise RequestError(f"--acceptance is {length:g}: tokens per step are 1 to {num_proposals + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        sum_ = sum(middle**i for i in range(1, num_proposals + 1))
        low, high = (middle, high) if 1 + sum_ < length else (low, middle)
    return tuple(low**i for i in range(1, num_proposals + 1))


def read_concurrency(text: str) -> tuple[int, ...]:
    """`1..256` -> powers of two in between and both ends; `1,8,64` -> these."""
    try:
        if ".." in text:
            low, high = (int(word) for word in text.split(".."))
            if high < low:
                raise RequestError(f"--concurrency is {shown(text)}: the second number must not be below the first")
            middle = [2**power for power in range(40) if low < 2**power < high]
            counts = sorted({low, *middle, high})
        else:
            counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise RequestError(f"--concurrency is {shown(text)}: 1..256, or 1,8,64") from None
    if counts[0] < 1:
        raise RequestError(f"--concurrency is {shown(text)}: at least 1")
    return tuple(counts)


def read_length(text: str) -> int:
    """`128k` -> 131072."""
    word = text.strip().lower()
    factor = {"k": 1024, "m": 1024 * 1024}.get(word[-1:], 1)
    digits = word[:-1] if factor > 1 else word
    if not digits.isdigit() or int(digits) < 1:
        raise RequestError(f"--context is {shown(text)}: tokens, as 131072 or 128k")
    return int(digits) * factor


def make_plan(
    config: DraftConfig,
    target: TargetShape,
    own: Sequence[str],
    *,
    num_gpus: int,
    gpu: Gpu,
    context: int,
    concurrency: Sequence[int],
    survival: Sequence[float],
    is_geometric: bool,
    tensor_parallel: int | None,
    usd_per_gpu_hour: float | None,
    kv_bits: int,
    costs: MeasuredCosts | None,
    acceptance_source: str,
) -> Plan:
    """The plan of a pair on a machine. Raises PairError if not even one request fits.

    `own`: optional tensors that the draft's file carries. `survival[i]`: P(more than i proposals are accepted).
    """
    maker = _Maker(config, target, tuple(own), gpu, context, tuple(survival), kv_bits, costs)
    split = maker.smallest_split(num_gpus) if tensor_parallel is None else tensor_parallel
    if split < 1 or num_gpus % split:
        raise RequestError(f"--tp is {split}: it must divide the {num_gpus} GPUs")
    short = maker.memory(split, 1)
    if not short.fits:
        if maker.memory(split, 0).total > short.available:
            raise PairError(
                f"the weights alone need {maker.memory(split, 0).total / 1e9:.1f} GB on each of {split} {gpu.name}, "
                f"which have {short.available / 1e9:.1f}: more GPUs, or fewer bits"
            )
        raise PairError(
            f"one request of {context} positions needs {short.total / 1e9:.1f} GB on each of {split} {gpu.name}, which "
            f"have {short.available / 1e9:.1f}: more GPUs, a shorter --context or --kv-bits 8"
        )
    loads = tuple(maker.load(split, count) for count in concurrency)
    stops = next((load.num_requests for load in loads if load.width == 1 and load.memory.fits), None)
    return Plan(
        gpu=gpu,
        num_gpus=num_gpus,
        tensor_parallel=split,
        num_replicas=num_gpus // split,
        context=context,
        loads=loads,
        max_requests=maker.max_requests(split),
        stops_at=stops,
        survival=tuple(survival),
        usd_per_gpu_hour=usd_per_gpu_hour,
        assumptions=(*maker.assumptions(is_geometric), f"acceptance: {acceptance_source}"),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    config: DraftConfig
    target: TargetShape
    own: tuple[str, ...]
    gpu: Gpu
    context: int
    survival: tuple[float, ...]
    kv_bits: int
    costs: MeasuredCosts | None

    # ---- memory ------------------------------------------------------------------------------------------------------
    def memory(self, split: int, num_requests: int) -> Memory:
        """Bytes on each of `split` GPUs."""
        target, config = self.target, self.config
        per_token = target.cached_bytes_per_token * self.kv_bits / 16 / _heads_split(target.num_kv_heads, split)
        states = target.state_bytes / split * (1 + config.max_width)
        is_latent = isinstance(config.attention, MlaConfig)
        kv_heads = 1 if is_latent else config.attention.num_kv_heads  # type: ignore[union-attr]
        own_cache = cache_bytes(config, self.context) / _heads_split(kv_heads, split)
        return Memory(
            target_weights=target.weight_bytes / split,
            draft_weights=self._draft_weights(split),
            target_cache=per_token * self.context * num_requests,
            target_state=states * num_requests,
            draft_cache=own_cache * num_requests,
            reserved=RESERVED_BYTES + CONTEXT_BYTES,
            available=self.gpu.memory_bytes,
        )

    def _draft_weights(self, split: int) -> float:
        """Bytes on each GPU in bf16: layers are split."""
        whole = shared = 0.0
        for name, shape in all_tensors(self.config, self.own).items():
            num_bytes = 2 * math.prod(shape)
            if any(part in name for part in _WHOLE_PARTS):
                whole += num_bytes
            else:
                shared += num_bytes
        return whole + shared / split

    def smallest_split(self, num_gpus: int) -> int:
        """The fewest GPUs, a power of two that divides all, on which one request fits; all of them if none does."""
        split = 1
        while split < num_gpus and (num_gpus % split or not self.memory(split, 1).fits):
            split *= 2
        return split if num_gpus % split == 0 else num_gpus

    def max_requests(self, split: int) -> int:
        """Requests of the full context that fit at a time."""
        none, one = self.memory(split, 0), self.memory(split, 1)
        each = one.total - none.total
        return int((one.available - none.total) // each) if each > 0 else 10**9

    # ---- time --------------------------------------------------------------------------------------------------------
    def load(self, split: int, num_requests: int) -> Load:
        plain = self._target_s(split, num_requests, 1) + STEP_FLOOR_S
        times = {width: self._step_s(split, num_requests, width) for width in range(2, self.config.max_width + 1)}
        gains = {width: self.length(width) * plain / seconds for width, seconds in times.items()}
        best = max(gains, key=lambda width: gains[width])
        pays = gains[best] > 1.0
        step = times[best] if pays else plain
        length = self.length(best) if pays else 1.0
        return Load(
            num_requests=num_requests,
            memory=self.memory(split, num_requests),
            plain_s=plain,
            width=best if pays else 1,
            step_s=step,
            length=length,
            speed_up=gains[best] if pays else 1.0,
            full_speed_up=gains[self.config.max_width],
            tok_per_s_each=length / step,
            tok_per_s=num_requests * length / step,
        )

    def length(self, width: int) -> float:
        """Tokens of a step of this width."""
        return 1.0 + sum(self.survival[: width - 1])

    def _step_s(self, split: int, num_requests: int, width: int) -> float:
        return self._target_s(split, num_requests, width) + self._draft_s(split, num_requests, width) + STEP_FLOOR_S

    def _target_s(self, split: int, num_requests: int, width: int) -> float:
        positions = num_requests * width
        if self.costs is not None:
            return _at(self.costs.target, positions)
        target = self.target
        read = target.read_bytes(positions) / split
        flops = 2 * target.active_params * positions / split
        cached = target.cached_bytes_per_token * self.kv_bits / 16 / _heads_split(target.num_kv_heads, split)
        moved = cached * self.context * num_requests + target.state_bytes / split * num_requests * (1 + width)
        scores = target.attention_flops_per_pair * positions * self.context / split
        return self._roof(read, flops) + self._roof(moved, scores) + LAYER_FLOOR_S * target.num_layers

    def _draft_s(self, split: int, num_requests: int, width: int) -> float:
        if self.costs is not None:
            return _at(self.costs.draft, num_requests)
        cost = step_cost(self.config)
        read = (cost["weight_bytes_per_step"] + cost["head_bytes_per_step"]) / split
        share = width / self.config.max_width
        flops = cost["flops"]["total"] * share * num_requests / split
        visible = cache_bytes(self.config, self.context) * num_requests / split
        return self._roof(read, flops) + visible / self._bandwidth + LAYER_FLOOR_S * self.config.num_layers

    @property
    def _bandwidth(self) -> float:
        return BANDWIDTH_SHARE * self.gpu.bandwidth_bytes_s

    def _roof(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self._bandwidth, flops / (FLOPS_SHARE * self.gpu.bf16_flops))

    # ---- words -------------------------------------------------------------------------------------------------------
    def assumptions(self, is_geometric: bool) -> tuple[str, ...]:
        """Everything that is taken for granted, one line each."""
        target = self.target
        lines = [
            f"{self.gpu.name}: {self.gpu.source}",
            f"weights of the target: {target.weight_bytes / 1e9:.1f} GB, {target.quantisation}",
            *(f"not counted: {part}" for part in target.not_counted),
            *target.simplified,
            f"target's cache in {self.kv_bits} bits; latents are held whole on every GPU, heads are split",
            f"every request holds {self.context} positions; the draft's cache in bf16, as far as its layers see",
            f"{RESERVED_BYTES / 2**30:g} GiB for activations and graphs, {CONTEXT_BYTES / 2**30:g} GiB for the driver",
        ]
        if target.state_bytes:
            lines.append(
                f"recurrent state: {target.state_bytes / 1e6:.0f} MB a snapshot, 1 + width of them for each request"
            )
        if self.costs is not None:
            lines.append("step times: as measured, by positions scored; the context they were measured at")
        else:
            lines += [
                f"step times: a roofline at {BANDWIDTH_SHARE:g} of the bandwidth and {FLOPS_SHARE:g} of the bf16 rate",
                f"{LAYER_FLOOR_S * 1e6:g} us for each layer of a forward, {STEP_FLOOR_S * 1e6:g} us for each step",
                "real steps are slower, 1.4 to 2.2 times where some were published; ratios hold better; see --costs",
            ]
            if target.num_experts:
                lines.append("experts as if every position drew its own at random; real ones coincide more")
        if is_geometric:
            lines.append("acceptance falls by the same share at every position; give one share for each to do better")
        if not all(layer.is_causal for layer in self.config.layers):
            lines.append("a narrower width accepts what this one does up to there, which bidirectional blocks do not")
        return tuple(lines)


def _heads_split(num_heads: int, split: int) -> int:
    """How many ways a cache of so many heads is split over so many GPUs; what is left over is held twice."""
    return min(num_heads, split)
