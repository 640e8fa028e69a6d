"""How a server is set up and looked after: files, variables, TLS, routes for operators."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.server_runs import HTTP, Server, running, served
from support.server_threads import LONG, SHORT, Running, ask, serving, small_engine, wait_until
from support.tiny_fixture import Tiny
from typer.testing import CliRunner

from headstart.cli import serve as serve_command
from headstart.cli.main import app
from headstart.engine.engine import Engine
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError
from headstart.sampling.params import SamplingParams
from headstart.server.options import ServerOptions


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ServerOptions, EngineOptions]]:
    """What `headstart serve` would run with, instead of running."""
    found: list[tuple[str, ServerOptions, EngineOptions]] = []

    def note(model, server, head, options, listener, learn) -> int:
        found.append((model, server, options))
        return 0

    monkeypatch.setattr(serve_command, "_serve", note)
    monkeypatch.setattr(serve_command, "check_model", lambda model: None)  # it is only a name
    return found


def test_the_command_line_comes_before_variables_and_these_before_the_file(
    started: list[tuple[str, ServerOptions, EngineOptions]], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: small\nport: 0\nserved-model-name: mine\nspeculate: 2\nmax_n: 3\n"
        "max-queue: 4\nprefix-caching: false\nlog-format: json\n"
    )
    variables = {"HEADSTART_SERVE_MAX_N": "5", "HEADSTART_SERVE_MAX_QUEUE": "6"}
    done = CliRunner().invoke(
        app, ["serve", "--config", str(file), "--max-queue", "7"], env=variables
    )
    assert done.exit_code == 0, (done.output, done.exception)
    ((model, server, engine),) = started
    assert (model, server.served_model_name, engine.speculate) == ("small", ["mine"], 2)
    assert (server.max_n, server.max_queue) == (5, 7), "variable, command line"
    assert engine.prefix_caching is False and server.log_format == "json"


def test_values_of_the_file_are_read_as_on_the_command_line(
    started: list[tuple[str, ServerOptions, EngineOptions]], tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "kernels: off\napi-key: 0123\nserved-model-name: [yes, 1_0]\nlog-prompts: on\nport: 0\n"
        "max-prompt-tokens: ~\nmax-n:\nchat-template: null\n"
    )
    done = CliRunner().invoke(app, ["serve", "small", "--config", str(file)])
    assert done.exit_code == 0, (done.output, done.exception)
    ((_, server, engine),) = started
    assert engine.kernels == "off" and server.api_key == ["0123"] and server.log_prompts is True
    assert server.served_model_name == ["yes", "1_0"]
    assert (server.max_prompt_tokens, server.max_n, server.chat_template) == (None, 16, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "holds 'prot', which is no option. Did you mean 'port'?"),
        ("[1]", "holds no options"),
        ("a: [", "cannot be read"),
        ("config: x", "'config', which is no option"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["serve", "m", "--config", str(file)])
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)


def test_a_bad_value_of_a_variable_is_named() -> None:
    done = CliRunner().invoke(app, ["serve", "m"], env={"HEADSTART_SERVE_PORT": "many"})
    assert done.exit_code == 2 and "--port" in done.output + done.stderr


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Engine:
    return small_engine(served(tiny))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with serving(engine) as running:
        yield running


def certificate(folder: Path) -> tuple[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj"]
    command += ["/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = subprocess.run([*command, "-keyout", key, "-out", cert], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no openssl here")
    return cert, key


def test_tls_files_make_it_https(engine: Engine, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.create_default_context(cafile=cert)
    monkey = httpx.Client(verify=context)
    with serving(lambda: engine, ssl_certfile=cert, ssl_keyfile=key) as running:
        assert running.url.startswith("https://")
        wait_until(lambda: monkey.get(f"{running.url}/health").status_code == 200)
        answer = monkey.post(f"{running.url}/v1/completions", json=SHORT)
        assert answer.status_code == 200
    monkey.close()
    with pytest.raises(ConfigError, match="without --ssl-certfile"):
        ServerOptions(ssl_keyfile=key)
    done = CliRunner().invoke(app, ["serve", "m", "--ssl-certfile", key])
    assert isinstance(done.exception, ConfigError) and "cannot be used" in str(done.exception)


def test_a_server_copies_from_contexts_and_from_other_answers(
    tiny: Tiny, quick_python: str
) -> None:
    """By its flags, with no head at all; the answers are those without drafts."""
    asked = {
        "prompt": "abcdefgh", "max_tokens": 40, "ignore_eos": True, "temperature": 0,
        "return_token_ids": True, "headstart": {"statistics": True, "speculate": 8},
    }  # fmt: skip
    flags = ("--speculate", "context", "--draft-from-answers", "2")
    with running(served(tiny), *flags, python=quick_python) as process:
        url = f"{process.url}/v1/completions"
        free = {name: value for name, value in asked.items() if name != "headstart"}
        answers = [HTTP.post(url, json=fields).json() for fields in (asked, asked, free)]
        refused = HTTP.post(url, json={**asked, "headstart": {"draft_from": "head"}}).json()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (plain,) = small_engine(served(tiny), speculate=0).generate(["abcdefgh"], params)
    found = [answer["choices"][0]["token_ids"] for answer in answers]
    assert found == [plain.outputs[0].token_ids] * 3
    first, again = (answer["headstart"]["statistics"] for answer in answers[:2])
    assert again["copied_accepted_tokens"] > first["copied_accepted_tokens"] + 20
    assert refused["error"]["param"] == "headstart.draft_from"


def test_operators_find_health_load_and_settings(server: Running) -> None:
    assert HTTP.head(f"{server.url}/health").status_code == 200
    for way in ("GET", "POST"):
        assert HTTP.request(way, f"{server.url}/ping").json() == {"status": "ready"}
    assert HTTP.get(f"{server.url}/load").json() == {"server_load": 0}
    info = HTTP.get(f"{server.url}/server_info").json()
    assert info["models"] == ["small"] and info["engine"]["speculate"] == 3
    assert not {"api_key", "host", "ssl_keyfile"} & info["server"].keys()
    tokens = HTTP.get(f"{server.url}/tokenizer_info").json()
    assert tokens["eos_token"] == "</s>" and "messages" in tokens["chat_template"]


def test_the_prefix_cache_is_not_every_clients_to_drop(server: Running) -> None:
    answer = HTTP.post(f"{server.url}/reset_prefix_cache")
    assert answer.status_code == 403 and "--allow-cache-reset" in answer.json()["error"]["message"]


def test_the_prefix_cache_can_be_dropped(engine: Engine) -> None:
    with serving(engine, allow_cache_reset=True) as server:

        def cached() -> int:
            answer = ask(server, {**SHORT, "prompt": "abcdefgh" * 20}).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached() == 0 < cached()
        assert HTTP.post(f"{server.url}/reset_prefix_cache").json() == {}
        assert engine.pool.num_cached == 0 and cached() == 0


def test_answers_carry_an_id_and_repeat_the_clients(server: Running) -> None:
    own = ask(server, SHORT)
    assert own.headers["x-request-id"] == own.json()["id"]
    given = ask(server, SHORT, headers={"x-request-id": "mine-7"})
    assert given.headers["x-request-id"] == "mine-7"
    odd = ask(server, {"nonsense": 1}, headers={"x-request-id": "a b"})
    assert odd.status_code == 400 and odd.headers["x-request-id"] not in ("a b", "-", "")


def test_an_aborted_request_is_logged_with_its_tokens(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headstart.server.requests")
    with HTTP.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}
    ) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)

    def line() -> dict[str, object]:
        found = [r.headstart_fields for r in caplog.records if hasattr(r, "headstart_fields")]
        return next((own for own in found if own.get("error") == "the client went away"), {})

    wait_until(lambda: bool(line()))
    assert line()["prompt_tokens"] == 3 and int(str(line()["output_tokens"])) >= 1


def test_the_document_has_answers_and_no_checks_of_others(server: Running) -> None:
    document = HTTP.get(f"{server.url}/openapi.json").json()
    assert '"422"' not in json.dumps(document) and "ValidationError" not in json.dumps(document)
    schemas = document["components"]["schemas"]
    for path, ways in document["paths"].items():
        for route in ways.values():
            content = route["responses"]["200"]["content"]
            if "application/json" in content:
                name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert name in schemas, path


FULL = """
import errno, sys
from headstart.backends.numba import compiler
from numba.core.caching import IndexDataCacheFile
def full(self, *_):
    raise OSError(errno.ENOSPC, "No space left on device", "kernel.nbi")
