"""What is the same for every engine: is there a head, does the engine serve it, which K.

An adapter starts from a `Plan`, turns every option into the engine's own words, and refuses with
`Plan.refuse` what the engine cannot do. Nothing is dropped silently: an option that an adapter
never reads is found by the test that walks over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NoReturn

from headstart.checkpoint.config import Config
from headstart.errors import ConfigError, LaunchError, some
from headstart.families.base import Family
from headstart.families.engines import ENGINE_TITLES, Served, served_by
from headstart.families.versions import is_at_least
from headstart.heads.detection import quoted
from headstart.heads.inspection import Report
from headstart.launch import advice
from headstart.launch.checks import (
    engines_for,
    former_contract,
    require_own_folder,
    require_read_names,
    require_variant,
)
from headstart.launch.command import EngineCommand, Preparation, Process, as_word, code_warning
from headstart.launch.copying import about_copies
from headstart.launch.options import LaunchOptions
from headstart.launch.separate import SeparateHead, separate_head
from headstart.launch.versions import require, require_oldest

# Flags that would start a second drafter, as the engines spell them.
_DRAFTER_FLAGS = (
    "speculative-config", "speculative_config", "speculative-algorithm", "speculative_algorithm",
    "speculative-draft-model-path", "speculative-model", "spec-method", "spec-model",
    "draft_model", "num_speculative_tokens", "speculative-num-steps", "spec-type",
    "spec-draft-model", "model-draft", "spec-draft-n-max", "draft-model", "draft-kind",
)  # fmt: skip
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
        code = self.report.config.get("auto_map")
        is_needed = self.family_name in _NEED_CODE and self.engine != "xllm"
        if not is_needed or not isinstance(code, dict) or self.options.trust_remote_code:
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


def make_plan(engine: str, report: Report, options: LaunchOptions, version: str) -> Plan:
    """Check head, family and version, and settle K; the adapter does the rest."""
    require_oldest(engine, version)
    if report.format == "mlx" and engine != "mlx":
        raise LaunchError(
            f"{report.path} is a model that MLX converted, which runs on MLX: --engine mlx. Other "
            "engines take the original safetensors."
        )
    if report.format == "gguf" and engine != "llamacpp":
        # Without the engine's name: `inspect` says a common reason once.
        raise LaunchError(
            f"{report.path} is a GGUF file, which llama.cpp serves: --engine llamacpp. Other "
            "engines take the original safetensors."
        )
    _refuse_second_drafter(options)
    if options.collect is not None and engine != "vllm":
        raise LaunchError(
            f"--collect: {ENGINE_TITLES[engine]} has no place for it; vLLM alone has. Leave it "
            "out, or let the server answer prompts: headstart distill --server."
        )
    if options.speculate == 0:
        plan = Plan(engine, version, report, options, report.family, 0, {}, None)
        plan.notes.append("drafting is off: this is the plain server to compare with")
    else:
        plan = _drafting_plan(engine, report, options, version)
    if engine == "llamacpp" and report.format != "gguf":
        raise LaunchError(
            f"{report.path} is not GGUF, which llama.cpp reads. Convert it with its "
            "convert_hf_to_gguf.py, and see with `headstart inspect FILE.gguf` that the head came "
            "along."
        )
    if engine == "mlx" and report.format != "mlx":
        raise LaunchError(
            f"{report.path} is not converted to MLX. Convert it with `python -m mlx_vlm.convert "
            "--hf-path MODEL --mlx-path DIR`, and its head with `headstart export MODEL --format "
            "mlx --out HEAD`; then launch DIR with --head HEAD."
        )
    if plan.code_files:
        plan.warnings.append(code_warning(ENGINE_TITLES[engine], plan.code_files))
    return plan


def _drafting_plan(engine: str, report: Report, options: LaunchOptions, version: str) -> Plan:
    head = separate_head(engine, options.head_path, report)
    family = _family(engine, report, options, head)
    served = _served(engine, family, report)
    if served.is_apart:
        require_own_folder(engine, report, options, head)
    require_read_names(engine, report, options, head)
    require(
        engine, version, served.since, f"the head of {family.title}",
        "Upgrade, or run without it: --speculate 0.",
    )  # fmt: skip
    require_variant(engine, version, report, family)
    modules = max(1, report.head.modules if head is None else head.num_modules)
    k, why = _settle_k(family, report, options, engine, modules)
    plan = Plan(engine, version, report, options, family, k, _schedule(options, k), head)
    if served.caution and not served.is_apart:
        plan.warnings.append(f"{family.title}: {served.caution}")
    plan.warnings.extend(
        f"{family.title}: {caution.text}"
        for caution in family.cautions
        if caution.holds(engine, version, Config(report.config).fields)
        and not caution.is_occasional
    )
    plan.warnings.extend(former_contract(family, engine, version))
    if why:
        plan.notes.append(why)
    plan.notes.extend(advice.about_k(family, modules, k))
    plan.warnings.extend(advice.caveats(engine, version))
    plan.notes.extend(about_copies(engine, version))
    if options.head_path is not None and head is None:
        plan.warnings.append(
            f"--head: {options.head_path} does not exist here, so nothing about it was checked; "
            "it has to exist where the engine runs"
        )
    if report.head.outside and options.head_path is None:
        plan.warnings.append(
            f"the head lies in {some(report.head.outside)}, which the index does not list: engines "
            "read what it lists and start without the head, or fail. `headstart stitch` of the "
            "model with itself writes a full index"
        )
    if report.head.state == "undeclared" and family.count_field and options.head_path is None:
        plan.warnings.append(
            f"the config does not declare the head, and engines go by {family.count_field}: set it "
            f"to {modules}, or they will not load it"
        )
    return plan


def _family(
    engine: str, report: Report, options: LaunchOptions, head: SeparateHead | None
) -> Family:
    """Whose head will draft; LaunchError if there is none."""
    if options.head_path is None:
        advice.require_head(report, engine)
    family = report.family if head is None else head.family
    if family is None:
        raise LaunchError(
            f"{report.model_type or 'this model'} belongs to no known family, and "
            f"{options.head_path} cannot be read here to tell. See `headstart families`."
        )
    if family.name == "gemma4_assistant" and options.head_path is None:
        raise LaunchError(
            f"{report.path} is an assistant, which drafts for a Gemma 4 model and cannot serve by "
            f"itself. Launch the Gemma 4 model with --head {quoted(report.path)}."
        )
    return family


def _served(engine: str, family: Family, report: Report) -> Served:
    by_engine = served_by(family.name)
    if not by_engine:
        # Without the engine's name: `inspect` says a common reason once.
        runs = ("`headstart generate`",) if family.runtime is not None else ()
        others = "; ".join((*runs, *family.elsewhere)) or "none known here"
        raise LaunchError(
            f"no engine that is launched here serves the head of {family.title}. Others that do: "
            f"{others}. Or run without it: --speculate 0."
        )
    if engine not in by_engine:
        title = ENGINE_TITLES[engine]
        named = ", ".join(ENGINE_TITLES[name] for name in engines_for(report, family))
        others = "; ".join([named, *family.elsewhere])
        is_elsewhere = any(text.startswith(title) for text in family.elsewhere)
        does = "is not launched here with" if is_elsewhere else "does not serve"
        raise LaunchError(
            f"{title} {does} the head of {family.title}. These do: {others}. Or run without it: "
            "--speculate 0."
        )
    return by_engine[engine]


def _code_file(where: str) -> str:
    """`repository--module.Class` names a file of another repository, which engines fetch."""
    repository, mark, module = where.rpartition("--")
    file = f"{module.rpartition('.')[0]}.py"
    return f"{file} of the hub's {repository}" if mark else file


def _with_link_targets(path: Path) -> Path:
    """A snapshot in the hub's cache is links to files beside it; a container needs both."""
    return path.parents[1] if path.parent.name == "snapshots" else path


def _settle_k(
    family: Family, report: Report, options: LaunchOptions, engine: str, modules: int
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
    return advice.advised_k(family, report, options.head_path or report.path, engine, modules)


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
