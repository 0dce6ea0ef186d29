"""What is known of the two APIs and not offered here: each field refused by name, with the reason.

Owns the line between "unknown", "known and refused" and "null, hence not given". The fields that are served stand in
wire.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from blockdraft.errors import shown
from blockdraft.text.prompts import hint

__all__ = ["REFUSED", "Wire", "refuse"]

# field -> what to do instead. null is as good as not given, for all of them.
REFUSED: Mapping[str, str] = {
    # OpenAI
    "audio": "this server writes text",
    "function_call": "it was replaced by tool_choice",
    "functions": "they were replaced by tools",
    "metadata": "nothing is stored here that it could describe",
    "moderation": "nothing is moderated here",
    "prediction": "the draft proposes the text here; leave it out",
    "prompt_cache_key": "kept prefixes are found by their tokens",
    "prompt_cache_retention": "kept prefixes are found by their tokens",
    "safety_identifier": "use user, which is written into the access log",
    "suffix": "the target continues texts, it does not fill gaps",
    "verbosity": "say it in the prompt",
    "web_search_options": "this server searches nothing",
    # vLLM and SGLang
    "allowed_token_ids": "use structured_outputs or logit_bias",
    "bad_words": "use logit_bias",
    "chat_template": "the target's own is used; chat_template_kwargs sets its switches",
    "documents": "put them into messages",
    "kv_transfer_params": "there is one process",
    "length_penalty": "there is no beam search",
    "logits_processors": "use logit_bias or structured_outputs",
    "lora_path": "there are no adapters",
    "media_io_kwargs": "this server reads text",
    "mm_processor_kwargs": "this server reads text",
    "prompt_embeds": "give text or token ids",
    "prompt_logprobs": "log-probabilities are of new tokens only",
    "return_hidden_states": "hidden states stay in the server",
    "return_token_ids": 'use "speculation": {"tokens": true}',
    "return_tokens_as_token_ids": 'use "speculation": {"tokens": true}',
    "truncate_prompt_tokens": "no prompt is cut; shorten it",
    "use_beam_search": "the target samples or takes the most likely token",
    "vllm_xargs": "name the settings themselves",
    "guided_decoding_backend": "there is one",
    "guided_whitespace_pattern": "write it into the grammar",
    "structural_tag": "use structured_outputs",
    "ebnf": "use structured_outputs.grammar (Lark)",
    "regex": "use structured_outputs.regex",
    "json_schema": "use response_format or structured_outputs.json",
}


class Wire(BaseModel):
    """A strict object: unknown fields are errors with the nearest name, refused ones say why, null is "not given"."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        frozen=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        served = [field.alias or name for name, field in cls.model_fields.items()]
        kept = dict(given)
        for name, value in given.items():
            if name in served:
                continue
            if name not in cls.refused:
                known = ", ".join(served)
                close = hint(name, served) or (f"; known are {known}" if len(known) < 80 else "")
                facts = {"name": shown(name), "close": close, "field": str(name)[:80]}
                raise PydanticCustomError("unknown", "unknown field {name}{close}", facts)
            if value is not None:
                refuse(name, cls.refused[name])
            del kept[name]
        return kept


def refuse(what: str, why: str, *, field: str | None = None) -> NoReturn:
    """Raise the fault that says that a field is not supported; `field` is its name where `what` says more."""
    facts = {"name": what, "why": why, "field": field or what}
    raise PydanticCustomError("unsupported", "{name} is not supported: {why}", facts)
