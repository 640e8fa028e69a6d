"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from headstart.errors import RequestError
from headstart.server.options import ServerOptions
from headstart.server.protocol.base import Texts, TokenIds, Whole
from headstart.server.protocol.sampling import SamplingFields

_DEFAULT_TOKENS = 16  # OpenAI's


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[Texts, Field(min_length=1)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    logprobs: Whole | None = None
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, told apart by what is inside; one of no tokens is refused later on."""
        given: Any = self.prompt
        is_one = isinstance(given, str) or not given or isinstance(given[0], int)
        return [given] if is_one else list(given)

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * (self.n or 1)

    @property
    def answers_field(self) -> str:
        return "prompt" if (self.n or 1) == 1 else "n"

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def default_max_tokens(self) -> int | None:
        return _DEFAULT_TOKENS

    def check(self, limits: ServerOptions) -> None:
        super().check(limits)
        if self.num_answers > limits.max_n:
            raise RequestError(
                f"prompt holds {len(self.prompts)} prompts of {self.n or 1} answers each; this "
                f"server gives at most {limits.max_n} answers per request (--max-n).",
                field="prompt",
            )
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "echo is given with logprobs; those of a prompt are not computed.", field="echo"
            )
