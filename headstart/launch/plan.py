"""What adapters of all engines build a command from: what was decided, and the words so far.

An adapter starts from a `Plan`, turns every option into the engine's own words, and refuses with
`Plan.refuse` what the engine cannot do. Nothing is dropped silently: an option that an adapter
never reads is found by the test that walks over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NoReturn

from headstart.errors import LaunchError
from headstart.families.base import Family
from headstart.families.engines import ENGINE_TITLES
from headstart.families.versions import is_at_least
from headstart.heads.inspection import Report
from headstart.launch import advice
from headstart.launch.command import EngineCommand, Preparation, Process, as_word
from headstart.launch.options import LaunchOptions
from headstart.launch.own_code import has_own_code_only
from headstart.launch.separate import SeparateHead
from headstart.launch.versions import require

# Families whose config class neither transformers nor the engines have: their code must run.
_NEED_CODE = ("mimo",)


@dataclass
class Plan:
    engine: str
    version: str
    report: Report
    options: LaunchOptions
    family: Family | None
    k: int
    schedule: dict[int, int]  # first number of running requests -> K; empty: always k
    head: SeparateHead | None  # None: the model's own, or one that is not on this machine
    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    running_requests: int | None = None  # the limit an adapter sets where none was asked for

    @property
    def num_modules(self) -> int:
        return max(1, self.head.num_modules if self.head else self.report.head.modules)

    @property
    def family_name(self) -> str:
        return self.family.name if self.family else ""

    @property
    def code_files(self) -> tuple[str, ...]:
        """Python files of the checkpoint that the engine needs and was not allowed to run."""
        return () if self.trusts_code else self._needed_code

    @property
    def trusts_code(self) -> bool:
        """Whether the engine may run Python code of the checkpoint: it was asked for, or the engine
        needs some and there is none but what Headstart wrote."""
        if self.options.trust_remote_code or not self._needed_code:
            return self.options.trust_remote_code
        if self.options.head_path is not None or self.family is None:
            return False
        return has_own_code_only(self.report.path, self.family)

    @property
    def _needed_code(self) -> tuple[str, ...]:
        code = self.report.config.get("auto_map")
        is_needed = self.family_name in _NEED_CODE and self.engine != "xllm"
        if not is_needed or not isinstance(code, dict):
            return ()
        return tuple(dict.fromkeys(_code_file(str(where)) for where in code.values()))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Everything on disk that the engine reads."""
        given = (self.report.path, self.options.head_path, self.options.vocab_path)
        whole = [_with_link_targets(path.absolute()) for path in given if path is not None]
        return tuple(dict.fromkeys(whole))

    def has(self, needed: str) -> bool:
        return is_at_least(self.version, needed)

    def add(self, flag: str, value: object = None) -> None:
        """A flag; with a value unless that is None, "" or False, which mean: not asked for."""
        if value is None or value == "" or value is False:
            return
        self.args.append(flag)
        if value is not True:
            self.args.append(as_word(value) if isinstance(value, Path) else str(value))

    def refuse(self, option: str, why: str, instead: str) -> NoReturn:
        flag = option.replace("_", "-")
        raise LaunchError(f"--{flag}: {ENGINE_TITLES[self.engine]} {self.version} {why}. {instead}")

    def refuse_given(self, *names: str, why: str, instead: str) -> None:
        """Refuse those of the options that were given."""
        for option in fields(self.options):
            if option.name in names and getattr(self.options, option.name) != option.default:
                self.refuse(option.name, why, instead)

    def require(self, needed: str, option: str, instead: str) -> None:
        flag = option.replace("_", "-")
        require(self.engine, self.version, needed, f"--{flag}", instead)

    def command(
        self,
        *processes: Process,
        files: dict[str, str] | None = None,
        script: str = "",
        preparation: Preparation | None = None,
    ) -> EngineCommand:
        return EngineCommand(
            engine=self.engine,
            version=self.version,
            processes=processes,
            files=files or {},
            script=script,
            preparation=preparation,
            code_files=self.code_files,
            memory=tuple(self._memory()),
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            mounts=self.paths,
            in_docker=self.options.docker,
            num_drafts=self.k,
        )

    def _memory(self) -> list[str]:
        running = self.running_requests or self.options.max_running_requests
        size = self.head.num_bytes if self.head else None
        return advice.memory(self.report, self.options, self.k, running=running, head_bytes=size)


def _code_file(where: str) -> str:
    """`repository--module.Class` names a file of another repository, which engines fetch."""
    repository, mark, module = where.rpartition("--")
    file = f"{module.rpartition('.')[0]}.py"
    return f"{file} of the hub's {repository}" if mark else file


def _with_link_targets(path: Path) -> Path:
    """A snapshot in the hub's cache is links to files beside it; a container needs both."""
    return path.parents[1] if path.parent.name == "snapshots" else path
