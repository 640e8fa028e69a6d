"""A server whose clients mean it harm: nothing breaks, nothing leaks, and its memory comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.attack_bodies import BIG, BODIES, CHAT, TEXT, chat, text
from support.forked_python import working_pid
from support.server_runs import HTTP, Server
from support.server_threads import wait_until

SECRET = "only-for-whoever-asked-this"
# Bytes that a server may keep: compiled grammars (one of those below has 75 MB), threads, caches.
_MOST_GROWTH = 150e6
_AT_ONCE = 150


def resident(server: Server) -> int:
    pages = int(Path(f"/proc/{working_pid(server.process)}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def gauge(server: Server, name: str) -> float:
    text = HTTP.get(f"{server.url}/metrics").text
    return sum(map(float, re.findall(rf"^{name} (\S+)$", text, re.M)))


def ask(server: Server, path: str, body: bytes, **headers: str) -> httpx.Response:
    sent = {"content-type": "application/json", **headers}
    return HTTP.post(server.url + path, content=body, headers=sent, timeout=60)


@pytest.fixture(scope="module")
def server(attacked: Server) -> Iterator[Server]:
    """Another client keeps asking; its text must never be seen elsewhere."""
    is_over, statuses = threading.Event(), list[int]()
    body = json.dumps({"prompt": SECRET, "max_tokens": 20, "echo": True, "stop": [SECRET]}).encode()

    def others() -> None:
        while not is_over.is_set():
            statuses.append(ask(attacked, TEXT, body).status_code)
            time.sleep(0.05)

    ask(attacked, TEXT, body)
    before = resident(attacked)
    thread = threading.Thread(target=others)
    thread.start()
    yield attacked
    deadline = time.monotonic() + 20  # a process that took over a single test asks only a little
    while statuses.count(200) <= 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    is_over.set()
    thread.join()
    assert set(statuses) <= {200, 429} and statuses.count(200) > 3
    wait_until(lambda: gauge(attacked, r'headstart:kv_cache_blocks\{.*"used"\}') == 0)
    assert gauge(attacked, r"headstart:num_requests_running\{.*\}") == 0
    wait_until(lambda: resident(attacked) < before + _MOST_GROWTH)
    assert not [line for line in attacked.lines if "Traceback" in line or SECRET in line]


def check(answer: httpx.Response) -> int:
    """No failure of ours, a refusal in the shape that clients know, nobody else's words."""
    assert answer.status_code < 500, answer.text[:500]
    assert SECRET not in answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert 10 < len(error["message"]) < 600 and "\n" not in error["message"], error
    return answer.status_code


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_answered_or_refused(server: Server, name: str) -> None:
    path, body, expected = BODIES[name]
    assert check(ask(server, path, body)) in expected


def test_a_prompt_of_megabytes_is_not_read_to_its_end(server: Server) -> None:
    path, body, _ = BODIES["a prompt of megabytes"]
    found = re.search(r"has over (\d+) tokens", ask(server, path, body).json()["error"]["message"])
    assert found is not None and int(found[1]) < 10_000


def test_the_last_of_equal_keys_counts(server: Server) -> None:
    path, body, _ = BODIES["keys twice"]
    assert ask(server, path, body).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-encoding": "gzip"}, 200),  # what is not packed is read as it is
        ({"sec-fetch-site": "cross-site", "origin": "http://else.where"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "http://else.where"}, 403),
        ({"origin": "http://else.where"}, 403),
        ({"origin": "http://else.where", "host": "else.where"}, 403),
        ({"host": "else.where"}, 403),
        ({"host": "localhost", "origin": "http://localhost"}, 200),
    ],
)
def test_who_sends_what_it_is_not_is_refused(
    server: Server, headers: dict[str, str], status: int
) -> None:
    assert check(ask(server, TEXT, text(), **headers)) == status


