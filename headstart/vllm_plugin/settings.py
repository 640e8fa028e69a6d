"""What was asked of the plugin: by `--additional-config`, a variable, or the draft's config.json.

The first of them that says something wins. In the first and the last it is an object under KEY with
the names of `Settings`. Nothing asked: vLLM's own classes run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import ConfigError
from headstart.heads.formats.vllm import SETTINGS as KEY

VOCAB_VARIABLE = "HEADSTART_VLLM_DRAFT_VOCAB"
ROWS_VARIABLE = "HEADSTART_VLLM_DRAFT_ROWS"
SWITCH = "HEADSTART_VLLM"  # `off`: the plugin registers nothing
OFF = ("", "off")
ROWS = ("plain", "int8")  # how the rows of the draft LM head are held


@dataclass(frozen=True, kw_only=True)
class Settings:
    draft_vocab: Path | None = None  # None: draft from the whole vocabulary
    draft_rows: str = "plain"
    said_by: str = ""  # where it was asked, for the log

    @property
    def is_int8(self) -> bool:
        return self.draft_rows == "int8"

    @property
    def is_asked(self) -> bool:
        return self.draft_vocab is not None or self.is_int8


def settings_of(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> Settings:
    """What was asked for this engine's draft; ConfigError for what does not make sense."""
    draft = vllm_config.speculative_config.draft_model_config
    additional = vllm_config.additional_config
    found = additional.get(KEY) if isinstance(additional, Mapping) else None
    if found is not None:
        return _read(found, "--additional-config", Path.cwd())
    named = {"draft_vocab": VOCAB_VARIABLE, "draft_rows": ROWS_VARIABLE}
    by_variable = {
        name: environment[variable] for name, variable in named.items() if variable in environment
    }
    if by_variable:
        return _read(by_variable, ", ".join(named[name] for name in by_variable), Path.cwd())
    found = getattr(draft.hf_config, KEY, None)
    if found is not None:
        # Relative names are files beside the head.
        return _read(found, f"the config.json of {draft.model}", Path(draft.model))
    return Settings()


def _read(found: Any, said_by: str, folder: Path) -> Settings:
    names = ("draft_vocab", "draft_rows")
    if not isinstance(found, Mapping) or not set(found) <= set(names):
        shown = sorted(found) if isinstance(found, Mapping) else repr(found)[:60]
        raise ConfigError(
            f"{said_by}: {KEY} holds {shown}; expected an object with {' or '.join(names)}."
        )
    vocab, rows = found.get("draft_vocab", ""), found.get("draft_rows", "plain")
    if not isinstance(vocab, str):
        raise ConfigError(f"{said_by}: draft_vocab is {vocab!r}; expected the name of a file.")
    if rows not in ROWS:
        raise ConfigError(
            f"{said_by}: draft_rows is {str(rows)[:60]!r}; expected {' or '.join(ROWS)}."
        )
    path = None if vocab in OFF else folder / vocab
    return Settings(draft_vocab=path, draft_rows=rows, said_by=said_by)
