"""The proof that a loaded target takes its positions back exactly, for families that carry no proof of their own.

Two rows say the same: one with blocks that were taken back on the way, one that was fed what remained at once. Owns the
judgement and the memory of it: what has passed is noted in the cache folder and not tried again. Works through the
contract of targets alone.

Shapes: T positions fed to the target, N taps, E target width, V vocabulary rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from blockdraft.config import PROVEN_RECURRENT_MODEL_TYPES
from blockdraft.errors import PairError

from .contract import Scored, Target
from .hf_cache import refusal
from .smollm2 import default_cache_dir

__all__ = ["Findings", "examine", "identity_of", "prove", "says_the_same"]

_PROVEN_WITH = "5.24."  # the tests of this package run every proven family with this release of transformers
_BLOCKS = ((1, 0), (1, 1), (8, 3), (8, 0), (2, 1), (20, 11), (8, 8), (5, 4), (9, 1))  # (fed, kept)
_NUM_PROMPT, _NUM_LAST = 21, 6
_MAX_ERROR = 1e-5
_MAX_NOISE_RATIO = 4.0  # how much more than rounding an error may be, where rounding alone is more than _MAX_ERROR
_MAX_NOISE = 1e-4  # more is no rounding: the model itself computes something else when it is fed in pieces
_MAX_NOISE_HALF = 0.1  # of a number format of two bytes
_MIN_CONTRAST = 10.0
# Of the trial of passes for many rows: what each row is fed, what it keeps of it, whose logits are asked for.
_JOINT_ROUNDS = (
    ((4, 2, 4), (2, 2, 0), None),
    ((3, 1, 1), (3, 0, 1), 1),
    ((3, 3, 3), (1, 3, 2), None),
    ((1, 1, 1), (1, 1, 1), None),
)


@dataclass(frozen=True, slots=True)
class Findings:
    """Differences relative to the largest logit (or tap) of one forward over the same ids."""

    error: float  # of a row with blocks taken back
    noise: float  # of a row fed the same ids in the same pieces, nothing taken back: rounding
    contrast: float  # of a row in which rejected ids were left: what a mistake looks like

    def fault(self, dtype: torch.dtype) -> str | None:
        """What is wrong, if anything is."""
        max_noise = _MAX_NOISE_HALF if dtype.itemsize < 4 else _MAX_NOISE
        if not self.noise <= max_noise:
            return f"a forward that gives other logits when it is fed in pieces (off by {self.noise:.1e}; no rollback)"
        if not self.error <= max(_MAX_ERROR, _MAX_NOISE_RATIO * self.noise):
            return f"state that came back off by {self.error:.1e} in the self-test (rounding: {self.noise:.1e})"
        if not self.contrast >= _MIN_CONTRAST * self.error:
            return f"logits too flat for a self-test (a mistake shows as {self.contrast:.1e}, off by {self.error:.1e})"
        return None


def prove(target: Target, identity: str) -> None:
    """Raise PairError when the target does not take its positions back exactly. Seconds, and once per identity."""
    model_type = target.facts.model_type
    if model_type in PROVEN_RECURRENT_MODEL_TYPES and transformers.__version__.startswith(_PROVEN_WITH):
        return
    note = default_cache_dir().expanduser() / "selftests" / f"{identity}.json"
    with contextlib.suppress(OSError):
        if note.is_file():
            return
    try:
        found = examine(target)
    except PairError:
        raise
    except Exception as error:  # a family may do anything with a second block or a state that was put back
        reason = " ".join(str(error).split())[:200]
        raise PairError(refusal(model_type, f"state that the self-test could not take back ({reason})")) from error
    if fault := found.fault(target.dtype):
        raise PairError(refusal(model_type, fault))
    with contextlib.suppress(OSError):  # a folder that cannot be written costs the same seconds the next time
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"model_type": model_type, **asdict(found)}) + "\n", encoding="utf-8")


def identity_of(model: Any) -> str:
    """A name for what decides on the outcome: family, sizes, number format, versions."""
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    facts = [type(model).__name__, str(model.dtype), transformers.__version__, torch.__version__]
    text = json.dumps([facts, config], sort_keys=True, default=str)
    return f"{model.config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def examine(target: Target, seed: int = 0) -> Findings:
    """A prompt, blocks of several lengths of which little, much or all is kept, and a last forward that tells."""
    draw = random.Random(seed)

    def ids(count: int) -> Tensor:
        return torch.tensor([draw.randrange(target.facts.vocab_size) for _ in range(count)])

    prompt = ids(_NUM_PROMPT + 5)
    blocks = [ids(fed) for fed, _ in _BLOCKS]
    kept = [block[:keep] for block, (_, keep) in zip(blocks, _BLOCKS, strict=True) if keep]
    last = ids(_NUM_LAST)
    pieces = [prompt[:_NUM_PROMPT], *kept, last]
    [taken, honest, whole, wrong] = rows = [target.new_row() for _ in range(4)]
    try:
        target.forward([prompt], [taken], num_logits=0)
        target.rollback([taken], [_NUM_PROMPT])
        for block, (fed, keep) in zip(blocks, _BLOCKS, strict=True):
            target.forward([block], [taken], num_logits=0)
            for step in sorted({fed, (fed + keep) // 2, keep}, reverse=True):
                target.rollback([taken], [step])
        [found] = target.forward([last], [taken])
        for piece in pieces[:-1]:
            target.forward([piece], [honest], num_logits=0)
        [plain] = target.forward([last], [honest])
        [expected] = target.forward([torch.cat(pieces)], [whole], num_logits=_NUM_LAST)
        target.forward([torch.cat([*pieces[:-1], blocks[2][:2]])], [wrong], num_logits=0)
        [mistaken] = target.forward([last], [wrong])
    finally:
        for row in rows:
            target.free(row)
    return Findings(*(_difference(one, expected) for one in (found, plain, mistaken)))


def says_the_same(target: Target, jointly: Callable[[list[Tensor], list[Any], int | None], list[Scored]]) -> bool:
    """Whether three rows, fed and taken back with ``jointly``, give what they give when each has a pass of its own.

    They have pasts of unequal length, one has none; they are given unequal and equal numbers of ids.
    """
    draw = random.Random(0)

    def ids(counts: tuple[int, ...]) -> list[Tensor]:
        return [torch.tensor([draw.randrange(target.facts.vocab_size) for _ in range(count)]) for count in counts]

    together, apart = ([target.new_row() for _ in range(3)] for _ in range(2))
    alone = target.new_row()
    worst = 0.0
    try:
        for text, index in zip(ids((5, 9)), (0, 2), strict=True):
            for rows in (together, apart):
                target.forward([text], [rows[index]], num_logits=0)
        for fed, kept, num_logits in _JOINT_ROUNDS:
            blocks = ids(fed)
            found = jointly(blocks, together, num_logits)
            wanted = [
                target.forward([block], [row], num_logits=num_logits)[0]
                for block, row in zip(blocks, apart, strict=True)
            ]
            worst = max([worst, *(_difference(one, other) for one, other in zip(found, wanted, strict=True))])
            for rows in (together, apart):
                target.rollback(rows, kept)
        [without_past] = target.forward([blocks[2]], [alone], num_logits=num_logits)
    except Exception:  # of code that meets a cache of many rows: any
        return False
    finally:
        for row in (*together, *apart, alone):
            target.free(row)
    contrast = _difference(without_past, wanted[2])
    max_noise = _MAX_NOISE_HALF if target.dtype.itemsize < 4 else _MAX_NOISE
    return worst <= max_noise and contrast >= _MIN_CONTRAST * worst


def _difference(found: Scored, expected: Scored) -> float:
    """The largest difference of logits, or of taps, relative to the largest of them."""
    pairs = [(found.logits_TV, expected.logits_TV)]
    if expected.taps_TNE.numel():
        pairs.append((found.taps_TNE, expected.taps_TNE[-found.taps_TNE.shape[0] :]))
    return max(float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in pairs)
