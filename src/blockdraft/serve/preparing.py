"""What a request needs before it can be submitted: its prompts as ids, its limits, its empty answer.

Runs in a worker thread: tokenizing a long text takes longer than the event loop may be held up.
"""

from __future__ import annotations

from typing import Any

from blockdraft.engine import Request
from blockdraft.serve import chat, completions
from blockdraft.serve.answers import Answer, Frame
from blockdraft.serve.asked import engine_requests, length_limit, num_choices, request_fields, stop_ids
from blockdraft.serve.errors import bad_request
from blockdraft.serve.forms import asked_form, checked_form
from blockdraft.serve.service import Service
from blockdraft.serve.wire import ChatRequest, CompletionRequest
from blockdraft.text import Grammar
from blockdraft.text.sections import ChatPrompt, ReplyParser, chat_prompt

__all__ = ["prepare_chat", "prepare_completion"]


def prepare_chat(fields: ChatRequest, service: Service) -> tuple[Answer, list[Request]]:
    """The answer to be filled, and the engine's request of every choice."""
    chat.check_chat(fields)
    n = num_choices(fields, service.settings)
    tools = chat.offered_tools(fields)
    with service.tokenizing:
        prompt = chat_prompt(
            service.tokenizer,
            service.reply_format,
            chat.plain_messages(fields.messages),
            tools,
            add_generation_prompt=fields.add_generation_prompt is not False,
            **chat.template_settings(fields, service.tokenizer),
        )
    common = request_fields(fields, num_logprobs=chat.num_logprobs(fields))
    common["stop_ids"] = stop_ids(fields, service.engine.target.facts.eos_token_ids)
    common["visible_special_tokens"] = service.reply_format.visible_tokens
    common["grammar"] = _chat_form(fields, prompt, tools, service)
    limit = length_limit(
        fields.max_completion_tokens or fields.max_tokens,
        service.settings.default_max_tokens,
        len(prompt.ids),
        service.engine.target.facts.max_length,
        service.settings,
        param="max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens",
        where="messages",
    )
    frame = Frame(
        model=fields.model,
        fields=fields,
        num_prompt_tokens=[len(prompt.ids)],
        id=Frame.new_id("chatcmpl"),
        service_tier=None if fields.service_tier is None else "default",
    )
    own_stops = frozenset(fields.stop_token_ids or ())
    choices = [
        chat.ChatChoice(index, fields, own_stops, service.speller, _parser(prompt, tools, service))
        for index in range(n)
    ]
    return Answer(frame, choices, chat.NAMES), engine_requests([prompt.ids], n, fields.seed, [limit], common)


def _chat_form(
    fields: ChatRequest, prompt: ChatPrompt, tools: list[dict[str, Any]], service: Service
) -> Grammar | None:
    """What the answer's text is held to: the form asked for, or a call that must come."""
    form = asked_form(fields)
    if form is None:
        calls = chat.forced_calls(fields, tools, prompt.text, service.reply_format, service.tokenizer)
        return None if calls is None else checked_form(("tool_choice", calls), service.engine)
    name, _ = form
    if tools:
        raise bad_request(f'{name} leaves no room for tool calls; set tool_choice to "none"', param=name)
    if service.reply_format.is_reasoning_open(prompt.text):
        raise bad_request(
            f"the template opens the reasoning, which {name} leaves no room for; switch it off for this request, "
            "with chat_template_kwargs where the template has a switch (enable_thinking false)",
            param=name,
            code="unsupported_parameter",
        )
    return checked_form(form, service.engine)


def _parser(prompt: ChatPrompt, tools: list[dict[str, Any]], service: Service) -> ReplyParser | None:
    """What takes a choice's text apart; None where it is all content."""
    if not tools and not service.reply_format.has_reasoning:
        return None
    return ReplyParser(
        service.reply_format, service.tokenizer, has_tools=bool(tools), prompt_text=prompt.text, tools=tools
    )


def prepare_completion(fields: CompletionRequest, service: Service) -> tuple[Answer, list[Request]]:
    """The answer to be filled, and the engine's request of every choice: prompt by prompt, n of each."""
    completions.check_completion(fields)
    n = num_choices(fields, service.settings)
    common = request_fields(fields, num_logprobs=fields.logprobs)
    common["stop_ids"] = stop_ids(fields, service.engine.target.facts.eos_token_ids)
    if (form := asked_form(fields)) is not None:
        common["grammar"] = checked_form(form, service.engine)
    with service.tokenizing:
        prompts = completions.read_prompts(fields, service.tokenizer, service.settings)
    window = service.engine.target.facts.max_length
    limits = [
        length_limit(
            fields.max_tokens,
            completions.DEFAULT_MAX_TOKENS,
            len(ids),
            window,
            service.settings,
            param="max_tokens",
            where="prompt",
        )
        for ids in prompts
    ]
    own_stops = frozenset(fields.stop_token_ids or ())
    frame = Frame(
        model=fields.model, fields=fields, num_prompt_tokens=[len(ids) for ids in prompts], id=Frame.new_id("cmpl")
    )
    echoes = _echoes(fields, prompts, service)
    choices = [
        completions.TextChoice(index, fields, own_stops, service.tokenizer, service.speller, echoes[index // n])
        for index in range(n * len(prompts))
    ]
    return Answer(frame, choices, completions.NAMES), engine_requests(prompts, n, fields.seed, limits, common)


def _echoes(fields: CompletionRequest, prompts: list[list[int]], service: Service) -> list[str]:
    """What each choice's text begins with: the prompt as it was given, where echo is asked for."""
    if not fields.echo:
        return [""] * len(prompts)
    if isinstance(fields.prompt, str):
        return [fields.prompt]
    given = fields.prompt
    return [
        item if isinstance(item, str) else service.tokenizer.decode(ids)
        for item, ids in zip(given if not isinstance(given[0], int) else [None], prompts, strict=True)
    ]
