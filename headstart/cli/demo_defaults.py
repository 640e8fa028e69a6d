"""The model called `demo` runs with what ships for it, unless something else is asked for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.engine.options import EngineOptions

_DEMO = "demo"


def is_demo(model: str | None) -> bool:
    """Whether the name stands for our model, and not for a folder that is called so."""
    return model == _DEMO and not os.path.lexists(_DEMO)


def with_shipped_vocab(model: str, head: Path | None, options: EngineOptions) -> EngineOptions:
    """The demo's own head drafts with its own vocabulary, which changes no text."""
    vocab = shipped_vocab_of(model, head)
    if vocab is None or options.draft_vocab is not None or not options.runs_head:
        return options
    return replace(options, draft_vocab=str(vocab))


def shipped_vocab_of(model: str, head: Path | None) -> Path | None:
    """What ships for the demo's own head."""
    from headstart.demo.shipped import shipped_vocab

    return shipped_vocab() if is_demo(model) and head is None else None
