"""What an engine refuses before it runs: pairs that do not fit, requests that cannot be served as asked."""

from __future__ import annotations

from collections.abc import Collection

from blockdraft.config import DraftConfig, TargetFacts, check_pair
from blockdraft.draft import DraftModel
from blockdraft.engine.request import Request
from blockdraft.errors import PairError, RequestError
from blockdraft.targets import Target

__all__ = ["check_fit", "check_request", "check_stream"]


def check_fit(
    draft: DraftConfig, target: TargetFacts, *, own: Collection[str], allow_mask_is_eos: bool = False
) -> None:
    """Raise PairError if the engine cannot run this pair. `own` names the tensors that the draft brings itself."""
    check_pair(
        draft,
        target,
        has_own_embedding="embed_tokens.weight" in own,
        has_own_head="lm_head.weight" in own,
        allow_mask_is_eos=allow_mask_is_eos,
    )
    if draft.vocab_size != target.vocab_size:  # a rule that a config alone leaves open; ids must mean the same
        raise PairError(
            f"the draft has {draft.vocab_size} ids and the target {target.vocab_size}; use a draft made for it"
        )


def check_stream(target: Target, draft: DraftConfig) -> None:
    streams = target.facts.tap_streams
    if draft.tap_stream is None and not target.facts.has_plain_taps:
        auto = ", or 'auto', which measures both" if len(streams) > 1 else ""
        raise PairError(
            f"the draft does not say which stream of {target.facts.model_type} it reads; name it with tap_stream: "
            f"{', '.join(map(repr, streams))}{auto}"
        )
    read = draft.tap_stream or "prefix"
    if target.tap_stream != read:
        raise PairError(
            f"the target's taps are the stream {target.tap_stream!r} and the draft reads {read!r}; "
            f"load the target with tap_stream={read!r}"
        )


def check_request(
    request: Request, facts: TargetFacts, draft: DraftModel | None, *, has_tokenizer: bool, draft_off_reason: str
) -> None:
    """Nothing; a RequestError if this target, with this draft or none for the reason given, can't serve the request."""
    longest = len(request.prompt_ids) + request.max_new_tokens
    if longest > facts.max_length:
        raise RequestError(
            f"prompt of {len(request.prompt_ids)} tokens + max_new_tokens {request.max_new_tokens} = {longest}, "
            f"above the target's {facts.max_length} positions; shorten one of them"
        )
    highest = max(request.prompt_ids)
    if highest >= facts.vocab_size:
        raise RequestError(
            f"prompt_ids holds {highest}; the target has {facts.vocab_size} ids; use the target's tokenizer"
        )
    request.sampling.check_vocab(facts.vocab_size)
    if request.stop_ids and max(request.stop_ids) >= facts.vocab_size:
        raise RequestError(
            f"stop_ids holds {max(request.stop_ids)}; the target has ids 0 to {facts.vocab_size - 1}; remove it"
        )
    ends = facts.eos_token_ids if request.stop_ids is None else request.stop_ids
    if request.min_new_tokens > 0 and len(ends) >= facts.vocab_size:
        raise RequestError(
            f"min_new_tokens is {request.min_new_tokens} and all {facts.vocab_size} ids are stop ids, so that no "
            "first token is left; lower it to 0 or name fewer stop ids"
        )
    if request.num_logprobs is not None and request.num_logprobs > facts.vocab_size:
        raise RequestError(f"num_logprobs is {request.num_logprobs}; the target has {facts.vocab_size} ids")
    if request.stop_strings and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer; give the engine one, or use stop_ids")
    if request.speculate is True and draft is None:
        raise RequestError(f"speculation is demanded, but {draft_off_reason}; load a draft that fits")
    if request.width is not None:
        _check_width(request.width, draft, draft_off_reason)
    if request.min_confidence > 0.0:
        _check_confidence(request.min_confidence, draft, draft_off_reason)
    if request.speculate is True and draft is not None:
        width = min(request.width or draft.config.max_width, request.max_new_tokens - 1)
        if width > 1 and len(request.prompt_ids) + width > draft.max_length:
            raise RequestError(
                f"speculation is demanded, but the prompt of {len(request.prompt_ids)} tokens leaves no block of "
                f"{width} below the draft's maximum length of {draft.max_length}; shorten it, or do not demand"
            )


def _check_width(width: int, draft: DraftModel | None, draft_off_reason: str) -> None:
    if draft is None:
        raise RequestError(f"width is {width}, but {draft_off_reason}; drop the width or load a draft")
    trained = draft.config.max_width
    if width > trained:
        raise RequestError(f"width is {width}; the draft was trained for at most {trained}; use 2 to {trained}")


def _check_confidence(least: float, draft: DraftModel | None, draft_off_reason: str) -> None:
    if draft is None:
        raise RequestError(f"min_confidence is {least:g}, but {draft_off_reason}; drop it or load a draft")
    if draft.config.confidence is None:
        raise RequestError(f"min_confidence is {least:g}; this draft has no confidence head; drop it")
