"""A live server under attack, and how long others wait for their answers meanwhile."""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attacks import routes
from attacks.grammars import hostile_grammars
from attacks.outcome import Outcome, support

_USUAL, _USUAL_SECONDS = 10, 3  # requests of others before an attack, and after it; at least
_FEWEST = 15  # during it, so that a median says something
_MOST_TIMES = 2.0
_MOST_SECONDS = 5.0  # of a scrape, of /health, or of a short chat beside made-up methods
_MOST_GROWTH = 65_536  # bytes of /metrics
_KEY = "sk-attacked-5b1f0c2d9e"
_HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"}
_PATHS = (
    "/v1/chat/completions",
    "/health",
    "/v1/messages",
    "/server_info",
    "/v1/responses",
    "/load",
)
_ASKED = {"prompt": "abc", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
LOOPING = """{%- set said = messages[0].content -%}
{%- if said == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}
{%- endfor %}{% endif %}{%- if said == 'power' %}{{ 9 ** (9 ** (said | length + 4)) }}{% endif %}
{{- '<|user|>' }}{{ said }}<|assistant|>"""


class Others:
    """A client that keeps asking, and notes how long each answer took."""

    def __init__(self, url: str):
        self._host = url.removeprefix("http://")
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self._is_over = threading.Event()

    def ask(self) -> None:
        started = time.perf_counter()
        status, body = post(self._host, "/v1/completions", _ASKED)
        self.seconds.append(time.perf_counter() - started)
        if status != 200:
            self.wrong.append(f"others got {status}: {body[:100]!r}")

    def _keep_asking(self) -> None:
        while not self._is_over.is_set():
            self.ask()
            time.sleep(0.02)

    @contextmanager
    def asking(self) -> Iterator[None]:
        self.seconds = []
        thread = threading.Thread(target=self._keep_asking)
        self._is_over.clear()
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()


def post(host: str, path: str, body: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body).encode(), _HEADERS)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def get(host: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, timeout=120)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def methods(host: str, number: int, outcome: Outcome) -> None:
    """Methods that do not exist, all different, without a key on routes that do; meanwhile four
    clients scrape /metrics, one asks /health, and one chats."""
    is_over = threading.Event()
    messages = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}

    def keep(what: str, ask: Callable[[], tuple[int, bytes]]) -> None:
        while not is_over.is_set():
            started = time.monotonic()
            status, _ = ask()
            seconds = time.monotonic() - started
            outcome.ends[f"{what}: {status}"] += 1
            if status != 200 or seconds > _MOST_SECONDS:
                outcome.broken.append(f"{what}: {status} after {seconds:.1f} s")
            time.sleep(0.5)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            pool.submit(keep, "scrape", lambda: get(host, "/metrics"))
        pool.submit(keep, "health", lambda: get(host, "/health"))
        pool.submit(keep, "chat", lambda: post(host, "/v1/chat/completions", messages))
        try:
            _made_up_methods(host, number, outcome)
        finally:
            is_over.set()


def _made_up_methods(host: str, number: int, outcome: Outcome) -> None:
    size = len(get(host, "/metrics")[1])
    connection = http.client.HTTPConnection(host, timeout=60)
    for at in range(number):
        connection.request(f"M{at}", _PATHS[at % len(_PATHS)])
        response = connection.getresponse()
        response.read()
        outcome.ends[str(response.status)] += 1
        if response.status not in (401, 405):
            outcome.broken.append(f"method M{at}: {response.status}")
    connection.close()
    if (growth := len(get(host, "/metrics")[1]) - size) > _MOST_GROWTH:
        outcome.broken.append(f"/metrics has grown by {growth} bytes")


def bodies(host: str, asked: list[tuple[str, bytes]], outcome: Outcome) -> None:
    def one(each: tuple[str, bytes]) -> None:
        connection = http.client.HTTPConnection(host, timeout=120)
        try:
            connection.request("POST", each[0], each[1], _HEADERS)
            response = connection.getresponse()
            said = response.read()
        finally:
            connection.close()
        outcome.ends[str(response.status)] += 1
        if response.status >= 500 and response.status != 503:
            outcome.broken.append(f"{each[1][:80]!r}: {response.status} {said[:100]!r}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, asked))


def half_requests(host: str, number: int, outcome: Outcome) -> None:
    """Connections that send a part of a request, and then nothing."""
    name, port = host.split(":")
    held = []
    for at in range(number):
        made = socket.create_connection((name, int(port)), timeout=20)
        made.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"[: 9 + at % 50]
        )
        held.append(made)
        outcome.ends["held"] += 1
    time.sleep(1)
    for made in held:
        made.close()