PATHS = [
    "//v1/models", "/v1/models/../../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e",
    "/v1//completions", "/v1/models/%00", "/v1/models/%ff%fe", "/%0d%0aSet-Cookie:%20a=b",
    "/v1/models?" + "q=1&" * 5000, "/" + "a" * 30_000, "/static/../pyproject.toml",
    "/docs/../../x", "/v1/models/%", "/metrics/%2e", "/health%20", "/V1/MODELS", "/v1/models;x=1",
    "http://else.where/v1/models", "*",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "TRACE", "BREW"])
def test_paths_lead_nowhere_else(server: Server, method: str) -> None:
    for path in PATHS:
        answer = said(
            server, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        status = int(answer.split()[1])
        assert status in (200, 307, 400, 404, 405, 415), (path, answer[:200])
        assert "root:" not in answer and "Set-Cookie" not in answer.split("\r\n\r\n")[0]


def said(server: Server, data: str | bytes) -> str:
    """All that the server says to these bytes, up to the end of the connection."""
    with connected(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data.encode() if isinstance(data, str) else data)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")
    return "HTTP/1.1 400 cut off"


def connected(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
TRICKS = {
    "a negative length": HEAD + "Content-Length: -5\r\n\r\n",
    "a huge length": HEAD + f"Content-Length: {BIG}\r\n\r\n",
    "two lengths": HEAD + "Content-Length: 2\r\nContent-Length: 300\r\n\r\n{}",
    "length and chunks": HEAD + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk of no size": HEAD + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a chunk of any size": HEAD + "Transfer-Encoding: chunked\r\n\r\n" + "f" * 40 + "\r\n",
    "strange coding": HEAD + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "no host": "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
    "no such version": "GET /health HTTP/9.9\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "no HTTP": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a header without a name": "GET /health HTTP/1.1\r\n: x\r\n\r\n",
    "a header on two lines": HEAD + "X: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "a zero byte in a header": "GET /health HTTP/1.1\r\nHost: localhost\r\nX: \0\r\n\r\n",
    "many headers": "GET /health HTTP/1.1\r\n" + "X: y\r\n" * 30_000 + "\r\n",
    "one long header": "GET /health HTTP/1.1\r\nX: " + "y" * 200_000 + "\r\n\r\n",
    "a key that is no text": HEAD + "Authorization: Bearer \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
    "an upgrade": "GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    "Connection: close, Upgrade\r\n\r\n",
}


@pytest.mark.parametrize("name", TRICKS)
def test_what_is_no_request_is_refused(server: Server, name: str) -> None:
    answer = said(server, TRICKS[name])
    assert answer.startswith("HTTP/1.1 ") and int(answer.split()[1]) < 500, answer[:300]
    assert SECRET not in answer


def test_requests_in_one_write_are_answered_in_turn(server: Server) -> None:
    one = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = "GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert said(server, one * 40 + last).count("HTTP/1.1 200") == 41


def test_clients_that_stop_midway_leave_nothing_behind(server: Server) -> None:
    """Half a body and silence, half a body and the end, a reset, and a stream that nobody reads."""
    body = text(stream=True, max_tokens=400, ignore_eos=True, n=4)
    head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for number in range(40):
            connection = stack.enter_context(connected(server))
            connection.sendall(head + (body if number % 4 > 1 else body[:20]))
            if number % 4 == 1:
                connection.shutdown(socket.SHUT_WR)
            elif number % 4 == 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
        assert check(ask(server, TEXT, text())) == 200  # everybody else is answered meanwhile
        assert HTTP.get(f"{server.url}/health", timeout=5).status_code == 200
    wait_until(lambda: gauge(server, r"headstart:num_requests_running\{.*\}") <= 1)


def test_a_flood_is_answered_or_told_to_come_back(server: Server) -> None:
    bodies = [text(max_tokens=8, n=2), chat(max_tokens=8), text(stream=True), b"{", text(n=10**9)]

    def one(number: int) -> int:
        path = CHAT if number % 5 == 1 else TEXT
        return check(ask(server, path, bodies[number % 5]))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = Counter(pool.map(one, range(_AT_ONCE * 2)))
    assert set(found) <= {200, 400, 429} and found[200] and found[400] == _AT_ONCE * 4 // 5
