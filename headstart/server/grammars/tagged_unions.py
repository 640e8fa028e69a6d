"""`oneOf` whose branches are told apart by a tag, as pydantic writes discriminated unions.

Every branch is an object with a property that has one value, or a few, which no other branch has.
Then exactly one branch can fit, and `anyOf` says the same. References are followed only to compare
the tags: branches stay references, as a definition that is written out at every use makes a schema
that grows with each level, and a recursive one has no end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def tagged_branches(
    branches: Sequence[Any], discriminator: Any, root: Any, *,
    require: Callable[[str, str], str], spend: Callable[[int], None],
) -> list[dict[str, Any]] | None:  # fmt: skip
    """The branches, each with its tag required; None where nothing tells them apart.

    `require(ref, tag)` gives a reference to the same definition with the tag required; `spend` is
    told how many properties and values are compared.
    """
    found = [referred(branch, root) for branch in branches]
    if not found or any(branch is None for branch in found):
        return None
    objects = [branch for branch in found if branch is not None]
    spend(sum(len(own["properties"]) for own in objects))
    named = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    shared = set.intersection(*(set(own["properties"]) for own in objects))
    required = [_required(own) for own in objects]
    for tag in [named] if isinstance(named, str) else sorted(shared):
        if tag not in shared or not (named or all(tag in names for names in required)):
            continue
        listed = [_listed(own["properties"][tag]) for own in objects]
        spend(sum(map(len, listed)))
        values = [{json.dumps(value, sort_keys=True) for value in own} for own in listed]
        if all(values) and len(set().union(*values)) == sum(map(len, values)):
            return [
                _tagged(branch, tag, tag in names, require)
                for branch, names in zip(branches, required, strict=True)
            ]
    return None


def without(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in own.items() if key != name}


def referred(branch: Any, root: Any) -> Mapping[str, Any] | None:
    """The object schema that a branch is, or refers to."""
    if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str):
        target: Any = root
        for part in branch["$ref"].removeprefix("#").strip("/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        branch = target
    is_object = isinstance(branch, Mapping) and isinstance(branch.get("properties"), Mapping)
    return branch if is_object and "$ref" not in branch else None


def with_tag(own: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """An object schema whose tag is required."""
    found = own.get("required", [])
    names = found if isinstance(found, list) else []
    return {**own, "required": names if tag in names else [*names, tag]}


def _tagged(
    branch: Mapping[str, Any], tag: str, is_required: bool, require: Callable[[str, str], str]
) -> dict[str, Any]:
    if "$ref" not in branch:
        return with_tag(branch, tag)
    ref = branch["$ref"]
    is_definition = ref.startswith(("#/$defs/", "#/definitions/")) and ref.count("/") == 2
    # Other places may be written in another way when the walk is through with them.
    return {**branch, "$ref": ref if is_required and is_definition else require(ref, tag)}


def _required(branch: Mapping[str, Any]) -> frozenset[str]:
    found = branch.get("required", [])
    names = found if isinstance(found, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def _listed(schema: Any) -> list[Any]:
    """The values that a schema allows; none where it does not list them."""
    if not isinstance(schema, Mapping):
        return []
    listed = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return listed if isinstance(listed, list) else []