def chats(host: str, number: int, outcome: Outcome) -> None:
    """Conversations for which the model's template never ends, by all routes that have one."""

    def one(at: int) -> None:
        content = ("loop", "power")[at % 2]
        messages = [{"role": "user", "content": content}]
        asked = {"messages": messages, "max_tokens": 2}
        ways = [("/v1/chat/completions", json.dumps(asked).encode()), *routes.looping(content)]
        path, sent = ways[at // 2 % len(ways)]
        status, body = post(host, path, json.loads(sent))
        outcome.ends[str(status)] += 1
        if status not in (400, 503) or b"Traceback" in body:
            outcome.broken.append(f"a looping template at {path}: {status} {body[:100]!r}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(number)))


def attack_server(
    folder: Path, counts: dict[str, int], say: Callable[[str], None]
) -> list[Outcome]:
    """Each attack in turn, on one server process, with others asking all the while."""
    runs, attack_bodies = support("server_runs"), support("attack_bodies")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(LOOPING)
    grammars = [
        ("/v1/chat/completions", json.dumps({
            "messages": [{"role": "user", "content": "a"}], "max_tokens": 8, **grammar,
        }).encode())
        for grammar in hostile_grammars()
    ]  # fmt: skip
    hostile = [(path, body) for path, body, _ in attack_bodies.BODIES.values()]
    attacks: dict[str, Callable[[str, Outcome], None]] = {
        "keys": lambda host, o: routes.keys(host, _KEY, o),
        "made-up methods": lambda host, o: methods(host, counts["methods"], o),
        "hostile bodies": lambda host, o: bodies(host, hostile, o),
        "hostile grammars": lambda host, o: bodies(host, grammars, o),
        "other APIs: hostile bodies": lambda host, o: bodies(host, [*routes.hostile_bodies()], o),
        "other APIs: hostile grammars": lambda host, o: bodies(
            host, [*routes.hostile_formats()], o
        ),
        "routes without a key": lambda host, o: routes.without_key(host, o, rounds=5),
        "settings and cache": lambda host, o: routes.settings(host, _HEADERS, o, rounds=20),
        "half requests": lambda host, o: half_requests(host, counts["connections"], o),
        "templates that loop": lambda host, o: chats(host, counts["chats"], o),
    }
    flags = (
        "--api-key", _KEY, "--max-template-seconds", "1", "--max-grammar-seconds", "5",
        "--max-model-len", "512", "--served-model-name", "attacked",
    )  # fmt: skip
    outcomes = []
    with runs.running(folder, "--speculate", "0", *flags) as server:
        host = server.url.removeprefix("http://")
        for name, attack in attacks.items():
            outcomes.append(_measured(server.url, host, name, attack))
            say(f"{name}: {outcomes[-1].facts}")
        code = server.end()
        tracebacks = sum("Traceback" in line for line in server.lines)
        told = [line for line in server.lines if _KEY in line]
    outcomes[0].broken += [f"the key is in the log: {line[:200]}" for line in told]
    outcomes[0].facts["lines of the server's log"] = len(server.lines)
    outcomes[-1].facts["server ended with"] = code
    if code != 0 or tracebacks:
        outcomes[-1].broken.append(f"the server ended with {code}, tracebacks: {tracebacks}")
    return outcomes


def _from_elsewhere(attack: Callable[[str, Outcome], None], host: str, outcome: Outcome) -> None:
    """Attack from another process: in this one its threads would hold up the measuring ones."""
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        made = Outcome(outcome.name)
        try:
            attack(host, made)
        except Exception as error:
            made.broken.append(f"the attack failed: {error!r}")
        theirs.sendall(json.dumps([made.ends, made.broken]).encode())
        os._exit(0)
    theirs.close()
    with ours, ours.makefile("rb") as stream:
        ends, broken = json.loads(stream.read() or b'[{}, ["the attack ended"]]')
    os.waitpid(child, 0)
    outcome.ends.update(ends)
    outcome.broken += broken


def _usual(others: Others) -> list[float]:
    others.seconds, started = [], time.monotonic()
    while len(others.seconds) < _USUAL or time.monotonic() - started < _USUAL_SECONDS:
        others.ask()
        time.sleep(0.02)
    return others.seconds


def _measured(url: str, host: str, name: str, attack: Callable[[str, Outcome], None]) -> Outcome:
    """The attack, with what others notice; their usual time is taken before and after it."""
    outcome, others = Outcome(name), Others(url)
    usual, page = _usual(others), len(get(host, "/metrics")[1])
    started = time.monotonic()
    with others.asking():
        _from_elsewhere(attack, host, outcome)
        while len(others.seconds) < _FEWEST and time.monotonic() - started < 60:
            _from_elsewhere(attack, host, outcome)  # too short to see what others notice of it
    seconds, during = time.monotonic() - started, sorted(others.seconds)
    usual = sorted(usual + _usual(others))
    times = statistics.median(during) / statistics.median(usual)
    outcome.facts = {
        "seconds": round(seconds, 1),
        "others: usual median ms": round(1e3 * statistics.median(usual), 1),
        "others: median ms during it": round(1e3 * statistics.median(during), 1),
        "others: 95th percentile ms, usual and during it": [
            round(1e3 * part[int(0.95 * (len(part) - 1))], 1) for part in (usual, during)
        ],
        "times as long": round(times, 2),
        "requests of others during it": len(during),
        "/metrics KB before and after": [page >> 10, len(get(host, "/metrics")[1]) >> 10],
    }
    outcome.broken += others.wrong
    if times > _MOST_TIMES:
        outcome.broken.append(f"others waited {times:.2f} times as long as usual")
    if (health := get(host, "/health")[0]) != 200:
        outcome.broken.append(f"/health is {health} afterwards")
    return outcome
