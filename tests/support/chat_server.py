"""A chat server for tests, in a thread: it answers by the seed, and fails as it is set."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, Any], dict[str, str]]  # status, body, headers


@dataclass
class ChatServer:
    """What the server was asked, and how it behaves."""

    render: Callable[[list[dict[str, str]]], list[int]]  # its chat template
    fails: Callable[[int, dict[str, Any]], Reply | str | None] = lambda number, body: None
    gives_ids: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of a message
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answered: int = 0
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        draw = random.Random(f"{body['seed']} {body['messages'][-1]['content']}")
        ids = [draw.randrange(2, 60) for _ in range(draw.randrange(4, 12))]
        message = {"role": "assistant", "content": " ".join(f"t{i}" for i in ids), **self.extra}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        document: dict[str, Any] = {"choices": [choice]}
        if self.gives_ids and body.get("return_token_ids"):
            choice["token_ids"] = [*ids, 1]
            document["prompt_token_ids"] = self.render(body["messages"])
        return document


class _Listener(ThreadingHTTPServer):
    request_queue_size = 128  # by default 5: a connection beyond that is tried again after 1 s


@contextmanager
def serving(server: ChatServer) -> Iterator[ChatServer]:
    """Run it on a free port; `server.url` says where."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "the-model"}]}, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                number = len(server.asked)
                server.asked.append(body)
                server.headers.append(dict(self.headers))
                server.num_open += 1
                server.most_open = max(server.most_open, server.num_open)
            try:
                failure = server.fails(number, body)
                if failure == "drop":
                    self.close_connection = True
                    return
                if failure == "nonsense":
                    self._send(200, None, {})
                elif isinstance(failure, tuple):
                    self._send(*failure)
                else:
                    server.answered += 1
                    self._send(200, server.answer(body), {})
            finally:
                with server.lock:
                    server.num_open -= 1

        def _send(self, status: int, body: Any, headers: dict[str, str]) -> None:
            data = b"<html>" if body is None else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    with _Listener(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
