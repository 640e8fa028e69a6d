"""Answers from an OpenAI-compatible server.

Token ids are taken from the server where it returns them (`return_token_ids`: vLLM, Headstart);
else the text is tokenised again, which is nearly always the same, and marked as not exact. What a
server does with the seed that it is sent is its own business: its noise cannot be replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

from headstart.data.journal import Answer
from headstart.data.prompt_reader import PromptReader
from headstart.distill.dialogue import Dialogue, answer_seed
from headstart.distill.options import DistillOptions
from headstart.distill.retrying import Refused, RetryingClient
from headstart.errors import DataError, MissingExtra, ServerError, install

# Not every server knows these. They are left out for good when a server says so; what else it may
# refuse would change the text, and is the user's to decide.
_OPTIONAL_FIELDS = ("return_token_ids", "repetition_penalty", "min_p")
_MAX_REFUSED = 3  # in a row, before any answer: then it is not about the prompts


class RemoteAsker:
    def __init__(
        self, reader: PromptReader, options: DistillOptions, vocab_size: int,
        warn: Callable[[str], None],
    ):  # fmt: skip
        require_httpx()
        self._reader, self._options, self._vocab_size = reader, options, vocab_size
        self._warn = warn
        self._optional: dict[str, Any] = {
            "return_token_ids": True, "repetition_penalty": 1.0, "min_p": 0.0,
        }  # fmt: skip
        self._warned: set[str] = set()
        self._num_answers = 0
        self.refused: dict[str, str] = {}  # prompt id -> why

    def ask(self, dialogues: Iterable[Dialogue], keep: Callable[[Answer], None]) -> None:
        """Carry every dialogue to its end; `keep` gets each answer as soon as it is there."""
        asyncio.run(self._ask_all([d for d in dialogues if d.turns_left], keep))

    async def _ask_all(self, dialogues: list[Dialogue], keep: Callable[[Answer], None]) -> None:
        import httpx

        options = self._options
        key = options.key
        async with httpx.AsyncClient(
            base_url=_base_url(str(options.server)),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(options.timeout_seconds, connect=30.0),
            limits=httpx.Limits(max_connections=options.concurrency),
        ) as client:
            server = RetryingClient(client, options.retries, seconds=options.timeout_seconds)
            name = options.server_model or await _first_model(server)
            waiting = iter(dialogues)

            async def work() -> None:
                for dialogue in waiting:  # shared: each worker takes the next one
                    await self._carry_on(server, name, dialogue, keep)

            count = min(options.concurrency, len(dialogues))
            workers = [asyncio.create_task(work()) for _ in range(count)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _carry_on(
        self, server: RetryingClient, name: str, dialogue: Dialogue, keep: Callable[[Answer], None]
    ) -> None:
        while dialogue.turns_left:
            try:
                document = await self._post(server, name, dialogue)
            except Refused as error:
                self._note_refusal(dialogue, error)
                return
            answer = self._answer(dialogue, document)
            self._num_answers += 1
            dialogue.take(answer)
            keep(answer)

    async def _post(self, server: RetryingClient, name: str, dialogue: Dialogue) -> dict[str, Any]:
        while True:
            body = self._body(name, dialogue)
            try:
                return await server.post("chat/completions", body)
            except Refused as error:
                unknown = [f for f in _OPTIONAL_FIELDS if f in error.words and f in body]
                if not unknown:
                    raise
                for field in unknown:
                    self._optional.pop(field, None)

    def _body(self, name: str, dialogue: Dialogue) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": name,
            "messages": [dict(message) for message in dialogue.messages()],
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_tokens": options.max_tokens,
            "seed": self._seed(dialogue),
            **self._optional,
        }
        if options.top_k > 0:
            body["top_k"] = options.top_k
        if options.chat_template_kwargs:
            body["chat_template_kwargs"] = options.chat_template_kwargs
        return body

    def _seed(self, dialogue: Dialogue) -> int:
        return answer_seed(
            self._options.seed, dialogue.conversation.id, dialogue.turn, dialogue.sample
        )

    def _note_refusal(self, dialogue: Dialogue, error: Refused) -> None:
        self.refused[dialogue.conversation.id] = f"the server says {error}"
        if not self._num_answers and len(self.refused) >= _MAX_REFUSED:
            raise ServerError(
                f"{self._options.server} refuses every prompt; it says {error}. Change the option "
                "that it names (--top-k 0 leaves top_k out)."
            )

    def _answer(self, dialogue: Dialogue, document: dict[str, Any]) -> Answer:
        try:
            choice = document["choices"][0]
            message = choice["message"]
            text = message.get("content") or ""
            finish_reason = str(choice.get("finish_reason"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{self._options.server} answered without choices and message "
                f"({str(document)[:120]}); expected a chat completion. Check the URL."
            ) from error
        prompt_ids = document.get("prompt_token_ids") or choice.get("prompt_token_ids")
        answer_ids = choice.get("token_ids")
        is_exact = self._are_ids(prompt_ids) and self._are_ids(answer_ids)
        if is_exact:
            self._compare_prompt(dialogue, prompt_ids)
        else:
            prompt_ids, answer_ids = self._tokenize(dialogue, message, text, finish_reason)
        return dialogue.answer(
            text=text, prompt_ids=prompt_ids, answer_ids=answer_ids, finish_reason=finish_reason,
            server_seed=self._seed(dialogue), exact_ids=is_exact,
        )  # fmt: skip

    def _are_ids(self, value: Any) -> bool:
        if not isinstance(value, list) or not value or any(type(i) is not int for i in value):
            return False
        if not 0 <= min(value) <= max(value) < self._vocab_size:
            raise DataError(
                f"{self._options.server} returned token {max(value)}; the model has "
                f"{self._vocab_size} tokens. Give the MODEL that the server runs."
            )
        return True

    def _compare_prompt(self, dialogue: Dialogue, prompt_ids: list[int]) -> None:
        """Once: whether the server's template is the folder's."""
        if "template" in self._warned or not _has_template(self._reader):
            return
        own = self._reader.read(dialogue.messages(), self._options.chat_template_kwargs)
        if own != prompt_ids:
            self._warn_once(
                "template",
                "the server renders prompts otherwise than this model's chat template; its ids are "
                "kept. Serve the head with the same template, or acceptance will differ",
            )
        self._warned.add("template")

    def _tokenize(
        self, dialogue: Dialogue, message: dict[str, Any], text: str, finish_reason: str
    ) -> tuple[list[int], list[int]]:
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ServerError(
                f"{self._options.server} cuts the reasoning out of the answer and returns no token "
                "ids, so what the model wrote is lost. Start it without a reasoning parser."
            )
        if not _has_template(self._reader):
            raise DataError(
                "the server returns no token ids, and the model's folder has no tokenizer with a "
                "chat template to make them. Add those files to the folder."
            )
        self._warn_once(
            "ids",
            "the server returns no token ids: texts are tokenised again and marked as not exact",
        )
        reader = self._reader
        ids = reader.encode(text, add_special_tokens=False)
        end = reader.tokenizer.eos_token_id
        if finish_reason == "stop" and end is not None:
            ids.append(end)
        return reader.read(dialogue.messages(), self._options.chat_template_kwargs), ids

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(text)


def require_httpx() -> None:
    """MissingExtra where httpx is not installed."""
    if find_spec("httpx") is None:
        raise MissingExtra(
            f"--server needs httpx, which is not installed. Install it: {install('train')}."
        )


def _has_template(reader: PromptReader) -> bool:
    return bool(getattr(reader.tokenizer, "chat_template", None))


def _base_url(server: str) -> str:
    url = server.rstrip("/")
    return f"{url}/" if url.endswith("/v1") else f"{url}/v1/"


async def _first_model(server: RetryingClient) -> str:
    try:
        document = await server.get("models")
        return str(document["data"][0]["id"])
    except (Refused, KeyError, IndexError, TypeError) as error:
        raise ServerError(
            f"the server does not list its models ({error}). Say which with --server-model."
        ) from error
