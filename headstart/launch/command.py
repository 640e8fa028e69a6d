"""A finished launch: what to run, what to write first, and what to tell the user.

An engine is usually one process. xLLM is one process per device; it brings its own `script`, and
`processes` says the same thing for `--run`.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.errors import LaunchError
from headstart.families.engines import ENGINE_TITLES
from headstart.families.versions import MAIN

_TRUST = "--trust-remote-code"
# engine -> its image, for a release and for the development branch
_IMAGES = {
    "vllm": ("vllm/vllm-openai:v{version}", "vllm/vllm-openai:nightly"),
    "sglang": ("lmsysorg/sglang:v{version}", "lmsysorg/sglang:dev"),
    "trtllm": ("nvcr.io/nvidia/tensorrt-llm/release:{version}", ""),
}


def code_warning(model: Path, engines: Sequence[str], code_files: Iterable[str]) -> str:
    """Why a command is printed that cannot start as it is, and what prints the whole one."""
    launch = [
        shlex.join(("headstart", "launch", as_word(model), "--engine", engine, _TRUST))
        for engine in engines
    ]
    return (
        f"{', '.join(ENGINE_TITLES[engine] for engine in engines)} cannot read this config without "
        f"running Python code that it names (auto_map: {', '.join(code_files)}). The command "
        f"leaves {_TRUST} out and will not start as it is: read that code, and if it may run, "
        "print the whole command with that option, as in "
        + " and ".join(f"`{words}`" for words in launch)
    )


@dataclass(frozen=True)
class Process:
    """One program to start; a log file takes its output instead of the terminal."""

    argv: tuple[str, ...]
    log: Path | None = None


@dataclass(frozen=True)
class Preparation:
    """A folder that must be there before an engine starts, and the headstart command for it."""

    folder: Path
    argv: tuple[str, ...]  # from `headstart` on

    def shell(self) -> str:
        return f"[ -d {shlex.quote(str(self.folder))} ] || {shlex.join(self.argv)} || exit 1"


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    engine: str
    version: str
    processes: tuple[Process, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # name -> text, in the working folder
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()  # what drafting adds, in words
    preparation: Preparation | None = None  # the script has it too
    code_files: tuple[str, ...] = ()  # Python that the config needs and that was not allowed
    script: str = ""  # replaces the plain command where one line is not enough
    mounts: tuple[Path, ...] = ()  # what a container has to see
    in_docker: bool = False
    num_drafts: int = 0  # K

    @property
    def argv(self) -> tuple[str, ...]:
        """The command of the first process, as a list of arguments."""
        first = self.processes[0].argv
        return self._docker(first) if self.in_docker else first

    def shell(self) -> str:
        """The whole thing as text for a terminal, files to write included."""
        parts = [_here_document(name, text) for name, text in self.files.items()]
        if self.script:
            return "\n".join([*parts, self.script])
        names = {} if self.in_docker else self.env  # inside a container they go by -e
        assignments = [f"{name}={shlex.quote(value)}" for name, value in names.items()]
        parts.append(" ".join([*assignments, continued(self.argv)]))
        return "\n".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "version": self.version,
            "argv": list(self.argv),
            "processes": [
                {"argv": list(p.argv), "log": str(p.log) if p.log else None} for p in self.processes
            ],
            "speculate": self.num_drafts,
            "env": dict(self.env),
            "files": dict(self.files),
            "shell": self.shell(),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def _docker(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        release, development = _IMAGES[self.engine]
        image = release.format(version=self.version.split("+")[0])
        if self.version == MAIN:
            image = development
        if not image:
            raise LaunchError(
                f"--docker: {self.engine} publishes no image of its development branch. Name a "
                "release with --engine-version."
            )
        folder = Path.cwd()
        files = [folder / name for name in self.files]
        seen = [arg for path in (*self.mounts, *files) for arg in ("-v", f"{path}:{path}:ro")]
        names = [arg for name, value in self.env.items() for arg in ("-e", f"{name}={value}")]
        return (
            "docker", "run", "--rm", "--gpus", "all", "--ipc", "host", "--network", "host",
            "-w", str(folder), *seen, *names,
            # Images differ in their entry point; ours names the program itself.
            "--entrypoint", argv[0], image, *argv[1:],
        )  # fmt: skip


def continued(argv: tuple[str, ...], indent: str = "  ") -> str:
    """The arguments quoted, one option a line, with line continuations."""
    lines: list[str] = []
    for word in argv:
        quoted = shlex.quote(word)
        if lines and (word.startswith("-") or not lines[-1].startswith("-") or " " in lines[-1]):
            lines.append(quoted)
        elif lines:
            lines[-1] += f" {quoted}"
        else:
            lines.append(quoted)
    return f" \\\n{indent}".join(_joined_head(lines))


def _joined_head(lines: list[str]) -> list[str]:
    """The program and its positional arguments on one line."""
    cut = next((i for i, line in enumerate(lines) if line.startswith("--")), len(lines))
    head = " ".join(lines[:cut])
    return [head, *lines[cut:]] if head else lines


def _here_document(name: str, text: str) -> str:
    # No text holds its own digest: none can end the document and go on as commands.
    end = f"END_{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return f"cat > {shlex.quote(name)} <<'{end}'\n{text.rstrip()}\n{end}"


def as_word(path: Path) -> str:
    """A path as a word of a command, which no program takes for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)
