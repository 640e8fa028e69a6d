"""Whether an engine's release reads the head of this very model, and runs it as it was trained."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.checkpoint.config import text_part
from headstart.errors import LaunchError
from headstart.families.base import Family
from headstart.families.engines import ENGINE_TITLES, served_by
from headstart.heads.detection import quoted
from headstart.heads.inspection import Report
from headstart.launch.options import LaunchOptions
from headstart.launch.separate import SeparateHead
from headstart.launch.versions import require


def former_contract(family: Family, engine: str, version: str) -> Iterator[str]:
    """A warning where this release runs the head otherwise than later ones do."""
    then, now = family.layout.as_(engine, version), family.layout.as_(engine)
    if then != now:
        end, changes = family.layout.former[engine]
        said = ", ".join(f"{name} = {value}" for name, value in changes.items())
        yield (
            f"{family.title}: {ENGINE_TITLES[engine]} before {end} runs the head with {said}, "
            "against how it was trained; fewer drafts are accepted"
        )


def require_read_names(
    engine: str, report: Report, options: LaunchOptions, head: SeparateHead | None
) -> None:
    """LaunchError if the engine's loader would pass over all tensors of the head."""
    if options.head_path is not None and head is None:
        return  # it is not here to be looked at
    folder, owner, root = report.path, report.family, report.head.root
    if head is not None and options.head_path is not None:
        folder, owner, root = options.head_path, head.family, head.root
    if owner is None:
        return
    if root in owner.keys.unread and engine != "xllm":  # which reads both
        found = f"names that begin with {root!r}"
    elif head is None and report.head.respelled:
        found = f"names as {report.head.respelled[0]}"
    else:
        return
    raise LaunchError(
        f"the head in {folder} has {found}; {ENGINE_TITLES[engine]} skips those and drafts "
        f"nothing. `headstart stitch {quoted(folder)} {quoted(report.path)} --out DIR` writes "
        "names that it reads: launch DIR. Or run without the head: --speculate 0."
    )


def require_own_folder(
    engine: str, report: Report, options: LaunchOptions, head: SeparateHead | None
) -> None:
    """LaunchError unless the head lies in a folder of its own, beside a trunk without one."""
    title, model = ENGINE_TITLES[engine], quoted(report.path)
    if options.head_path is None:
        raise LaunchError(
            f"{title} serves such a head from a folder of its own, beside the trunk that it was "
            f"made for: `headstart export {model} --format {engine} --out DIR`, then `headstart "
            f"launch TRUNK --engine {engine} --head DIR`. Or run without it: --speculate 0."
        )
    if head is not None and report.head.modules:
        raise LaunchError(
            f"{report.path} holds a head, whose tensors {title} does not know in such a trunk. "
            "Launch the trunk that the head was grafted onto, with the same --head."
        )


def serves_apart(engine: str, report: Report, family: Family) -> bool:
    """Whether the engine runs the head of this very model from a folder of its own, and no other
    way."""
    is_inside = engine in family.served and _reads(engine, report, family)
    return engine in family.served_apart and not is_inside


def engines_for(report: Report, family: Family) -> list[str]:
    """The engines that are launched here and run the head of this very model."""
    return [
        engine
        for engine in served_by(family.name)
        if _reads(engine, report, family) or serves_apart(engine, report, family)
    ]


def _reads(engine: str, report: Report, family: Family) -> bool:
    variants = family.variants.get(engine, {})
    return all(variants.get(name, "") is not None for name in _variant_names(report))


def _variant_names(report: Report) -> tuple[str, ...]:
    inner = str(text_part(report.config).get("model_type", ""))
    return (report.model_type, *report.architectures, inner)


def require_variant(engine: str, version: str, report: Report, family: Family) -> None:
    """LaunchError if the engine reads the family's head, but not of this model."""
    variants = family.variants.get(engine, {})
    for name in _variant_names(report):
        if name not in variants:
            continue
        title = family.variant_titles.get(name, name)
        since, what = variants[name], f"the head of {title} ({name})"
        if since is None:
            raise LaunchError(
                f"{ENGINE_TITLES[engine]} does not read {what}, in any version known here. Use "
                "another engine (`headstart inspect` lists them), or run without it: --speculate 0."
            )
        require(engine, version, since, what, "Upgrade, or run without it: --speculate 0.")
