"""A streaming client that takes times and never gives up on a run because of one request.

It speaks HTTP and nothing else: any OpenAI-compatible server will do.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headstart.bench.chunks import AnswerReader, BrokenStream, error_words
from headstart.bench.metrics_scrape import Counters, read_counters
from headstart.bench.records import Failure, FailureKind, RequestRecord
from headstart.bench.sse import EventReader
from headstart.bench.target import OPTIONAL_FIELDS, Bodies, Target, refusal_words
from headstart.bench.workload import CountTokens, Question, Workload
from headstart.documents import parse_json
from headstart.errors import MissingExtra, ServerError, install

if TYPE_CHECKING:
    import aiohttp

_CONNECT_SECONDS = 30.0
# Servers close idle connections after 5 seconds or more; a request that meets that would fail.
_KEEP_ALIVE_SECONDS = 2.0
_SCRAPE_SECONDS = 30.0
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Answer:
    """One request: when it was sent, what came, and when. Times are of time.perf_counter()."""

    def __init__(self, question: Question, turn: int, due: float):
        self.question, self.turn, self.due = question, turn, due
        self.sent = self.ended = due
        self.reader = AnswerReader()
        self.failure: Failure | None = None

    def record(self, origin: float, count_tokens: CountTokens | None) -> RequestRecord:
        """Times since `origin`. Tokenising takes its time: not while others are measured."""
        reader, question = self.reader, self.question
        counted_by, seconds, tokens = reader.timeline(count_tokens)
        return RequestRecord(
            id=f"{question.id}/{self.turn}" if question.num_turns > 1 else question.id,
            conversation=question.id,
            category=question.category,
            turn=self.turn,
            due_seconds=self.due - origin,
            sent_seconds=self.sent - origin,
            chunk_seconds=tuple(moment - origin for moment in seconds),
            chunk_tokens=tuple(tokens),
            end_seconds=self.ended - origin,
            counted_by=counted_by,
            prompt_tokens=reader.prompt_tokens,
            cached_tokens=reader.cached_tokens,
            max_tokens=question.max_tokens[self.turn],
            text=reader.text,
            token_ids=reader.token_ids,
            finish_reason=reader.finish_reason,
            speculation=reader.speculation,
            failure=self.failure,
        )


class Client:
    """One target's connections, within `async with`; `prepare()` comes before everything else."""

    def __init__(
        self, target: Target, workload: Workload, *, count_tokens: CountTokens | None = None
    ):
        self.target, self.workload, self.count_tokens = target, workload, count_tokens
        self.bodies = Bodies(target, workload)
        self.notes: list[str] = []
        self._url = target.root + _PATHS[workload.api]
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        try:
            import aiohttp
        except ImportError:
            raise MissingExtra(
                f"bench needs aiohttp, which is not installed. Install it: {install('bench')}."
            ) from None
        key = self.target.key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used outside of `async with`"
        return self._session

    async def prepare(self) -> None:
        """Find the model's name, and what this server understands; ServerError if nothing works."""
        if self.bodies.model is None:
            self.bodies.model = await self._first_model()
        question = self.workload.warm_up[0]
        while True:
            answer = await self.ask(question)
            if answer.failure is None:
                break
            self._leave_out(answer.failure)
        if answer.reader.token_ids is not None:
            self.bodies.left_out.add("continuous_usage_stats")  # no need to ask again
        if "ignore_eos" in self.bodies.left_out and self.workload.ignore_eos:
            self.notes.append("the server does not know ignore_eos: answers may end early")

    def _leave_out(self, failure: Failure) -> None:
        """The optional fields that a refusal names; all of them where it names none."""
        left = [name for name in OPTIONAL_FIELDS if name not in self.bodies.left_out]
        if failure.kind != "refused" or failure.status not in (400, 422) or not left:
            raise ServerError(_no_answer(self._url, failure))
        if (
            "continuous_usage_stats" in failure.words
            and "continuous_usage_stats" not in self.bodies.left_out
        ):
            self.bodies.left_out.add("continuous_usage_stats")
            return
        named = [name for name in left if name in failure.words]
        self.bodies.left_out.update(named or left)

    async def ask(
        self, question: Question, answers: tuple[str, ...] = (), *, due: float | None = None,
        body: bytes | None = None,
    ) -> Answer:  # fmt: skip
        """Never raises for what a server does."""
        data = body if body is not None else self.bodies.body(question, answers)
        answer = Answer(question, len(answers), time.perf_counter() if due is None else due)
        answer.sent = time.perf_counter()
        answer.failure = await self._read(data, answer.reader)
        answer.ended = time.perf_counter()
        return answer

    async def _read(self, data: bytes, reader: AnswerReader) -> Failure | None:
        import aiohttp

        has_begun = False
        try:
            async with asyncio.timeout(self.target.timeout_seconds):
                async with self.session.post(
                    self._url, data=data, headers={"Content-Type": "application/json"}
                ) as response:
                    if response.status != 200:
                        return await _refusal(response)
                    has_begun = True
                    await _read_events(response.content, reader)
        except BrokenStream as error:
            return error.failure
        except TimeoutError:  # also what aiohttp raises when connecting takes too long
            return Failure("timeout", f"no whole answer in {self.target.timeout_seconds:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Failure("cut" if has_begun else "connection", _connection_words(error)[:200])
        if not reader.is_whole:
            return Failure("cut", f"the stream ended after {reader.num_chunks} chunks")
        if not reader.num_chunks:
            return Failure("empty", f"finish_reason is {reader.finish_reason!r}")
        return None

    async def counters(self) -> Counters | None:
        """Of /metrics; None where the server has none."""
        import aiohttp

        try:
            async with asyncio.timeout(_SCRAPE_SECONDS):
                async with self.session.get(f"{self.target.root}/metrics") as response:
                    if response.status != 200:
                        return None
                    return read_counters(await response.text(errors="replace"))
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _first_model(self) -> str:
        import aiohttp

        url = f"{self.target.root}/v1/models"
        try:
            async with asyncio.timeout(_SCRAPE_SECONDS):
                async with self.session.get(url) as response:
                    if response.status != 200:
                        failure = await _refusal(response)
                        raise ServerError(refusal_words(url, failure.status, failure.words))
                    document: Any = parse_json(await response.read())
            return str(document["data"][0]["id"])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerError(
                f"{self.target.root} cannot be reached ({_connection_words(error)}). "
                "Check the URL, and that the server is up."
            ) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"{url} lists no model. Check the URL, or give --served-model."
            ) from error


