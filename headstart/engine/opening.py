"""What an engine answers with, opened from files: the model on its backend, prompts, vocabularies.

What was asked for and does not go together is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.backends.base import Backend
from headstart.backends.select import load_backend
from headstart.checkpoint.hub import local_folder
from headstart.data.prompt_reader import PromptReader
from headstart.engine.draft_vocabs import DraftVocabs, Source
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError
from headstart.heads.formats import open_runnable
from headstart.vocab.own_tokens import OwnRule


@dataclass(frozen=True)
class Opened:
    """A model that can run."""

    backend: Backend
    prompts: PromptReader
    draft_vocabs: DraftVocabs
    own_rules: dict[str, OwnRule]  # by draft vocabulary


def open_model(
    model: str | Path, head: str | Path | None, draft_vocab: Source | None, options: EngineOptions
) -> Opened:
    """Load a model with its head, or with another one; `draft_vocab` goes before the options'."""
    if head is not None and not options.runs_head:
        raise ConfigError(
            f"a head was given with speculate {options.speculate}, which runs none. Drop one."
        )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    checkpoint = open_runnable(local_folder(model), "Give its model, and this folder with --head.")
    source = draft_vocab if draft_vocab is not None else options.draft_vocab
    draft_vocabs = DraftVocabs.open(source, checkpoint, options.draft_vocab_own)
    backend = load_backend(
        checkpoint, Path(head) if head is not None else None, options.backend,
        device=options.device, dtype=options.dtype, max_model_len=options.max_model_len,
        layout=options.layout, with_head=options.runs_head,
    )  # fmt: skip
    if source is not None and backend.head is None:
        raise ConfigError(
            "a draft vocabulary was given and the engine runs without a head (speculate 0, or "
            "the model has none). Leave it out."
        )
    own_rules = draft_vocabs.own_rules(options.draft_vocab_own, backend.config.vocab)
    return Opened(backend, PromptReader(checkpoint), draft_vocabs, own_rules)
