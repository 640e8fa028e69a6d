"""The plan of a launch: is there a head, does the engine serve it, which K, how many requests.

Adapters of the engines start from what `make_plan` gives.
"""

from __future__ import annotations

from headstart.checkpoint.config import Config
from headstart.errors import ConfigError, LaunchError, some
from headstart.families.base import Family
from headstart.families.engines import ENGINE_TITLES, Served, served_by
from headstart.families.versions import MAIN
from headstart.heads.detection import quoted
from headstart.heads.inspection import Report
from headstart.launch import advice
from headstart.launch.checks import (
    engines_for,
    former_contract,
    require_own_folder,
    require_read_names,
    require_variant,
    serves_apart,
)
from headstart.launch.command import code_warning
from headstart.launch.copying import about_copies
from headstart.launch.options import LaunchOptions
from headstart.launch.plan import Plan
from headstart.launch.separate import SeparateHead, separate_head
from headstart.launch.versions import require, require_oldest

# Flags that would start a second drafter, as the engines spell them.
_DRAFTER_FLAGS = (
    "speculative-config", "speculative_config", "speculative-algorithm", "speculative_algorithm",
    "speculative-draft-model-path", "speculative-model", "spec-method", "spec-model",
    "draft_model", "num_speculative_tokens", "speculative-num-steps", "spec-type",
    "spec-draft-model", "model-draft", "spec-draft-n-max", "draft-model", "draft-kind",
)  # fmt: skip


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
        plan.warnings.append(code_warning(report.path, [engine], plan.code_files))
    return plan


def _drafting_plan(engine: str, report: Report, options: LaunchOptions, version: str) -> Plan:
    head = separate_head(engine, options.head_path, report)
    family = _family(engine, report, options, head)
    served = _served(engine, family, report)
    is_apart = serves_apart(engine, report, family)
    if is_apart:
        require_own_folder(engine, report, options, head)
    require_read_names(engine, report, options, head)
    since = family.served_apart[engine].partition(" ")[0] if is_apart else served.since
    require(
        engine, version, since, f"the head of {family.title}",
        "Upgrade, or run without it: --speculate 0.",
    )  # fmt: skip
    if not is_apart:
        require_variant(engine, version, report, family)
    modules = max(1, report.head.modules if head is None else head.num_modules)
    k, why = _settle_k(family, report, options, engine, modules)
    plan = Plan(engine, version, report, options, family, k, _schedule(options, k), head)
    if served.caution and not is_apart:
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
        named = ", ".join(_named(name, by_engine[name]) for name in engines_for(report, family))
        others = "; ".join([named, *family.elsewhere])
        is_elsewhere = any(text.startswith(title) for text in family.elsewhere)
        does = "is not launched here with" if is_elsewhere else "does not serve"
        raise LaunchError(
            f"{title} {does} the head of {family.title}. These do: {others}. Or run without it: "
            "--speculate 0."
        )
    return by_engine[engine]


def _named(engine: str, served: Served) -> str:
    return ENGINE_TITLES[engine] + (" (development branch)" if served.since == MAIN else "")


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
