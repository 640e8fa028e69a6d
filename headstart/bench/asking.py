"""A few plain questions to a server; its streams under load are read by client.py."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from headstart.bench.chunks import error_words
from headstart.bench.target import Target, refusal_words
from headstart.bench.tokens import Tokens
from headstart.documents import parse_json
from headstart.errors import ServerError

_SECONDS = 30.0
_CHAT_SECONDS = 600.0  # a first answer may wait for kernels to be compiled
_MOST_BYTES = 1 << 22
# Names of the text: vLLM's, SGLang's and ours; llama.cpp's.
_TEXTS = ("prompt", "content")


class Asking:
    """One server; ServerError, with its own words, where it lists no model."""

    def __init__(self, target: Target):
        self._target = target
        # No proxy: client.py uses none either.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._model = target.model

    @property
    def model(self) -> str:
        if self._model is None:
            url = f"{self._target.root}/v1/models"
            status, found = self.ask("/v1/models")
            if status != 200:
                raise ServerError(refusal_words(url, status, _said(found)))
            try:
                self._model = str(found["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise ServerError(
                    f"{url} lists no model. Check the URL, or give --served-model."
                ) from None
        return self._model

    def chat_refusal(self) -> str | None:
        """What the server says where the model has no chat template; None in any other case."""
        hello = [{"role": "user", "content": "hello"}]
        status, found = self.ask(
            "/v1/chat/completions",
            {"model": self.model, "messages": hello, "max_tokens": 1},
            seconds=min(_CHAT_SECONDS, self._target.timeout_seconds),
        )
        words = "" if status == 200 else _said(found)
        return words if "chat template" in words.replace("_", " ").lower() else None

    def tokens(self) -> Tokens | None:
        """By /tokenize and /detokenize; None where the server has not both."""
        for name in _TEXTS:
            tokens = Tokens(partial(self._encode, name), partial(self._decode, name))
            ids = tokens.encode("hello world")
            if ids and tokens.decode(ids) is not None:
                return tokens
        return None

    def _encode(self, name: str, text: str) -> list[int]:
        """Empty where the server does not answer with tokens."""
        body: dict[str, str | bool] = {"model": self.model, name: text}
        if name == "prompt":  # the other form adds none unless asked
            body["add_special_tokens"] = False
        status, found = self.ask("/tokenize", body)
        ids = found.get("tokens") if status == 200 and isinstance(found, dict) else None
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            return []
        return ids

    def _decode(self, name: str, ids: Sequence[int]) -> str | None:
        status, found = self.ask("/detokenize", {"model": self.model, "tokens": list(ids)})
        text = found.get(name) if status == 200 and isinstance(found, dict) else None
        return text if isinstance(text, str) else None

    def ask(
        self, path: str, body: dict[str, Any] | None = None, *, seconds: float = _SECONDS
    ) -> tuple[int, Any]:
        """Status and document (or text); ServerError where no server answers."""
        with self.answered(path, body, seconds) as (status, answer):
            return status, _document(answer.read(_MOST_BYTES))

    @contextmanager
    def answered(
        self, path: str, body: dict[str, Any] | None = None, seconds: float = _SECONDS
    ) -> Iterator[tuple[int, Any]]:
        """Status and response, to be read as it comes; ServerError where no server answers."""
        headers = {"Content-Type": "application/json"}
        if self._target.key:
            headers["Authorization"] = f"Bearer {self._target.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._target.root + path, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=seconds) as response:
                yield response.status, response
        except urllib.error.HTTPError as error:
            with error:
                yield error.code, error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            words = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
            raise ServerError(
                f"{self._target.root} cannot be reached ({words}). Check the URL, and that the "
                "server is up."
            ) from error


def _document(data: bytes) -> Any:
    try:
        return parse_json(data)
    except ValueError:
        return data.decode("utf-8", "replace")


def refusal_of(response: Any) -> str:
    """What a response that is no answer says."""
    return _said(_document(response.read(_MOST_BYTES)))


def _said(found: Any) -> str:
    return error_words(found) or (found.strip()[:200] if isinstance(found, str) else str(found))
