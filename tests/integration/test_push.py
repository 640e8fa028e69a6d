"""`headstart push`: another head into a running server; and what the server does not take."""

from __future__ import annotations

import json
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.commands import headstart
from support.head_edits import export
from support.server_runs import HTTP, served
from support.server_threads import Running, serving, small_engine, wait_until
from support.swapped_heads import Heads, bits_of, heads_of
from support.tiny_fixture import Tiny

from headstart.engine.engine import Engine
from headstart.errors import ConfigError
from headstart.heads.formats import open_head
from headstart.push.sent_head import CONTENT_TYPE, SentHead
from headstart.server.options import ServerOptions

KEY = "the-push-key"
LIMIT = 3_000_000


@pytest.fixture(scope="module")
def heads(tiny: Tiny) -> Heads:
    return heads_of(served(tiny))


@pytest.fixture(scope="module")
def engine(heads: Heads) -> Engine:
    return small_engine(heads.weak_model, kernels="off")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where what arrives is kept; empty at the end."""
    folder = tmp_path / "arriving"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    wait_until(lambda: not list(folder.iterdir()))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "push.key"
    file.write_text(f"{KEY}\n")
    return file


@pytest.fixture
def server(engine: Engine, place: Path, key_file: Path) -> Iterator[Running]:
    """One that takes heads, of an engine whose head no test but those that say so changes."""
    options: dict[str, Any] = {"max_push_bytes": LIMIT, "api_key": ["a-client"]}
    with serving(engine, allow_push=True, push_key_file=str(key_file), **options) as running:
        yield running


def push(server: Running, head: Path, key_file: Path) -> Any:
    return headstart("push", str(head), "--server", server.url, "--key-file", str(key_file))


ASKED: dict[str, Any] = {
    "prompt": "abcabc",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
}


def ask(server: Running) -> str:
    headers = {"Authorization": "Bearer a-client"}
    answer = HTTP.post(f"{server.url}/v1/completions", json=ASKED, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_a_head_is_swapped_while_an_answer_is_written(
    server: Running, engine: Engine, heads: Heads, key_file: Path, tmp_path: Path
) -> None:
    wanted, before = ask(server), bits_of(engine)
    texts: list[str] = []
    asking = threading.Thread(target=lambda: texts.append(ask(server)))
    asking.start()
    wait_until(lambda: bool(engine.scheduler.running))
    words = ("--server", server.url, "--key-file", str(key_file), "--json")
    done = headstart("push", str(heads.good), *words)
    asking.join(60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["server"] == "headstart" and said["head_version"] == 1
    assert said["digest"].startswith("sha256:") and said["num_bytes"] > 100_000
    assert texts == [wanted] and ask(server) == wanted
    fresh = small_engine(heads.model, kernels="off")
    assert bits_of(engine) == bits_of(fresh) != before
    page = HTTP.get(f"{server.url}/metrics").text
    assert 'headstart:head_version{engine="0",model_name="small"} 1.0' in page
    assert 'headstart:head_swaps_total{engine="0",model_name="small"} 1.0' in page
    # any format does, and a whole model: back to the first head
    other = export(heads.weak_model, "speculators", tmp_path / "speculators")
    for number, head in enumerate((heads.model, other), 2):
        assert push(server, head, key_file).returncode == 0
        assert engine.head_version == number
    assert bits_of(engine) == before


def test_without_allow_push_the_refusal_has_its_name(
    engine: Engine, heads: Heads, place: Path, key_file: Path
) -> None:
    before = bits_of(engine)
    with serving(engine) as plain:
        done = push(plain, heads.good, key_file)
    assert done.returncode == 1 and "--allow-push" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert bits_of(engine) == before


def body_of(head: Path) -> bytes:
    return b"".join(SentHead.of(open_head(head)).parts())


def sent(server: Running, body: Any, **headers: str) -> httpx.Response:
    own = {"Authorization": f"Bearer {KEY}", "Content-Type": CONTENT_TYPE, **headers}
    return HTTP.post(f"{server.url}/push_head", content=body, headers=own)


def with_config(body: bytes, change: Any) -> bytes:
    """The same with another config.json."""
    size = int.from_bytes(body[:8], "little")
    config = change(json.loads(body[8 : 8 + size]))
    data = config if isinstance(config, bytes) else json.dumps(config).encode()
    return len(data).to_bytes(8, "little") + data + body[8 + size :]


def with_names(body: bytes, old: str, new: str) -> bytes:
    assert len(old) == len(new)
    return body.replace(old.encode(), new.encode())


def test_attacks_are_refused_and_leave_nothing(
    server: Running, engine: Engine, heads: Heads, place: Path, tiny: Tiny, tmp_path: Path
) -> None:
    before, version = bits_of(engine), engine.head_version
    good = body_of(heads.good)
    other = body_of(export(served(tiny, intermediate_size=32), "headstart", tmp_path / "other"))
    size = int.from_bytes(good[:8], "little")
    start = 8 + size  # of the safetensors file

    def chunks() -> Iterator[bytes]:
        yield good

    attacks: dict[str, tuple[Any, dict[str, str], int, str]] = {
        "no key": (good, {"Authorization": ""}, 401, "wants an API key"),
        "wrong key": (good, {"Authorization": "Bearer guess"}, 401, "not one of"),
        "a client's key": (good, {"Authorization": "Bearer a-client"}, 401, "not one of"),
        "of a page": (good, {"Origin": "http://evil.example"}, 403, "pages of"),
        "too large": (good + bytes(LIMIT), {}, 413, "--max-push-bytes"),
        "of unknown length": (chunks(), {}, 400, "Content-Length"),
        "as JSON": (good, {"Content-Type": "application/json"}, 415, "content type"),
        "nothing": (b"", {}, 400, "ends within its config"),
        "a long config": (b"\xff" * 8 + good[8:], {}, 400, "its config has"),
        "no JSON": (with_config(good, lambda c: b"{" * 1000), {}, 400, "config.json"),
        "deep JSON": (with_config(good, lambda c: b"[" * 200_000), {}, 400, "config.json"),
        "another format": (
            with_config(good, lambda c: c["trunk_config"]), {}, 400, "our own format"),
        "another geometry": (other, {}, 400, "cannot take the place"),
        "another family": (
            with_config(good, lambda c: {**c, "family": "glm4_moe"}), {}, 400, "layout|holds a"),
        "huge sizes": (
            with_config(good, lambda c: {
                **c, "trunk_config": {**c["trunk_config"], "intermediate_size": 1 << 30}
            }), {}, 400, "cannot take the place"),
        "cut off": (good[:-1000], {}, 400, "the pushed head"),
        "no header": (good[:start] + bytes(64) + good[start + 64 :], {}, 400, "the pushed head"),
        "a huge header": (
            good[:start] + (1 << 62).to_bytes(8, "little") + good[start + 8 :], {}, 400,
            "the pushed head"),
        "a path as name": (
            with_names(good, "modules.0.fuse.weight", "../../../../etc/passw"), {}, 400, "passw"),
    }  # fmt: skip
    for name, (body, headers, status, words) in attacks.items():
        answer = sent(server, body, **headers)
        message = answer.json()["error"]["message"]
        assert answer.status_code == status, (name, answer.status_code, message)
        assert re.search(words, message), (name, message)
        assert str(place) not in message and "\n" not in message, (name, message)
        assert not list(place.iterdir()), name
    assert bits_of(engine) == before and engine.head_version == version
    assert sent(server, body_of(heads.weak)).status_code == 200, "and a good one is taken"


def test_a_client_that_goes_away_leaves_nothing_and_others_wait_for_their_turn(
    server: Running, engine: Engine, heads: Heads, place: Path
) -> None:
    version, parts = engine.head_version, urlsplit(server.url)
    good = body_of(heads.good)
    with socket.create_connection((parts.hostname, parts.port)) as raw:
        head = (
            f"POST /push_head HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: {len(good)}\r\n\r\n"
        )
        raw.sendall(head.encode() + good[: len(good) // 2])
        wait_until(lambda: bool(list(place.iterdir())))
        second = sent(server, good)
        assert second.status_code == 503 and "another head" in second.text
    wait_until(lambda: not list(place.iterdir()))
    assert engine.head_version == version


def test_keys_are_of_their_own_and_pushing_needs_one(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ServerOptions(allow_push=True, push_key_file=str(key_file)).push_key == KEY
    with pytest.raises(ConfigError, match="there is no push key"):
        ServerOptions(allow_push=True)
    with pytest.raises(ConfigError, match="without --allow-push"):
        ServerOptions(push_key_file=str(key_file))
    with pytest.raises(ConfigError, match="is an API key, too"):
        ServerOptions(allow_push=True, push_key_file=str(key_file), api_key=[KEY])
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerOptions(allow_push=True, push_key_file=str(tmp_path / "nowhere"))
    monkeypatch.setenv("HEADSTART_PUSH_KEY", "from-outside")
    assert ServerOptions(allow_push=True).push_key == "from-outside"


def test_what_is_no_server_of_ours_is_named(heads: Heads, key_file: Path) -> None:
    words = ("push", str(heads.good), "--key-file", str(key_file), "--server")
    gone = headstart(*words, "http://127.0.0.1:1")
    assert gone.returncode == 1 and "cannot be asked" in gone.stderr
    typed = headstart(*words, "127.0.0.1:8000")
    assert typed.returncode == 2 and "give a URL" in typed.stderr
