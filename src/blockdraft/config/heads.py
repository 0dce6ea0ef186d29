"""What stands behind a draft's last layer, or between its rows: Markov and confidence heads, adjacent injection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from blockdraft.config.checks import require_bool, require_int
from blockdraft.errors import ConfigError

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovConfig:
    """DSpark: what the token before adds to a row's logits, through `rank` numbers.

    vanilla: a matrix of pairs; gated: with a gate from the row; rnn: with a state that runs along the block.
    """

    rank: int
    kind: MarkovKind

    def __post_init__(self) -> None:
        require_int("markov_rank", self.rank)
        if self.kind not in get_args(MarkovKind):
            raise ConfigError(
                f"markov_head_type is {self.kind!r}: supported are {', '.join(map(repr, get_args(MarkovKind)))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceConfig:
    """DSpark: the predicted probability that a row's proposal stands. `reads_token`: from the token before, too."""

    reads_token: bool

    def __post_init__(self) -> None:
        require_bool("confidence_head_with_markov", self.reads_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionConfig:
    """DSpine: after every layer a row takes a message from the row before it; `top_k` candidates are scored again."""

    transfer_rank: int
    message_size: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("transfer_rank", "message_size", "top_k"):
            require_int(f"dspine_config.{name}", getattr(self, name))
