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
COLLECT_VARIABLE = "HEADSTART_VLLM_COLLECT"
WORKER = "headstart.vllm_plugin.collect.Worker"  # for --worker-cls: it collects
SWITCH = "HEADSTART_VLLM"  # `off`: the plugin registers nothing
OFF = ("", "off")
ROWS = ("plain", "int8")  # how the rows of the draft LM head are held
_DRAFTING, _COLLECTING = ("draft_vocab", "draft_rows"), ("collect", "collect_bytes")


@dataclass(frozen=True, kw_only=True)
class Settings:
    draft_vocab: Path | None = None  # None: draft from the whole vocabulary
    draft_rows: str = "plain"
    collect: Path | None = None  # a folder for answers and their states (collect.py)
    collect_bytes: int | None = None  # the most that is written there; None: collected.py's
    said_by: str = ""  # where it was asked, for the log

    @property
    def is_int8(self) -> bool:
        return self.draft_rows == "int8"

    @property
    def is_reduced(self) -> bool:
        """Whether drafts are chosen in another way than vLLM's own."""
        return self.draft_vocab is not None or self.is_int8

    @property
    def is_asked(self) -> bool:
        return self.is_reduced or self.collect is not None


def settings_of(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> Settings:
    """What was asked for this engine's draft; ConfigError for what does not make sense."""
    draft = vllm_config.speculative_config.draft_model_config
    additional = vllm_config.additional_config
    found = additional.get(KEY) if isinstance(additional, Mapping) else None
    if found is not None:
        return _read(found, "--additional-config", Path.cwd())
    named = {
        "draft_vocab": VOCAB_VARIABLE, "draft_rows": ROWS_VARIABLE, "collect": COLLECT_VARIABLE,
    }  # fmt: skip
    by_variable = {
        name: environment[variable] for name, variable in named.items() if variable in environment
    }
    if by_variable:
        return _read(by_variable, ", ".join(named[name] for name in by_variable), Path.cwd())
    found = getattr(draft.hf_config, KEY, None)
    if found is not None:
        # Relative names are files beside the head.
        # A model that was downloaded cannot ask for what is served to be written down.
        said_by = f"the config.json of {draft.model}"
        return _read(found, said_by, Path(draft.model), _DRAFTING)
    return Settings()


def _read(
    found: Any, said_by: str, folder: Path, names: tuple[str, ...] = (*_DRAFTING, *_COLLECTING)
) -> Settings:
    if not isinstance(found, Mapping) or not set(found) <= set(names):
        shown = sorted(found) if isinstance(found, Mapping) else repr(found)[:60]
        raise ConfigError(
            f"{said_by}: {KEY} holds {shown}; expected an object with {' or '.join(names)}."
        )
    vocab, rows = found.get("draft_vocab", ""), found.get("draft_rows", "plain")
    collect, most = found.get("collect", ""), found.get("collect_bytes")
    if not isinstance(vocab, str):
        raise ConfigError(f"{said_by}: draft_vocab is {vocab!r}; expected the name of a file.")
    if not isinstance(collect, str):
        raise ConfigError(f"{said_by}: collect is {collect!r}; expected the name of a folder.")
    if most is not None and (type(most) is not int or most <= 0):
        raise ConfigError(f"{said_by}: collect_bytes is {most!r}; expected a positive number.")
    if rows not in ROWS:
        raise ConfigError(
            f"{said_by}: draft_rows is {str(rows)[:60]!r}; expected {' or '.join(ROWS)}."
        )
    return Settings(
        draft_vocab=None if vocab in OFF else folder / vocab, draft_rows=rows,
        collect=None if collect in OFF else folder / collect, collect_bytes=most, said_by=said_by,
    )  # fmt: skip
