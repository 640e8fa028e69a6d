"""From a request body to jobs for the engine: templates, tokens, forms. Runs beside the loop."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from headstart.sampling.params import SamplingParams
from headstart.server.answers.chat import ChatWriter
from headstart.server.answers.chat_text import ChatText
from headstart.server.answers.completion import CompletionWriter
from headstart.server.answers.writer import Writer
from headstart.server.grammar_specs import GrammarSpec, grammar_spec
from headstart.server.jobs import Job
from headstart.server.limits import ServerOptions
from headstart.server.model import ServedModel
from headstart.server.named_fields import about
from headstart.server.protocol.chat import ChatRequest, for_template
from headstart.server.protocol.completion import CompletionRequest
from headstart.server.protocol.sampling import SamplingFields
from headstart.server.reasoning import after_reasoning
from headstart.server.refusals import too_long
from headstart.server.tool_calls import prepare as prepare_tools


@dataclass(frozen=True)
class Prepared:
    """A request that can be answered, and what will write its answer."""

    jobs: list[Job]
    grammar: GrammarSpec | None  # which all of them keep to; not compiled
    writer: Writer
    prompt: Any  # as it was given, for the log


def prepare_chat(
    request: ChatRequest, answer_id: str, model: ServedModel, limits: ServerOptions
) -> Prepared:
    messages = for_template(request.messages, model.chat_template)
    chat = prepare_tools(
        messages, tools=request.tools, tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls, format=model.tool_format,
        chat_template=model.chat_template,
        spec=grammar_spec(request.response_format, request.structured_outputs),
    )  # fmt: skip
    is_kept = model.keeps_special(chat.uses_tools)
    special = model.plain_special if is_kept and request.skip_special_tokens is not False else {}
    changes = {"skip_special_tokens": False} if is_kept else {}
    params = request.params(model.engine.prompts, **changes)
    options = {**request.template_options, **chat.template_options}
    asked = model.engine.read(chat.messages, _seeded(params), options)
    _check_length(asked.ids, request, model, limits.max_prompt_tokens)
    reasoning, start = model.reasoning_format, model.reasoning_start(asked.ids)
    spec = chat.grammar and after_reasoning(chat.grammar, reasoning, start)
    jobs = [Job(answer_id, asked, request.priority)]
    writer = ChatWriter(
        request, jobs, model=model, answer_id=answer_id, start=start, special=special,
        new_text=lambda: ChatText(chat, reasoning, start),
    )  # fmt: skip
    writer.limited_by = _limiting_field(request, spec)
    return Prepared(jobs, spec, writer, messages)


def prepare_completion(
    request: CompletionRequest, answer_id: str, model: ServedModel, limits: ServerOptions
) -> Prepared:
    engine = model.engine
    params = request.params(engine.prompts)
    spec = grammar_spec(request.response_format, request.structured_outputs)
    jobs = []
    for number, prompt in enumerate(request.prompts):
        asked = engine.read(prompt, _seeded(params))
        _check_length(asked.ids, request, model, limits.max_prompt_tokens)
        name = answer_id if number == 0 else f"{answer_id}-{number}"
        jobs.append(Job(name, asked, request.priority))
    # Decoded once and here: a long prompt would hold up the event loop, once for every sample.
    echoed = [_echo(prompt, model) for prompt in request.prompts] if request.echo else []
    writer = CompletionWriter(request, jobs, model=model, answer_id=answer_id, echoed=echoed)
    writer.limited_by = _limiting_field(request, spec)
    return Prepared(jobs, spec, writer, request.prompt)


def _limiting_field(request: SamplingFields, spec: GrammarSpec | None) -> str | None:
    """Which one is at fault if no token is left to choose; a grammar first."""
    if spec is not None:
        return spec.field
    lists = ("allowed_token_ids", "banned_token_ids", "logit_bias")
    return next((name for name in lists if getattr(request, name) is not None), None)


def _seeded(params: SamplingParams) -> SamplingParams:
    """With a seed that every client can read: many know whole numbers up to 53 bits only."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(53))


def _echo(prompt: str | list[int], model: ServedModel) -> str:
    with about("echo"):
        return prompt if isinstance(prompt, str) else model.decode(prompt)


def _check_length(
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
