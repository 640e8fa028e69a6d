"""The modules of recipes/demo_head, which are scripts beside each other and no package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo_head"


@contextmanager
def recipe_modules(*names: str) -> Iterator[SimpleNamespace]:
    """These modules by name; afterwards their names are free for whoever comes next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RECIPE)
        known = set(sys.modules)
        try:
            yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        finally:
            for path in RECIPE.glob("*.py"):
                if path.stem not in known:
                    sys.modules.pop(path.stem, None)