def _no_answer(url: str, failure: Failure) -> str:
    if failure.status is not None and failure.status != 200:
        return refusal_words(url, failure.status, failure.words)
    return (
        f"{url} gives no whole answer ({failure.kind}: {failure.words.rstrip('.')}). Expected a "
        "stream of chunks; check the URL and --api, and see the server's log."
    )


def _connection_words(error: BaseException) -> str:
    """The system's reason where there is one: aiohttp adds words about TLS to it."""
    reason = getattr(error, "os_error", error)
    return getattr(reason, "strerror", None) or str(reason) or type(error).__name__


async def _read_events(content: aiohttp.StreamReader, reader: AnswerReader) -> None:
    events = EventReader()
    while not reader.is_done:
        received = await content.readany()
        now = time.perf_counter()
        if not received:
            return
        for data in events.feed(received):
            reader.take(now, data)


async def _refusal(response: aiohttp.ClientResponse) -> Failure:
    body = await response.content.read(65536)
    try:
        words = error_words(parse_json(body))
    except ValueError:
        words = None
    shown = words or body.decode("utf-8", "replace").strip()[:200] or response.reason or ""
    if response.status == 429:
        return Failure("busy", shown, 429, _retry_after(response.headers.get("Retry-After")))
    kind: FailureKind = "server_error" if response.status >= 500 else "refused"
    return Failure(kind, shown, response.status)


def _retry_after(value: str | None) -> float | None:
    """Seconds, or a date; None for neither."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())
