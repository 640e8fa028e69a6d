"""Odd files, hostile names and templates that want out, in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from attacks.outcome import Outcome, complaint, digests, support

NAMES = (
    "../../outside.safetensors", "/etc/passwd", "a/../../b.safetensors", "~/.ssh/id_rsa",
    "model.safetensors\0.x", "a\nb.safetensors", "", ".", "..", "-rf", "$(touch owned)",
    "`touch owned`.safetensors", "\x1b[31mred.safetensors", "con\u202egnp.safetensors",
    "x" * 5000 + ".safetensors",
)  # fmt: skip
FOLDERS = (
    "$(touch owned)", "`touch owned`", "a; touch owned", "a\ntouch owned\n", "'; touch owned; '",
    '"; touch owned; "', "--help", "-rf", "a b", "EOF", "a\nEOF\ntouch owned", "$IFS", "*", "a&&b",
    "\x1b]0;owned\x07", "\u202eevil",
)  # fmt: skip
ENGINES = {
    "vllm": "0.30.0", "sglang": "0.6.0", "trtllm": "1.3.0", "xllm": "0.9.0", "llamacpp": "b10586",
}  # fmt: skip
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ cycler.__init__.__globals__.os.popen('touch owned').read() }}",
    "{{ joiner.__init__.__globals__ }}", "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('touch owned') }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__globals__ }}",
    "{{ ''|attr('__class__') }}", "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ '{0.__class__}'.format('') }}", "{{ '%s'|format(''.__class__) }}",
    "{{ messages|map(attribute='__class__')|list }}", "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}", "{{ dict.mro() }}", "{{ range.__class__ }}",
    "{{ messages.append(1) }}", "{{ (1).__class__.__base__.__subclasses__() }}",
)  # fmt: skip
_SIGNS = ("<class", "subprocess", "root:", "built-in", "<function", "__builtins__")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What libraries print of odd files is none of this script's lines."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def odd_files(template: Path, work: Path, per_file: int, say: Callable[[str], None]) -> Outcome:
    """Every file that a command reads, damaged and made up (tests/support/odd_files.py)."""
    outcome, files = Outcome("odd files"), support("odd_files")
    for reader in support("odd_readers").READERS:
        for file in reader.files:
            for label, content in files.chosen(template / file, per_file, 33):
                try:
                    with quiet():
                        code = files.attempt(reader, template, work, file, content)
                    outcome.ends["used" if code == 0 else "refused"] += 1
                except BaseException as error:  # a panic of a library in Rust is no Exception
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    outcome.ends["broken"] += 1
                    outcome.broken.append(f"{reader.name}, {file}, {label}: {error!r:.300}")
        say(reader.name)
    return outcome


def hostile_names(template: Path, work: Path) -> Outcome:
    """Names of shards that lead elsewhere."""
    outcome, headstart = Outcome("hostile names"), support("commands").headstart
    outside = digests(template)
    for name in NAMES:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template / "models/mimo", work / "model")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
        (work / "model/model.safetensors.index.json").write_text(json.dumps(index))
        for words in (["inspect", "model"], ["export", "model", "--out", "out"]):
            with quiet():
                done = headstart(*words, cwd=work)
            _count(outcome, f"{words[0]} of {name[:40]!r}", done.returncode, done.stderr)
    outcome.broken += [f"touched: {p}" for p, sha in digests(template).items() if outside[p] != sha]
    return outcome


def launch_scripts(template: Path, work: Path) -> Outcome:
    """Names that a shell would take for commands, of models and for clients, in every engine's
    script, with and without Docker; a shell runs each."""
    outcome, headstart = Outcome("launch scripts"), support("commands").headstart
    for name in FOLDERS:
        for engine, version in ENGINES.items():
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            model = _model(template, work, name, engine)
            words = ["launch", model, "--engine", engine, "--engine-version", version]
            words += ["--speculate", "0"] if engine == "llamacpp" else []  # the file has no head
            for more in ([], ["--docker"], [f"--served-model-name={name}"]):
                done = headstart(*words, *more, cwd=work)
                what = f"launch {engine} {' '.join(more)[:20]} {name[:40]!r}"
                _count(outcome, what, done.returncode, done.stderr)
                if done.returncode == 0:
                    _shell(outcome, work, done.stdout, name)
    return outcome


def _model(template: Path, work: Path, name: str, engine: str) -> str:
    """A model of that name; llama.cpp takes a file."""
    if engine == "llamacpp":
        support("tiny_gguf").write_gguf(work / f"{name}.gguf")
        return f"./{name}.gguf"
    shutil.copytree(template / "models/deepseek_v3", work / name)
    return f"./{name}"


def _count(outcome: Outcome, what: str, code: int, said: str) -> None:
    outcome.ends["done" if code == 0 else "refused"] += 1
    if wrong := complaint(code, said):
        outcome.broken.append(f"{what}: {wrong}")


def _shell(outcome: Outcome, work: Path, script: str, name: str) -> None:
    """Let a shell run what was printed, with engines that do nothing."""
    (work / "bin").mkdir(exist_ok=True)
    for program in (
        "vllm",
        "python",
        "python3",
        "sglang",
        "trtllm-serve",
        "docker",
        "xllm",
        "llama-server",
    ):
        path = work / "bin" / program
        path.write_text("#!/bin/sh\nexit 0\n")
        path.chmod(0o755)
    found = {**os.environ, "PATH": f"{work / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["bash", "-c", script], cwd=work, env=found, capture_output=True, timeout=30)
    outcome.facts["scripts run"] = outcome.facts.get("scripts run", 0) + 1
    if list(work.rglob("owned")):
        outcome.broken.append(f"a script with {shlex.quote(name)} ran a command of the name")


def template_escapes(template: Path, work: Path) -> Outcome:
    """Chat templates that want out of their sandbox, rendered as `serve` does it."""
    from headstart.checkpoint.reader import Checkpoint
    from headstart.data.prompt_reader import PromptReader
    from headstart.errors import HeadstartError
    from headstart.server.templates.client import SlowTemplate, TemplateProcess

    outcome = Outcome("template escapes")
    tokenizer = PromptReader(Checkpoint.open(template / "chat")).tokenizer
    process = TemplateProcess(tokenizer, max_seconds=2)
    work.mkdir(exist_ok=True)
    with contextlib.chdir(work):
        for escape in ESCAPES:
            tokenizer.chat_template = escape
            try:
                text = process.render([{"role": "user", "content": "a"}], {})
                outcome.ends["nothing came out"] += 1
                if any(sign in text for sign in _SIGNS):
                    outcome.broken.append(f"{escape}: {text[:100]!r}")
            except (HeadstartError, SlowTemplate):
                outcome.ends["refused"] += 1
            if Path("owned").exists():
                outcome.broken.append(f"{escape}: ran a command")
    process.close()
    return outcome
