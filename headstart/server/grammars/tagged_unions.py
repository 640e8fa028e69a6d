"""`oneOf` whose branches are told apart by a tag, as pydantic writes discriminated unions.

Every branch is an object with a property that has one value, or a few, which no other branch has.
Then exactly one branch can fit, and `anyOf` says the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def tagged_branches(
    branches: Sequence[Any], discriminator: Any, root: Any
) -> list[dict[str, Any]] | None:
    """The branches, each with its tag required; None where nothing tells them apart."""
    found = [_resolved(branch, root) for branch in branches]
    if not found or any(branch is None for branch in found):
        return None
    objects = [branch for branch in found if branch is not None]
    named = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    shared = set.intersection(*(_names(branch) for branch in objects))
    for tag in [named] if isinstance(named, str) else sorted(shared):
        if tag not in shared or not (named or all(tag in _required(own) for own in objects)):
            continue
        values = [_values(branch["properties"][tag]) for branch in objects]
        if all(values) and len(set().union(*values)) == sum(map(len, values)):
            return [{**own, "required": _with(_required(own), tag)} for own in objects]
    return None


def without(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in own.items() if key != name}


def _resolved(branch: Any, root: Any) -> dict[str, Any] | None:
    """The object schema that a branch is, or refers to."""
    if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str):
        target: Any = root
        for part in branch["$ref"].removeprefix("#").strip("/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        branch = target
    is_object = isinstance(branch, Mapping) and isinstance(branch.get("properties"), Mapping)
    return dict(branch) if is_object and "$ref" not in branch else None


def _names(branch: Mapping[str, Any]) -> set[str]:
    return set(branch["properties"])


def _required(branch: Mapping[str, Any]) -> list[Any]:
    found = branch.get("required", [])
    return found if isinstance(found, list) else []


def _with(names: list[Any], name: str) -> list[Any]:
    return names if name in names else [*names, name]


def _values(schema: Any) -> set[str]:
    """The values that a schema allows, as JSON; none where it does not list them."""
    if not isinstance(schema, Mapping):
        return set()
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return (
        {json.dumps(value, sort_keys=True) for value in listed}
        if isinstance(listed, list)
        else set()
    )
