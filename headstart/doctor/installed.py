"""What is installed for which wish, which engines are here, and the state of the caches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from headstart.backends.numba.compiler import kept_in
from headstart.checkpoint.cache import cache_folder, compiled_folder, why_unsafe
from headstart.demo.package import INSTALL as DEMO_INSTALL
from headstart.demo.package import PACKAGE as DEMO_PACKAGE
from headstart.doctor.machine import package_version
from headstart.errors import install
from headstart.families.engines import ENGINE_TITLES
from headstart.launch.probe import INSTALL, place

# What a user may want, and which extra it takes.
WISHES = {
    "serve": "headstart serve: a server with OpenAI's API",
    "bench": "headstart bench: load tests of servers",
    "train": "headstart distill from servers, and TensorBoard",
    "cpu": "speed on a CPU, by compiled kernels",
    "gpu": "long prompts of recurrent layers on a GPU",
    "gguf": "GGUF files with quantised heads",
    "demo": "headstart demo: a real small model",
}
_MOST_FILES = 20_000  # that are counted of one cache


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What one wish misses; empty: nothing."""

    name: str
    purpose: str
    missing: tuple[str, ...]
    how: str  # to get what is missing

    def as_json(self) -> dict[str, Any]:
        how = self.how if self.missing else None
        return {"purpose": self.purpose, "missing": list(self.missing), "install": how}


@dataclass(frozen=True, kw_only=True)
class Cache:
    what: str
    path: Path
    num_bytes: int
    is_partly_counted: bool  # there are more files than were counted
    state: str  # in words
    is_trouble: bool

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def wishes() -> list[Wish]:
    """Every wish; the packages of an extra are those that Headstart's metadata name."""
    found = []
    for name, purpose in WISHES.items():
        missing = [package for package in packages_of(name) if package_version(package) is None]
        how = install(name) if missing else ""
        if name == "demo" and package_version(DEMO_PACKAGE) is None:
            missing.append(DEMO_PACKAGE)
            how = f"{how}; {DEMO_INSTALL}" if how else DEMO_INSTALL
        found.append(Wish(name=name, purpose=purpose, missing=tuple(missing), how=how))
    return found


def packages_of(extra: str) -> list[str]:
    """Of the installed metadata; empty where Headstart is not installed as a package."""
    try:
        listed = [Requirement(line) for line in requires("headstart") or ()]
    except PackageNotFoundError:
        return []
    return [
        each.name for each in listed if each.marker and each.marker.evaluate({"extra": extra})
    ]  # fmt: skip


def engines() -> dict[str, str | None]:
    """Version or place of every engine that `launch` knows; None: not here."""
    return {name: place(name) for name in ENGINE_TITLES}


def engine_wish(name: str) -> Wish:
    """The same as for an extra, of an engine."""
    missing = () if place(name) else (ENGINE_TITLES[name],)
    purpose = f"headstart launch --engine {name}"
    return Wish(name=name, purpose=purpose, missing=missing, how=INSTALL[name])


def caches() -> list[Cache]:
    """Our own, the compilers' inside of it or elsewhere, and the hub's."""
    kernels, triton = kept_in(), compiled_folder("TRITON_CACHE_DIR", "headstart-triton")
    older = [folder for folder in kernels.parent.glob("kernels-*") if folder != kernels]
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = [
        _looked_at("Headstart's own", cache_folder(), is_run=False),
        _looked_at("compiled CPU kernels", kernels, is_run=True),
        _looked_at("compiled GPU kernels", triton, is_run=True),
        _looked_at("models of the hub", hub, is_run=False),
    ]
    if older:
        found.append(
            Cache(
                what=f"CPU kernels of other versions, {len(older)} folders",
                path=kernels.parent / "kernels-*",
                num_bytes=sum(_size(folder)[0] for folder in older),
                is_partly_counted=False,
                state="may be removed",
                is_trouble=False,
            )
        )
    return found


def _looked_at(what: str, path: Path, *, is_run: bool) -> Cache:
    """`is_run`: what lies there is run, so that no other user may write there."""
    num_bytes, is_partly_counted = _size(path)
    state, is_trouble = "writable", False
    if not os.path.lexists(path):
        above = next(parent for parent in path.parents if parent.exists())
        why = "is not a folder" if not above.is_dir() else "is not writable"
        is_trouble = not above.is_dir() or not os.access(above, os.W_OK)
        state = f"not made yet, and {above} {why}" if is_trouble else "not made yet"
    elif is_run and (unsafe := why_unsafe(path)) is not None:
        state, is_trouble = f"not used: it {unsafe}", True
    elif not os.access(path, os.W_OK):
        state, is_trouble = "not writable: nothing is kept there", True
    return Cache(
        what=what, path=path, num_bytes=num_bytes, is_partly_counted=is_partly_counted,
        state=state, is_trouble=is_trouble,
    )  # fmt: skip


def _size(path: Path) -> tuple[int, bool]:
    """Bytes of the files below a folder, links left out, and whether some were not counted."""
    total = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            total, count = total + found.st_size, count + 1
            if count >= _MOST_FILES:
                return total, True
    return total, False
