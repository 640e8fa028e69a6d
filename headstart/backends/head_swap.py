"""Another head into the memory of the one that runs: compiled calls and captured rounds read on.

The new head is loaded beside the running one, in the form that the backend computes with, and held
against it; then it is copied, which nothing can refuse any more. What requests have in the head's
K/V stays: it may cost acceptance, never text. Other draft vocabularies of the same sizes can come
with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from headstart.backends.draft_lm_heads import DraftVocabRows, LmHead, own_lm_head
from headstart.errors import EngineError
from headstart.models.beside_rounds import beside_rounds
from headstart.models.build import LoadedModel, build_another_head
from headstart.models.linear import Linear
from headstart.models.mtp import MTPHead
from headstart.models.same_form import matched
from headstart.models.trunk import Trunk


@dataclass(frozen=True)
class PreparedHead:
    """A head in memory of its own that fits the running head of one backend."""

    folder: Path
    parts: tuple[tuple[nn.Module, nn.Module], ...]  # what runs, and what is to be written there
    ids: Mapping[str, Tensor] = field(default_factory=dict)  # of draft vocabularies that change


class SwapsHead:
    """The part of a backend that gives its model another head."""

    model: LoadedModel
    trunk: Trunk
    device: torch.device
    head: MTPHead | None
    draft_vocabs: dict[str, DraftVocabRows]
    _swap_stream: torch.cuda.Stream | None = None

    def prepare_head(
        self, folder: Path, vocabs: Mapping[str, Sequence[int]] | None = None
    ) -> PreparedHead:
        """Load a head, and check that it can take the running one's place; safe in any thread.

        vocabs: by name other tokens for draft vocabularies, as many and in rising order.
        """
        # Not in inference mode: several threads fill what is made here.
        with torch.no_grad(), beside_rounds(), self._own_stream():
            ids = {
                name: torch.tensor(own, device=self.device) for name, own in (vocabs or {}).items()
            }
            new = build_another_head(self.model, folder)
            self.hold_head(new)
            assert self.head is not None
            parts = ((self.head, new), *self._draft_rows(self.head, new, ids))
            for running, made in parts:
                matched(running, made)
        return PreparedHead(folder, parts, ids)

    @torch.inference_mode()
    def swap_head(self, prepared: PreparedHead) -> None:
        """Write a prepared head over the running one; between two steps, by the engine's thread."""
        for running, new in prepared.parts:
            if isinstance(running, Linear) and isinstance(new, Linear):
                self.hold_draft_rows(running, new)  # a request may have asked for them meanwhile
            for old, value in matched(running, new):
                _write(value, old)
        for name, ids in prepared.ids.items():
            _write(ids, self.draft_vocabs[name].ids)
        self.head_swapped()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On a GPU by a stream of its own: rounds of the engine's thread do not wait for it.

        Always the same one: memory that the head before left is given to work of its stream.
        """
        if self.device.type != "cuda":
            yield
            return
        if self._swap_stream is None:
            self._swap_stream = torch.cuda.Stream(self.device)
        try:
            with torch.cuda.stream(self._swap_stream):
                yield
                self._swap_stream.synchronize()
        except torch.cuda.OutOfMemoryError as error:
            raise EngineError(
                "there is no room on the GPU for a second head beside the running one. Start the "
                "engine with a lower memory_fraction."
            ) from error

    def hold_head(self, head: MTPHead) -> None:
        """Give a loaded head the form that this backend computes with."""

    def hold_draft_rows(self, running: LmHead, new: LmHead) -> None:
        """Give rows of an LM head what the running ones have beside them."""

    def head_swapped(self) -> None:
        """Memory of the head and of draft vocabularies holds other values: make again what was made
        of the old ones."""

    def _draft_rows(
        self, running: MTPHead, new: MTPHead, ids: Mapping[str, Tensor]
    ) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Reduced LM heads that change: of modules that do not share the trunk's, and of all where
        a draft vocabulary gets other tokens."""
        for name, known in self.draft_vocabs.items():
            made: dict[int, LmHead] = {}  # once, where modules share it
            for module, rows in enumerate(known.lm_heads):
                own = own_lm_head(new, module)
                if (own is None) != (own_lm_head(running, module) is None):
                    continue  # the heads do not match, which is said of them
                if own is None and name in ids:
                    own = self.trunk.lm_head
                if own is None or id(own) in made:
                    continue
                made[id(own)] = own.only_rows(ids.get(name, known.ids))
                self.hold_draft_rows(rows, made[id(own)])
                yield rows, made[id(own)]


def _write(value: Tensor, place: Tensor) -> None:
    place.copy_(value)
    if value.is_cuda:  # it was made on another stream, and is given back after this
        value.record_stream(torch.cuda.current_stream(value.device))
