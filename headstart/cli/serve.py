"""`headstart serve MODEL`: an OpenAI-compatible server on the embedded engine."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cli.config_file import Config
from headstart.cli.demo_defaults import with_shipped_vocab
from headstart.cli.models import check_head, check_model
from headstart.cli.options import Head, Model
from headstart.cli.spinning import limit_spinning
from headstart.engine.options import EngineOptions
from headstart.errors import ConfigError, MissingExtra, install
from headstart.learn.options import LearnOptions
from headstart.server.options import ServerOptions, check_certificate, listen, read_template, url_of
from headstart.server.recording import configure

if TYPE_CHECKING:
    from headstart.engine.engine import Engine
    from headstart.learn.supervisor import Learning

# Every option may be a variable: HEADSTART_SERVE_PORT, HEADSTART_SERVE_SPECULATE, ...
CONTEXT = {"auto_envvar_prefix": "HEADSTART_SERVE"}


def run(
    *,
    model: Model,
    server: ServerOptions,
    options: EngineOptions,
    learn: LearnOptions,
    head: Head = None,
    config: Config = None,
) -> int:
    limit_spinning()
    _check_learning(learn, server, options)
    _check_formats(server)
    _check_vocab(options)
    check_certificate(server)
    check_model(model)
    check_head(head if options.runs_head else None)
    configure(server.log_format)
    with listen(server) as listener:
        logging.getLogger("headstart.server").info(
            "loading %s; %s/health says when it is ready", model, url_of(listener, server)
        )
        return _serve(model, server, head, options, listener, learn)


def _check_formats(server: ServerOptions) -> None:
    """Refuse unknown names of formats before a model is loaded."""
    from headstart.server.reasoning import reasoning_format
    from headstart.server.tools.formats import tool_format

    if server.chat_template is not None:
        read_template(server.chat_template)
    tool_format(server.tool_call_parser, None)
    reasoning_format(server.reasoning_parser, None)


def _check_vocab(options: EngineOptions) -> None:
    """Refuse a draft vocabulary that cannot be read or used, before a model is loaded."""
    if options.draft_vocab is None:
        return
    if not options.runs_head:
        raise ConfigError(
            f"--draft-vocab was given with --speculate {options.speculate}, which runs no head. "
            "Drop one."
        )
    from headstart.vocab.files import read

    read(Path(options.draft_vocab))


def _serve(
    model: str, server: ServerOptions, head: Path | None, options: EngineOptions,
    listener: socket.socket, learn: LearnOptions,
) -> int:  # fmt: skip
    try:
        from headstart.server.lifecycle import serve
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{error.name} is not installed and the server needs it. Install it: "
            f"{install('serve')}."
        ) from None

    own = with_shipped_vocab(model, head, options)
    learning: Learning | None = None
    if learn.learn is not None:
        learning, own = _start_learning(model, head, own, learn, server.api_keys)

    def make_engine() -> Engine:
        from headstart.engine.engine import Engine

        if learning is None:
            return Engine(model, head, options=own)
        promised = learning.wait_for_memory()
        return Engine(model, learning.serving_path, options=own, promised_bytes=promised)

    return serve(model, server, make_engine, listener, learning)


def _check_learning(learn: LearnOptions, server: ServerOptions, options: EngineOptions) -> None:
    """Refuse what cannot be learned with before a model is loaded."""
    if learn.learn is None:
        return
    learn.check_names(server.api_keys)
    from headstart.learn.folder import Folder

    Folder(learn.learn).check_free()
    if server.allow_push:
        raise ConfigError(
            "--learn and --allow-push are given: both would swap the head, each over the other's. "
            "Drop one."
        )
    if not options.runs_head:
        raise ConfigError(
            f"--learn tunes the head, and --speculate {options.speculate} runs none. Drop one."
        )


def _start_learning(
    model: str, head: Path | None, options: EngineOptions, learn: LearnOptions,
    keys: tuple[str, ...],
) -> tuple[Learning, EngineOptions]:  # fmt: skip
    """The learner, and options of the engine: both draft with what learning made of the draft
    vocabulary, unless another one is given than before."""
    from headstart.learn.starting import is_gpu, is_on, open_folder, start_lines
    from headstart.learn.supervisor import Learning
    from headstart.learn.vocabs import first_vocab

    log = logging.getLogger("headstart.learn")
    device = options.device if learn.learn_device == "same" else learn.learn_device
    shares_device = is_on(device, options.device)
    task = open_folder(learn, model, head, device=options.device, dtype="auto")
    for line in start_lines(learn, keys, shares_device=shares_device):
        log.info(line)
    # On a CPU K/V has a size of its own, unless a share of what is free is asked for.
    is_sized_by_rest = is_gpu(device) or options.memory_fraction is not None
    task = replace(task, makes_blank_step=shares_device and is_sized_by_rest)
    learning = Learning(
        learn, lambda served: replace(task, head=str(served)), shares_device=shares_device,
        is_gpu=is_gpu(device),
    )  # fmt: skip
    if options.draft_vocab is not None:
        vocab = first_vocab(learning.folder, learning.serving_path, Path(options.draft_vocab))
        if str(vocab) != options.draft_vocab:
            log.info("learning: drafts come from %s, counted anew from the given one", vocab)
        options = replace(options, draft_vocab=str(vocab))
    # Which the learner is started with; it knows no tokens that requests have beside a list.
    task = replace(task, vocab=options.draft_vocab, renews_vocab=not options.draft_vocab_own)
    learning.start()
    return learning, options
