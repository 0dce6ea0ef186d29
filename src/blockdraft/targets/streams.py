"""Targets with more than one residual stream: what of them a tap is.

Owns how the parallel streams of a layer are joined into one tap: where published drafts say how, and where a draft
itself has to say it; and the choice between the two streams of Kimi K3. Knows no drafts.

Letters: B rows, T positions, S parallel streams, E target width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor

from blockdraft.config import TapStream, TargetFacts
from blockdraft.errors import PairError

from .contract import Target
from .kimi_k3 import KimiK3Target

__all__ = ["JOINED_STREAMS", "checked_stream", "join_streams", "with_tap_stream"]


def _mean_of_streams(output_BTSE: Tensor) -> Tensor:
    """What the family's own head reads, behind the layer: the mean over its hyper-connection streams."""
    return output_BTSE.mean(dim=2)


# By model type of the text part: families whose published drafts agree on what a tap is.
JOINED_STREAMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "glm5_next": _mean_of_streams,
    "glm5_next_text": _mean_of_streams,
}


def join_streams(model_type: str, stream: TapStream, output: Tensor | tuple[Tensor, ...], width: int) -> Tensor:
    """One stream, [B, T, E], of what a decoder layer puts out; unchanged where the family has one.

    `stream` "mean" joins streams that lie side by side, [B, T, S*E], of `width` E each.
    """
    hidden = output[0] if isinstance(output, tuple) else output
    join = JOINED_STREAMS.get(model_type)
    if join is not None:
        return join(hidden)
    return _mean_of_streams(hidden.unflatten(-1, (-1, width))) if stream == "mean" else hidden


def checked_stream(stream: TapStream, facts: TargetFacts) -> TapStream:
    """`stream`; PairError if taps of this target cannot be that. Without taps any target has "prefix"."""
    if stream != "prefix" and stream not in facts.tap_streams:
        raise PairError(
            f"taps of the stream {stream!r} were asked for, and {facts.model_type} has {', '.join(facts.tap_streams)}:"
            " is this the draft's target?"
        )
    return stream


def with_tap_stream(target: Target, stream: TapStream) -> Target:
    """The same loaded model as a target whose taps are this stream. Rows of one are not rows of the other."""
    if target.tap_stream == stream:
        return target
    if not isinstance(target, KimiK3Target):
        raise PairError(f"{target.facts.model_type} has one stream of taps, {target.tap_stream}: leave tap_stream out")
    return cast(Target, target.with_stream(stream))
