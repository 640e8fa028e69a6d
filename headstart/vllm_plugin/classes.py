"""vLLM's MTP classes with a draft vocabulary, made when vLLM asks for one by name.

A class is vLLM's own, except that the products with the LM head are ours (logits.py). Where nothing
was asked, making an object gives one of vLLM's own class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headstart.errors import ConfigError
from headstart.vllm_plugin.architectures import why_no_vocab
from headstart.vllm_plugin.logits import DraftLogits
from headstart.vllm_plugin.settings import WORKER, Settings, settings_of
from headstart.vllm_plugin.state_table import table_of
from headstart.vllm_plugin.stock import stock_class
from headstart.vocab.files import read_one

log = logging.getLogger("vllm.headstart")
_OF = "_of_"  # between architecture and version, see registration.class_name


def __getattr__(name: str) -> type:
    architecture, mark, _ = name.partition(_OF)
    if not mark:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return drafting_class(architecture, stock_class(architecture))


@cache
def drafting_class(architecture: str, stock: Any) -> type:
    """`stock` with a draft vocabulary where one is asked for."""

    class Drafting(stock):  # type: ignore[misc]
        def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
            if not _is_wanted(architecture, settings_of(vllm_config)):
                return stock(
                    vllm_config=vllm_config, prefix=prefix
                )  # Python calls no __init__ then
            return super().__new__(cls)

        def __init__(self, *, vllm_config: Any, prefix: str = ""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            settings = settings_of(vllm_config)
            _check_worker(settings, vllm_config)
            self._draft_logits: list[DraftLogits] = []
            if settings.is_reduced:
                ids = _ids(settings, vllm_config.model_config.get_vocab_size())
                self._draft_logits = replace_processors(self, ids, is_int8=settings.is_int8)
                _say(architecture, settings, ids, vllm_config)
            self.headstart_table = table_of(self) if settings.collect is not None else None

        def __call__(
            self, input_ids: Any, positions: Tensor, hidden_states: Tensor, **others: Any
        ) -> Any:
            # Here and not in forward, which vLLM may compile.
            if self.headstart_table is not None and input_ids is not None:
                self.headstart_table.record(input_ids, positions, hidden_states)
            return super().__call__(
                input_ids=input_ids, positions=positions, hidden_states=hidden_states, **others
            )

        def get_top_tokens(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """What vLLM calls with `use_local_argmax_reduction`: tokens, no logits."""
            if not self._draft_logits:
                own: Tensor = _stock_tokens(stock)(self, hidden_states, *args, **kwargs)
                return own
            with ExitStack() as stack:
                for processor in self._draft_logits:
                    stack.enter_context(processor.choosing())
                found: Tensor = self.compute_logits(hidden_states, *args, **kwargs)
            if found.dtype != torch.int64 or found.dim() != 1:
                raise ConfigError(
                    f"vLLM's {stock.__name__} changes its logits ({found.dtype}, {found.dim()} "
                    "dimensions); a draft vocabulary needs them as they are. Draft without one."
                )
            return found

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
            loaded = super().load_weights(weights)
            self.headstart_refill()
            return loaded

        def headstart_refill(self) -> None:
            """Take the LM head's rows again, as far as it has any at the moment."""
            for processor in self._draft_logits:
                processor.refill()

    Drafting.__name__ = Drafting.__qualname__ = stock.__name__
    return Drafting


def replace_processors(
    draft: nn.Module, ids: tuple[int, ...] | None, *, is_int8: bool
) -> list[DraftLogits]:
    """Put ours in the place of every LogitsProcessor in a draft."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    found = [
        (parent, name, child)
        for parent in draft.modules()
        for name, child in parent.named_children()
        if isinstance(child, LogitsProcessor)
    ]
    ours = []
    for parent, name, child in found:
        made = DraftLogits(child, ids, is_int8=is_int8)
        setattr(parent, name, made)
        ours.append(made)
    if not ours:
        raise ConfigError(
            f"vLLM's {type(draft).__name__} has no LogitsProcessor that a draft vocabulary could "
            "take the place of. Draft without one."
        )
    return ours


def _stock_tokens(stock: Any) -> Any:
    found = getattr(stock, "get_top_tokens", None)
    if found is None:
        raise ConfigError(
            f"use_local_argmax_reduction is on, and vLLM's {stock.__name__} cannot choose tokens "
            "by itself without a draft vocabulary. Leave it out of --speculative-config."
        )
    return found


def _is_wanted(architecture: str, settings: Settings) -> bool:
    reason = why_no_vocab(architecture) if settings.is_asked else ""
    if reason:
        log.warning(
            "headstart: nothing of what was asked for %s: %s. vLLM runs as without it.",
            architecture, reason,
        )  # fmt: skip
    return settings.is_asked and not reason


def _check_worker(settings: Settings, vllm_config: Any) -> None:
    found = vllm_config.parallel_config.worker_cls if settings.collect is not None else WORKER
    if found != WORKER:
        raise ConfigError(
            f"{settings.said_by}: collect is asked for, and the worker is {found}, which collects "
            f"nothing. Add --worker-cls {WORKER}, or leave collect out."
        )


def _ids(settings: Settings, vocab_size: int) -> tuple[int, ...] | None:
    if settings.draft_vocab is None:
        return None
    vocab = read_one(settings.draft_vocab)
    vocab.check(vocab_size=vocab_size, tokenizer_sha=None, where=str(settings.draft_vocab))
    return vocab.ids


def _say(
    architecture: str, settings: Settings, ids: tuple[int, ...] | None, vllm_config: Any
) -> None:
    size = vllm_config.model_config.get_vocab_size()
    log.info(
        "headstart: %s drafts from %d of %d tokens, %s rows (%s)",
        architecture, size if ids is None else len(ids), size, settings.draft_rows,
        settings.said_by,
    )  # fmt: skip
    if not vllm_config.speculative_config.use_local_argmax_reduction:
        log.warning(
            "headstart: without use_local_argmax_reduction in --speculative-config vLLM makes "
            "logits of the whole width for every draft, and most of the gain is lost"
        )
