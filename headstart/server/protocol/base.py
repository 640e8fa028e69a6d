"""What all request bodies share: strict types, and one list each of what is ignored and refused.

A field that would change the answer and is not implemented is refused by name. Fields that change
nothing here are accepted from `HARMLESS`, and values that say what happens anyway from `NEUTRAL`;
null stands for a field that is left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headstart.engine.options import MAX_DRAFTS
from headstart.sampling.params import DraftFrom

# Accepted and without effect: bookkeeping, billing, and caching that this server does anyway.
HARMLESS = {
    "user": "who asks",
    "metadata": "notes of the client",
    "service_tier": "there is one tier",
    "safety_identifier": "who asks",
    "prompt_cache_key": "equal prefixes are always cached",
    "prompt_cache_retention": "equal prefixes are always cached",
    "cache_prompt": "equal prefixes are always cached",
}
# Other servers' names for what `structured_outputs` asks for.
STRUCTURED = {
    "grammar": "grammar",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "json_schema": "json",
}
# Values of known fields that ask for what this server does in any case.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "id_slot": (-1,),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "mirostat": (0,),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
# OpenAI's and others' fields that are understood and not implemented: why, or what instead.
REFUSED = {
    "add_special_tokens": "a chat template writes the special tokens itself",
    "audio": "this server answers with text",
    "bad_words": "give banned_token_ids; POST /tokenize says the ids of a word",
    "background": "this server keeps no answers; stream instead",
    "best_of": "give n and choose yourself",
    "chat_template": "clients cannot bring one; start the server with --chat-template FILE",
    "conversation": "this server keeps no conversations; send all of it in input",
    "detokenize": "give return_token_ids and leave the text",
    "do_sample": "temperature 0 always takes the likeliest token",
    "documents": "give chat_template_kwargs",
    "early_stopping": "this server does not search with beams",
    "echo": "a chat has no text to repeat; POST /v1/completions has",
    "enable_thinking": "give it in chat_template_kwargs",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "guided_decoding_backend": "xgrammar compiles all grammars",
    "guided_whitespace_pattern": "at most one blank stands between parts of a JSON text",
    "id_slot": "requests choose no slots; equal prefixes are always cached",
    "input": "POST /v1/responses reads it; give messages to a chat, prompt to /v1/completions",
    "include_reasoning": "reasoning is always given, as reasoning_content",
    "length_penalty": "this server does not search with beams",
    "mirostat": "give top_p or min_p",
    "messages": "POST /v1/chat/completions and /v1/messages read them",
    "modalities": "this server answers with text",
    "logits_processors": "give logit_bias, allowed_token_ids or structured_outputs",
    "max_tool_calls": "calls are made by the client, which can count them",
    "n_predict": "give max_tokens",
    "prediction": "drafts come from the model's own head",
    "prompt": "POST /v1/completions reads it; give messages to a chat, input to /v1/responses",
    "previous_response_id": "this server keeps no answers; send the whole conversation in input",
    "reasoning_format": "--reasoning-parser says how reasoning is split off",
    "repeat_penalty": "give repetition_penalty",
    "spaces_between_special_tokens": "texts are what the tokenizer makes of them",
    "stop_sequences": "give stop",
    "suffix": "this server continues text, it does not fill in",
    "thinking": "POST /v1/messages takes it; templates read chat_template_kwargs",
    "truncate_prompt_tokens": "shorten the prompt; POST /tokenize counts its tokens",
    "truncation": "this server reads a prompt whole or not at all; shorten it",
    "typical_p": "give top_p or min_p",
    "use_beam_search": "give n and a temperature",
    "verbosity": "say it in the prompt",
    "web_search_options": "this server does not search",
}

# Arguments of the template engine rather than of the template: a client must not bring its own
# template (a program that runs here), nor cut what the model reads.
NOT_FOR_TEMPLATES = (
    "chat_template", "continue_final_message", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
MOST_LISTED = (
    4096  # tokens that a request may list for its sampler, which goes through them every step
)
Whole = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
# Lists stop at their first bad entry: a million complaints about one request are of no use.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 22)]
FewTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_LISTED)]
Texts = Annotated[list[str], Field(fail_fast=True)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Speculate = Annotated[int, Field(ge=0, le=MAX_DRAFTS)] | Literal["auto", "off"]


class Part(BaseModel):
    """A piece of a request body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def means_nothing(kind: type[Part], name: str, value: Any) -> bool:
    """Whether a field of a body says nothing: null, harmless, or what happens anyway."""
    if value is None or name in HARMLESS:
        return True
    known = () if name in kind.model_fields else NEUTRAL.get(name, ())
    return any(type(value) is type(own) and value == own for own in known)


class HeadstartFields(Part):
    """This server's own fields, all under the name `headstart`."""

    speculate: Speculate | None = Field(
        default=None, description="draft tokens per round: a number, auto, or off"
    )
    draft_vocab: str | None = Field(default=None, description="draft vocabulary, by name")
    draft_from: DraftFrom | None = Field(
        default=None, description="where drafts come from: head, context (copied), or auto"
    )
    statistics: bool = Field(default=False, description="say what drafting gave for this answer")
    origins: bool = Field(
        default=False,
        description="say of each token whether it was accepted, copied, recovered or bonus",
    )
    learn: bool = Field(
        default=True, description="false: a server with --learn keeps nothing of this request"
    )


def field_names(kind: type[Part]) -> list[str]:
    """What a body of this kind may hold, our own fields as `headstart.speculate`."""
    own = HeadstartFields.model_fields if "headstart" in kind.model_fields else ()
    return [*kind.model_fields, *(f"headstart.{name}" for name in own)]


class StreamOptions(Part):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="usage with every chunk")
    include_obfuscation: bool = Field(default=False, description="accepted and without effect")