IndexDataCacheFile.save = full
made = compiler.njit()(lambda x: x + 1)
assert made(1) == 2
from numba import types
assert compiler.compiled_for_c(lambda x: x, types.int64(types.int64)).address
print(compiler.kept_note())
"""


@pytest.mark.parametrize("way", ["full", "unwritable"])
def test_a_cache_that_cannot_be_written_stops_nothing(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the process ended, with advice about an --out that it does not have."""
    pytest.importorskip("numba")
    if way == "unwritable":
        (tmp_path / "file").write_text("")
    place = tmp_path / ("file" if way == "unwritable" else "cache") / "deep"
    monkeypatch.setenv("HEADSTART_CACHE", str(place))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    code = FULL if way == "full" else FULL.replace("IndexDataCacheFile.save = full", "")
    script = tmp_path / "script.py"  # numba keeps nothing of code that is in no file
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "not kept: " in done.stdout and str(place) in done.stdout
    assert ("No space left" in done.stdout) == (way == "full")


def test_a_comparison_on_ones_own_server_says_what_to_give_instead(api_server: Server) -> None:
    asked = ["bench", "run", "--url", api_server.url, "--compare", "off,auto"]
    done = CliRunner().invoke(app, asked)
    said = str(done.exception)
    assert isinstance(done.exception, ConfigError)
    assert "--compare 0,auto (0: requests that do not draft)" in said and "--url off=URL" in said
