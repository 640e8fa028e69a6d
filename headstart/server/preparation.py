"""From a checked body to jobs of the engine, and to what writes their answer; run in a thread."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headstart.sampling.params import SamplingParams
from headstart.server.answers.chat_text import ChatText
from headstart.server.answers.logprobs import check_prompt_entries
from headstart.server.answers.writer import ChatWriter, Writer
from headstart.server.channels import Job
from headstart.server.grammars.specs import GrammarSpec, grammar_spec
from headstart.server.model import ServedModel
from headstart.server.options import ServerOptions
from headstart.server.protocol.messages import for_template
from headstart.server.protocol.requests import ChatRequest, SamplingFields
from headstart.server.reasoning import after_reasoning
from headstart.server.refusals import too_long
from headstart.server.tools.calls import PreparedChat
from headstart.server.tools.calls import prepare as prepare_tools


@dataclass(frozen=True)
class Prepared:
    """A request that can be answered, and what will write its answer."""

    jobs: list[Job]
    grammar: GrammarSpec | None  # which all of them keep to; not compiled
    writer: Writer
    prompt: Any  # as it was given, for the log


def prepare_chat(
    request: ChatRequest, answer_id: str, model: ServedModel, limits: ServerOptions, *,
    new_writer: Callable[..., Writer] = ChatWriter,
) -> Prepared:  # fmt: skip
    messages = for_template(request.messages)
    chat = _with_tools(request, messages, model)
    is_kept = chat.format is not None or model.thinks_in_special
    special = model.plain_special if is_kept and request.skip_special_tokens is not False else {}
    changes = {"skip_special_tokens": False} if is_kept else {}
    params = request.params(model.engine.prompts, **changes)
    options = {**request.template_options, **chat.template_options}
    asked = model.engine.read(chat.messages, seeded(params), options)
    check_length(asked.ids, request, model, limits.max_prompt_tokens)
    check_prompt_entries(len(asked.ids), request.num_prompt_logprobs, 1, "prompt_logprobs")
    reasoning = model.reasoning_format
    start = model.reasoning_start(asked.ids) if reasoning is not None else "closed"
    spec = chat.grammar and after_reasoning(chat.grammar, reasoning, start)
    jobs = [Job(asked, request.priority)]
    is_content = chat.format is None and reasoning is None  # and nothing else, as most answers
    writer = new_writer(
        request, jobs, model=model, answer_id=answer_id, start=start,
        limited_by=limiting_field(request, spec),
        new_text=None if is_content else lambda: ChatText(chat, reasoning, start, special),
    )  # fmt: skip
    return Prepared(jobs, spec, writer, messages)


def _with_tools(
    request: ChatRequest, messages: list[dict[str, Any]], model: ServedModel
) -> PreparedChat:
    """What tools, earlier calls and a grammar make of a request; most have none of them."""
    spec = grammar_of(request)
    if not names_tools(request, messages):
        return PreparedChat(messages, grammar=spec)
    return prepare_tools(
        messages, tools=request.tools, tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls, format=model.tool_format,
        chat_template=model.chat_template, spec=spec,
    )  # fmt: skip


def names_tools(request: ChatRequest, messages: list[dict[str, Any]]) -> bool:
    """Whether tools are given, chosen, or were called earlier."""
    is_plain = all("tool_calls" not in own and own["role"] != "tool" for own in messages)
    return not is_plain or (request.tools, request.tool_choice) != (None, None)


def grammar_of(request: SamplingFields) -> GrammarSpec | None:
    if request.response_format is None and request.structured_outputs is None:
        return None
    return grammar_spec(request.response_format, request.structured_outputs)


def limiting_field(request: SamplingFields, spec: GrammarSpec | None) -> str | None:
    """The field that is refused if no token is left to choose from; a grammar's first."""
    if spec is not None:
        return spec.field
    lists = ("allowed_token_ids", "banned_token_ids", "logit_bias")
    return next((name for name in lists if getattr(request, name) is not None), None)


def seeded(params: SamplingParams) -> SamplingParams:
    """The parameters with a seed of at most 53 bits: many JSON parsers round larger numbers."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(53))


def check_length(
    ids: list[int], request: SamplingFields, model: ServedModel, most: int | None
) -> None:
    """Refusal for a prompt that is too long, or for more max_tokens than have room."""
    if most is not None and len(ids) > most:
        raise too_long(
            f"the prompt has {len(ids)} tokens; this server reads at most {most} "
            "(--max-prompt-tokens). Shorten it.",
            param=request.own_names.get("prompt", "prompt"),
        )
    given, name = request.asked_max_tokens, request.max_tokens_field
    room = model.max_len - len(ids)
    if given is not None and given > room:
        raise too_long(
            f"{name} is {given}; the prompt has {len(ids)} tokens and prompt and answer together "
            f"may have {model.max_len}. Ask for up to {room}, or leave {name} out.",
            param=name,
        )
