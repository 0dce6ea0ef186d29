"""The bodies of requests: strict models of what is served, field by field.

Owns shapes, bounds and defaults of the wire. What a field does is chat.py's, completions.py's and asked.py's. null
means "not given" everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, model_validator

from blockdraft.serve.fields import REFUSED, Wire, refuse

__all__ = [
    "AssistantMessage",
    "ChatRequest",
    "CompletionRequest",
    "GenerationFields",
    "JsonSchemaFormat",
    "Message",
    "NamedToolChoice",
    "SpeculationField",
    "StructuredOutputs",
    "TextPart",
    "Tool",
    "ToolMessage",
]

MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63 - 1
Text = str
Id = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Unit = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]


# ---- messages ------------------------------------------------------------------------------------------------------
class TextPart(Wire):
    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "text":
            refuse(f"content of type {kind[:40]!r}", "this server reads text parts only", field="type")
        return given


Content = Text | Annotated[list[TextPart], Field(min_length=1)]


class _Said(Wire):
    @model_validator(mode="before")
    @classmethod
    def _has_no_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("name") is not None:
            refuse("name", "chat templates have no place for it; write it into the content")
        return {k: v for k, v in given.items() if k != "name"} if isinstance(given, dict) else given


class SystemMessage(_Said):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(_Said):
    role: Literal["user"]
    content: Content


class CalledFunction(Wire):
    name: Annotated[str, StringConstraints(min_length=1)]
    arguments: str


class ToolCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Stands in streamed calls, which clients send back as they were."""


class AssistantMessage(_Said):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, given: Any) -> Any:
        """Clients send back what they got, with the empty fields of OpenAI's message in it."""
        if not isinstance(given, dict):
            return given
        empty = ("refusal", "audio", "function_call", "annotations")
        return {k: v for k, v in given.items() if not (k in empty and v in (None, []))}


class ToolMessage(Wire):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# ---- tools ---------------------------------------------------------------------------------------------------------
class FunctionSpec(Wire):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: FunctionSpec


class _ChosenFunction(Wire):
    name: str


class NamedToolChoice(Wire):
    type: Literal["function"]
    function: _ChosenFunction


# ---- form of the answer --------------------------------------------------------------------------------------------
class TextFormat(Wire):
    type: Literal["text"]


class JsonObjectFormat(Wire):
    type: Literal["json_object"]


class NamedSchema(Wire):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Wire):
    """vLLM's object; exactly one of its fields."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


# ---- what both endpoints have --------------------------------------------------------------------------------------
class StreamOptions(Wire):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _served(self) -> StreamOptions:
        if self.include_obfuscation:
            refuse("include_obfuscation", "chunks are sent as they are")
        if self.continuous_usage_stats:
            refuse("continuous_usage_stats", "usage comes once, at the end")
        return self


class SpeculationField(Wire):
    """Speculation of one request: `enabled` null uses the draft where there is one, true demands it, false forbids."""

    enabled: bool | None = None
    width: Annotated[int, Field(ge=2, le=1024)] | None = None
    tokens: bool = False


class GenerationFields(Wire):
    refused: ClassVar[Mapping[str, str]] = REFUSED

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Unit | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: list[Id] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=256)] | None = None
    speculation: SpeculationField | None = None
    return_meta_info: bool | None = None
    return_spec_tokens_details: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _offered(self) -> GenerationFields:
        if self.include_stop_str_in_output:
            refuse("include_stop_str_in_output", "the text ends before the stop string")
        if self.skip_special_tokens is False:
            refuse("skip_special_tokens false", "special tokens are no text", field="skip_special_tokens")
        if self.spaces_between_special_tokens is False:
            name = "spaces_between_special_tokens"
            refuse(f"{name} false", "special tokens are no text", field=name)
        return self


class ChatRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _served(self) -> ChatRequest:
        if self.store:
            refuse("store", "nothing is stored here; leave it out or false")
        if self.continue_final_message:
            refuse("continue_final_message", "use /v1/completions to continue a text")
        return self


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
