"""Bodies of requests for answers: what both APIs take, and what POST /v1/chat/completions adds.

`SamplingFields` makes the engine's parameters of its fields; `check` refuses values that have the
right type and are still too many, too large or contradictory.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from headstart.data.prompt_reader import PromptReader
from headstart.engine.request import MAX_PRIORITY
from headstart.errors import RequestError
from headstart.sampling.params import SamplingParams
from headstart.server.options import ServerOptions
from headstart.server.protocol.base import (
    MOST_LISTED,
    CacheSalt,
    FewTokenIds,
    HeadstartFields,
    Part,
    RequestId,
    StreamOptions,
    Texts,
    Whole,
)
from headstart.server.protocol.messages import Messages, Tools, template_options
from headstart.server.refusals import Refusal

LONGEST_STOP = 256  # characters; every token is held against all of them
# Fields that go to the engine as they are, where they are given.
_SAME = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "n", "seed", "stop_token_ids", "allowed_token_ids", "banned_token_ids",
)  # fmt: skip


class SamplerFields(Part):
    """What requests of every API can ask of the sampler and of drafting."""

    model: str | None = Field(default=None, description="a served name, or `default`")
    stream: bool = False
    min_tokens: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(
        default=None, max_length=MOST_LISTED, description="by token id"
    )
    allowed_token_ids: FewTokenIds | None = None
    banned_token_ids: FewTokenIds | None = None
    stop_token_ids: FewTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Whole | None = None
    priority: int = Field(
        default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY,
        description="smaller is more important; with --allow-priority",
    )  # fmt: skip
    cache_salt: CacheSalt | None = Field(
        default=None, description="cached prefixes are shared by requests of the same one"
    )
    store: bool | None = Field(
        default=None, description="false: as headstart.learn; answers are never stored to be asked"
    )
    headstart: HeadstartFields = HeadstartFields()


class SamplingFields(SamplerFields):
    """What chats and completions have in common, and how the answer is sent."""

    default_max_tokens: ClassVar[int | None] = None  # None: as many as have room
    stream_options: StreamOptions | None = None
    max_tokens: Whole | None = None
    stop: str | Texts | None = None
    include_stop_str_in_output: bool | None = None
    n: Whole | None = None
    prompt_logprobs: Whole | None = Field(
        default=None, description="log-probabilities of the prompt, with so many alternatives"
    )
    request_id: RequestId | None = Field(default=None, description="the id of the answer")
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = Field(
        default=False, description="tokens of log-probabilities as `token_id:N`"
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description="text, json_object or json_schema"
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="one of json, regex, choice, grammar"
    )

    @property
    def own_names(self) -> dict[str, str]:
        """The engine's fields that have another name in this request."""
        return {name: f"headstart.{name}" for name in ("speculate", "draft_vocab", "draft_from")}

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def answers_field(self) -> str:
        """The field that asks for more than one answer."""
        return "n"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None without log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per token of the prompt; None without its log-probabilities."""
        return self.prompt_logprobs

    @property
    def logprobs_field(self) -> str:
        """The field that gave `num_logprobs`."""
        return "logprobs"

    @property
    def max_tokens_field(self) -> str:
        """The field that gave `asked_max_tokens`."""
        return "max_tokens"

    @property
    def asked_max_tokens(self) -> int | None:
        """The limit that the client gave, under either name."""
        return self.max_tokens

    def check(self, limits: ServerOptions) -> None:
        """RequestError or Refusal for more than this server gives."""
        if self.n is not None and self.n < 1:  # places for answers are counted by it
            raise Refusal(
                400, f"n is {self.n}; give at least 1.", param="n", code="integer_below_min_value"
            )
        _check_at_most("n", self.n or 1, limits.max_n, "--max-n")
        _check_at_most(
            self.logprobs_field, self.num_logprobs or 0, limits.max_logprobs, "--max-logprobs"
        )
        most = limits.max_logprobs
        _check_at_most("prompt_logprobs", self.prompt_logprobs or 0, most, "--max-logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs is given with stream; leave one of them out.",
                field="prompt_logprobs",
            )
        _check_at_most("stop", len(self.stops), limits.max_stops, "--max-stops", "texts")
        if any(len(text) > LONGEST_STOP for text in self.stops):
            raise RequestError(
                f"stop holds a text of over {LONGEST_STOP} characters; shorten it.", field="stop"
            )
        if self.priority != 0 and not limits.allow_priority:
            raise RequestError(
                f"priority is {self.priority}, and this server treats all requests alike (it was "
                "started without --allow-priority). Leave it out.", field="priority",
            )  # fmt: skip
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is given without stream; leave it out.", field="stream_options"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, prompts: PromptReader, **changes: Any) -> SamplingParams:
        """The engine's parameters; what is not given is the model's own default."""
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        speculate = self.headstart.speculate
        asked = self.asked_max_tokens
        limit = asked if asked is not None else self.default_max_tokens
        return prompts.default_params(
            **{
                **given,
                "max_tokens": limit,
                "stop": self.stops,
                "logit_bias": _biases(self.logit_bias),
                "logprobs": self.num_logprobs,
                "prompt_logprobs": self.num_prompt_logprobs,
                "speculate": 0 if speculate == "off" else speculate,
                "draft_vocab": self.headstart.draft_vocab,
                "draft_from": self.headstart.draft_from or "auto",
                **changes,
            }
        )


def _check_at_most(name: str, value: int, most: int, flag: str, unit: str = "") -> None:
    if value > most:
        what = f"{value} {unit}".strip()
        verb = "holds" if unit else "is"
        raise Refusal(
            400, f"{name} {verb} {what}; this server gives at most {most} ({flag}).", param=name,
            code="array_above_max_length" if unit else "integer_above_max_value",
        )  # fmt: skip


def _biases(given: dict[str, float] | None) -> dict[int, float] | None:
    bad = [key for key in given or () if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if bad:
        raise RequestError(
            f"logit_bias holds {bad[0][:40]!r}; its keys are token ids.", field="logit_bias"
        )
    return None if given is None else {int(key): value for key, value in given.items()}


class ChatRequest(SamplingFields):
    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Whole | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, description="for the chat template")
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def own_names(self) -> dict[str, str]:
        return {
            **super().own_names,
            "prompt": "messages",
            "max_tokens": self.max_tokens_field,
            "logprobs": self.logprobs_field,
        }

    @property
    def logprobs_field(self) -> str:
        return "top_logprobs" if self.top_logprobs is not None else "logprobs"

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_tokens is not None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, limits: ServerOptions) -> None:
        super().check(limits)
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "top_logprobs is given without logprobs; set logprobs to true.",
                field="top_logprobs",
            )
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError(
                f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; give one of them.",
                field="max_tokens",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message is given with add_generation_prompt; set the second to "
                "false.",
                field="continue_final_message",
            )

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def template_options(self) -> dict[str, Any]:
        own: dict[str, Any] = {"add_generation_prompt": self.add_generation_prompt}
        if self.continue_final_message:
            own["continue_final_message"] = True
        if self.reasoning_effort is not None:
            own["reasoning_effort"] = self.reasoning_effort
        return {**own, **template_options(self.chat_template_kwargs)}
