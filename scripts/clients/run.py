"""Run real clients in environments of their own against our server; write docs/clients.md's table.

    .venv/bin/python scripts/clients/run.py MODEL --work DIR [--only NAME] [--write]

Each program in `programs/` gets the server's address and prints one JSON object: feature -> "yes",
or what went wrong. Environments stay in --work and are used again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.bench.environment import processor_name

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs" / "clients.md"
BEGIN, END = "<!-- made by scripts/clients/run.py -->", "<!-- end -->"
# client -> packages; the first one's version is shown
CLIENTS = {
    "openai": ["openai"],
    "openai_responses": ["openai"],
    "anthropic": ["anthropic"],
    "httpx": ["httpx"],
    "litellm": ["litellm", "mcp"],  # without mcp it imports it and fails
    "openai_agents": ["openai-agents"],
    "instructor": ["instructor", "openai"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "langchain": ["langchain-openai"],
    "smolagents": ["smolagents[openai]"],
    "lm_eval": ["lm_eval[api]"],
}
FEATURES = ("text", "stream", "second turn", "tools", "schema", "log-probabilities")


@contextmanager
def server(model: str) -> Iterator[str]:
    """A server process on a free port; gives its address."""
    command = [sys.executable, "-m", "headstart", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"ready at (http://\S+?),", line):
                break
        else:
            raise SystemExit(f"the server did not start:\n{''.join(lines)}")
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def environment(name: str, work: Path) -> Path:
    """The Python of a client's environment, installed where it is not there yet."""
    folder = work / re.sub(r"\W", "-", CLIENTS[name][0])
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *CLIENTS[name]]
        subprocess.run(install, check=True)
    return python


def tried(name: str, url: str, work: Path) -> dict[str, str]:
    """What works, and the version."""
    python, package = environment(name, work), CLIENTS[name][0].partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    program = [str(python), str(HERE / "programs" / f"try_{name}.py"), url]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, env=clean)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"version": version, **dict.fromkeys(FEATURES, f"failed: {reason[:80]}")}
    return {"version": version, **json.loads(lines[-1])}


def table(found: dict[str, dict[str, str]]) -> str:
    head = " | ".join(["client", "version", *FEATURES])
    rows = [
        " | ".join([name, own["version"], *(own.get(feature, "-") for feature in FEATURES)])
        for name, own in found.items()
    ]
    rule = "|".join(["---"] * (2 + len(FEATURES)))
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {row} |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--work", type=Path, required=True, help="folder for environments")
    parser.add_argument("--only", action="append", choices=list(CLIENTS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/clients.md")
    asked = parser.parse_args()
    with server(asked.model) as url:
        found = {}
        for name in asked.only or CLIENTS:
            started = time.perf_counter()
            found[name] = tried(name, url, asked.work)
            print(f"{name}: {found[name]} ({time.perf_counter() - started:.0f} s)", file=sys.stderr)
    made = table(found)
    print(made)
    if asked.write:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        where = f"on {len(os.sched_getaffinity(0))} cores of an {processor_name()}"
        said = f"Tried on {time.strftime('%Y-%m-%d')} {where}, Python {platform.python_version()}:"
        DOCS.write_text(f"{before}{BEGIN}\n\n{said}\n\n{made}\n\n{END}{after}")


if __name__ == "__main__":
    main()
