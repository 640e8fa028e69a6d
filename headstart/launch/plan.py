"""What is the same for every engine: is there a head, does the engine serve it, which K.

An adapter starts from a `Plan`, turns every option into the engine's own words, and refuses with
`Plan.refuse` what the engine cannot do. Nothing is dropped silently: an option that an adapter
never reads is found by the test that walks over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from headstart.checkpoint.config import read_json_object
from headstart.errors import ConfigError, LaunchError
from headstart.families.base import Family
from headstart.families.engines import ENGINE_TITLES, served_by
from headstart.families.registry import match_family
from headstart.heads.inspection import Report
from headstart.launch import advice
from headstart.launch.command import EngineCommand, Process
from headstart.launch.options import LaunchOptions
from headstart.launch.versions import is_at_least, require, require_oldest

# Flags that would start a second drafter, as the engines spell them.
_DRAFTER_FLAGS = (
    "speculative-config", "speculative_config", "speculative-algorithm", "speculative_algorithm",
    "speculative-draft-model-path", "speculative-model", "spec-method", "spec-model",
    "draft_model", "num_speculative_tokens", "speculative-num-steps",
)  # fmt: skip


@dataclass
class Plan:
    engine: str
    version: str
    report: Report
    options: LaunchOptions
    family: Family | None
    k: int
    schedule: dict[int, int]  # first number of running requests -> K; empty: always k
    head_config: dict[str, Any]  # of a separate head, {} if there is none
    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def num_modules(self) -> int:
        return max(1, self.report.head.modules)

    @property
    def family_name(self) -> str:
        return self.family.name if self.family else ""

    @property
    def runs_code(self) -> bool:
        """Whether Python code of the checkpoint must run for the engine to read its config."""
        return self.options.trust_remote_code or "auto_map" in self.report.config

    @property
    def paths(self) -> tuple[Path, ...]:
        """Everything on disk that the engine reads."""
        given = (self.report.path, self.options.head_path, self.options.token_map)
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
            self.args.append(str(value))

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
        self, *processes: Process, files: dict[str, str] | None = None, script: str = ""
    ) -> EngineCommand:
        return EngineCommand(
            engine=self.engine,
            version=self.version,
            processes=processes,
            files=files or {},
            script=script,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            mounts=self.paths,
            in_docker=self.options.docker,
            num_drafts=self.k,
        )


def make_plan(engine: str, report: Report, options: LaunchOptions, version: str) -> Plan:
    """Check head, family and version, and settle K; the adapter does the rest."""
    require_oldest(engine, version)
    _refuse_second_drafter(options)
    config = _head_config(options.head_path)
    family = report.family
    if options.head_path is not None and (family is None or not report.head.is_usable):
        family = _family_of(config) or family
    if options.speculate == 0:
        plan = Plan(engine, version, report, options, family, 0, {}, config)
        plan.notes.append("drafting is off: this is the plain server to compare with")
        return plan
    if options.head_path is None:
        advice.require_head(report)
    if family is None:
        raise LaunchError(
            f"{report.model_type or 'this model'} belongs to no known family, and the head in "
            f"{options.head_path} names none. See `headstart families`."
        )
    if family.name == "gemma4_assistant" and options.head_path is None:
        raise LaunchError(
            f"{report.path} is an assistant, which drafts for a Gemma 4 model and cannot serve by "
            f"itself. Launch the Gemma 4 model with --head {report.path}."
        )
    served = served_by(family.name).get(engine)
    if served is None:
        others = ", ".join(ENGINE_TITLES[name] for name in served_by(family.name))
        where = f"These do: {others}." if others else "Use `headstart serve`."
        raise LaunchError(
            f"{ENGINE_TITLES[engine]} does not serve the head of {family.title}. {where} Or run "
            "without it: --speculate 0."
        )
    require(
        engine, version, served.since, f"the head of {family.title}",
        "Upgrade, or run without it: --speculate 0.",
    )  # fmt: skip
    k, why = _settle_k(family, report, options, engine)
    plan = Plan(engine, version, report, options, family, k, {}, config)
    plan.schedule = _schedule(options, k)
    if served.note:
        plan.warnings.append(f"{family.title}: {served.note}")
    if why:
        plan.notes.append(why)
    plan.notes.extend(advice.about_k(family, plan.num_modules, k))
    plan.warnings.extend(advice.caveats(engine))
    if "auto_map" in report.config and not options.trust_remote_code and engine != "xllm":
        plan.warnings.append(
            "the config names Python code in the checkpoint (auto_map), which the engine will run: "
            "read those files first"
        )
    if report.head.state == "undeclared" and family.count_field and options.head_path is None:
        plan.warnings.append(
            f"the config does not declare the head, and engines go by {family.count_field}: set it "
            f"to {plan.num_modules}, or they will not load it"
        )
    return plan


def _with_link_targets(path: Path) -> Path:
    """A snapshot in the hub's cache is links to files beside it; a container needs both."""
    return path.parents[1] if path.parent.name == "snapshots" else path


def _settle_k(
    family: Family, report: Report, options: LaunchOptions, engine: str
) -> tuple[int, str]:
    steps = options.steps()
    if options.speculate is not None:
        if steps and max(steps.values()) > options.speculate:
            raise ConfigError(
                f"--schedule goes up to {max(steps.values())} draft tokens and --speculate says "
                f"{options.speculate}; drop --speculate or raise it."
            )
        return options.speculate, ""
    if steps:
        return max(1, *steps.values()), ""
    return advice.advised_k(family, report, engine)


def _schedule(options: LaunchOptions, k: int) -> dict[int, int]:
    if options.speculate_off_above is not None:
        return {1: k, options.speculate_off_above + 1: 0}
    return options.steps()


def _refuse_second_drafter(options: LaunchOptions) -> None:
    for word in options.extra_args:
        name = word.lstrip("-").split("=")[0].split(".")[0]
        if word.startswith("-") and name in _DRAFTER_FLAGS:
            raise ConfigError(
                f"--extra holds {word}, and an engine has one drafter: an EAGLE or other draft "
                "model cannot run beside the MTP head. Drop it, or start the engine directly."
            )


def _head_config(path: Path | None) -> dict[str, Any]:
    """The config of a separate head; ConfigError if it is an EAGLE draft."""
    file = path / "config.json" if path is not None else None
    if file is None or not file.is_file():
        return {}  # a name on the hub, or a folder that exists where the engine will run
    config = read_json_object(file)
    keys = ("architectures", "model_type", "speculators_model_type")
    names = " ".join(str(config.get(key, "")) for key in keys).lower()
    if "eagle" in names or "medusa" in names:
        raise ConfigError(
            f"{path} is an EAGLE or Medusa draft ({names.strip()}); expected an MTP head. One "
            "server has one drafter: see docs/migrating.md for the change, or start the engine "
            "directly."
        )
    return dict(config)


def _family_of(config: dict[str, Any]) -> Family | None:
    model_type = str(config.get("model_type", "")).removesuffix("_mtp")
    return match_family(config, [model_type], config.get("architectures") or [])
