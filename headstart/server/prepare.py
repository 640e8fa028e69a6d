"""From a request body to jobs for the engine: templates, tokens, forms. Runs beside the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.errors import RequestError
from headstart.server.answers.chat import ChatWriter
from headstart.server.answers.chat_text import ChatText
from headstart.server.answers.completion import CompletionWriter
from headstart.server.answers.writer import Writer
from headstart.server.grammar_specs import GrammarSpec, grammar_spec
from headstart.server.jobs import Job
from headstart.server.limits import ServerOptions
from headstart.server.model import ServedModel
from headstart.server.protocol.chat import ChatRequest
from headstart.server.protocol.completion import CompletionRequest
from headstart.server.reasoning import after_reasoning
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
    messages = [message.for_template() for message in request.messages]
    chat = prepare_tools(
        messages, tools=request.tools, tool_choice=request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls, format=model.tool_format,
        chat_template=model.chat_template,
        spec=grammar_spec(request.response_format, request.structured_outputs),
    )  # fmt: skip
    changes = {"skip_special_tokens": False} if model.keeps_special(chat.uses_tools) else {}
    params = request.params(model.engine.prompts, **changes)
    options = {**request.template_options, **chat.template_options}
    asked = model.engine.read(chat.messages, params, options)
    _check_length(asked.ids, limits)
    reasoning, start = model.reasoning_format, model.reasoning_start(asked.ids)
    spec = chat.grammar and after_reasoning(chat.grammar, reasoning, start)
    jobs = [Job(answer_id, asked, request.priority)]
    writer = ChatWriter(
        request, jobs, model=model, answer_id=answer_id, start=start,
        new_text=lambda: ChatText(chat, reasoning, start),
    )  # fmt: skip
    return Prepared(jobs, spec, writer, messages)


def prepare_completion(
    request: CompletionRequest, answer_id: str, model: ServedModel, limits: ServerOptions
) -> Prepared:
    engine = model.engine
    params = request.params(engine.prompts)
    spec = grammar_spec(request.response_format, request.structured_outputs)
    jobs = []
    for number, prompt in enumerate(request.prompts):
        asked = engine.read(prompt, params)
        _check_length(asked.ids, limits)
        name = answer_id if number == 0 else f"{answer_id}-{number}"
        jobs.append(Job(name, asked, request.priority))
    writer = CompletionWriter(request, jobs, model=model, answer_id=answer_id)
    return Prepared(jobs, spec, writer, request.prompt)


def _check_length(ids: list[int], limits: ServerOptions) -> None:
    most = limits.max_prompt_tokens
    if most is not None and len(ids) > most:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; this server reads at most {most} "
            "(--max-prompt-tokens). Shorten it."
        )
