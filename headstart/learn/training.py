"""Training steps and simulator walks of one head on the served model's frozen trunk.

The parts are `headstart train`'s: the same losses, optimisers and options. What differs is that
there is no end: texts come as they are served, and the head can be put back at any moment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import HeadstartError
from headstart.heads.formats import open_head
from headstart.heads.head import dequantize
from headstart.learn.certainty import Walked, counted
from headstart.learn.memory import blank_row, held_bytes
from headstart.learn.state_files import StateWriter, StoredStates
from headstart.learn.states import RememberedStates
from headstart.models.loading import load_head
from headstart.models.mtp import MTPHead
from headstart.models.unroll import teacher_states
from headstart.train.frozen_model import load_frozen_model
from headstart.train.learner import Learner
from headstart.train.losses.lm_head import LmHead
from headstart.train.options import TrainOptions
from headstart.train.packing import Row, fit, pack
from headstart.train.parallel import World
from headstart.train.result import as_written, write_head
from headstart.train.states.source import InProcess, StateSource
from headstart.train.step import Batch, Sums, learn
from headstart.train.targets import count
from headstart.train.validation import walked

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.learn.folder import Folder

_WHOLE_BELOW, _FEWEST_TAUGHT = 16384, 8192  # tokens of a vocabulary
_MEMORY = 0.99  # of the mean over steps: about the newest hundred count


class NotFinite(Exception):
    """A loss or a gradient is NaN or infinite; the head's weights were not changed by it."""


class HeadTraining:
    """A head that learns, and the trunk that it learns from.

    There is no end towards which the rate could fall, so weights never come to rest: what is walked
    and written is their mean over the newest steps, or a head between that and the serving one.
    """

    def __init__(
        self, model: Checkpoint, head: Path | None, options: TrainOptions, *,
        state_bytes: int, draft_vocab: Sequence[int] | None = None, warm_up: int = 1,
    ):  # fmt: skip
        """options: resolved. state_bytes: memory for states of texts. draft_vocab: ids that are
        drafted from where answers are walked; training has its own, see `learn_tokens`. warm_up:
        steps until the rate is reached, also after a reset."""
        self.options, self._warm_up = options, warm_up
        self.frozen = load_frozen_model(model, head, device=options.device, dtype=options.dtype)
        self._state_bytes = state_bytes
        self._source = RememberedStates(InProcess(self.frozen), state_bytes)
        self._walked_heads = self._lm_heads(draft_vocab)
        self._taught_heads = self._walked_heads
        self._taught: torch.Tensor | None = None  # [V] places of the tokens, -1 outside; None: all
        self._learner = self._new_learner(self.frozen.master())
        self._mean = self._new_learner(self.frozen.master())
        self._serving = self._new_learner(self.frozen.master())
        self._between = self._new_learner(self.frozen.master())
        self.num_steps = 0
        self._since_reset = 0

    def take_memory(self, *, blank_step: bool) -> dict[str, int]:
        """Take what learning will need of the memory: bytes that are held, and bytes that states
        of texts will take later. No weight is another one afterwards.

        blank_step: also what a whole step computes with, which the allocator then keeps.
        """
        if blank_step:
            self._blank_step()
            self.reset()
        self._learner.optimizer.make_moments()
        return {
            "bytes": held_bytes(self.frozen.device),
            "to_come": self._state_bytes - self._source.num_bytes,
        }

    def _blank_step(self) -> None:
        longest = min(self.options.max_len, self.frozen.built.max_len)
        row = blank_row(max(self.options.pack_tokens, longest), longest)
        self._use(self._learner, self._taught_heads)
        batch = self._taught_batch(row, InProcess(self.frozen))  # nothing of it is remembered
        batch = replace(batch, ids=batch.ids.clamp_min(0))  # losses may leave the blank token out
        learn(self._learner, batch, count([row], self.options.num_depths))
        self._learner.update(0.0)

    def use_states(self, folder: Folder, base: StateWriter | None) -> None:
        """Read states of texts from there, and write those of the base that are computed ahead."""
        frozen = self.frozen
        width = frozen.built.config.state_size(frozen.source.family.layout)
        self._source.use_disk(StoredStates(folder.states, frozen.kind, width), base)

    def can_learn(self, record: Record) -> bool:
        """Whether a token to learn is left within the longest length."""
        return bool(self._fitting([record]))

    def prepare(self, records: Sequence[Record]) -> bool:
        """Have states of these at hand before they are learned; False where there is no room."""
        return self._source.prepare(self._fitting(records))

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Keep no states of these texts in memory."""
        self._source.forget(is_gone)

    def learn_tokens(self, seen: Set[int]) -> None:
        """Compute losses over a part of the vocabulary, where all of it would take too long.

        On a CPU the LM head is most of a step. What texts never hold needs no gradient; tokens
        with low ids, which are the common ones of most tokenizers, are kept to learn against. Both
        distributions are taken over that part alone, as if there were no other tokens.
        """
        vocab = self.frozen.built.config.vocab
        if self.frozen.device.type != "cpu" or vocab <= _WHOLE_BELOW:
            return
        if self._taught is not None and bool((self._taught[list(seen)] >= 0).all()):
            return
        ids = set(seen)
        ids.update(itertools.islice((i for i in range(vocab) if i not in ids),
                                    max(0, _FEWEST_TAUGHT - len(ids))))  # fmt: skip
        part = torch.tensor(sorted(ids))
        self._taught = torch.full((vocab,), -1)
        self._taught[part] = torch.arange(len(part))
        shared, *own = self._matrices()
        self._taught_heads = (
            LmHead.of(shared[part]), *(LmHead.of(shared[part], own=each[part]) for each in own)
        )  # fmt: skip

    def step(self, records: Sequence[Record], rate: float) -> float:
        """One step of the optimiser; returns the loss. NotFinite leaves the weights as they are."""
        kept = self._fitting(records)
        if not kept:
            return math.nan
        self._use(self._learner, self._taught_heads)
        rows = pack(kept, self.options.pack_tokens)
        counts = count(rows, self.options.num_depths)
        sums = Sums.zero(self.options.num_depths, self.frozen.device)
        for row in rows:
            sums = sums + learn(self._learner, self._taught_batch(row), counts)
        loss = float(sums.total)
        if not math.isfinite(loss):
            self._learner.optimizer.zero_grad()
            raise NotFinite(f"the loss is {loss}")
        norm = self._learner.update(rate * min(1.0, (self._since_reset + 1) / self._warm_up))
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient's norm is {norm}")
        self.num_steps += 1
        self._since_reset += 1
        self._move_mean()
        return loss

    def walk(self, records: Sequence[Record], share: float = 1.0) -> dict[str, Walked]:
        """How a head drafts these answers: `share` of the way from the serving to the learned one,
        as it would be written; 0 is the one that serves."""
        result: dict[str, Walked] = {}
        learner = self._at(share)
        kept = fit(records, self.options.max_len, "cut").records
        self._use(learner, self._walked_heads)
        with as_written(self.frozen, learner):
            for record in kept:
                row = Row((record,))
                found = walked(learner, row, self._prepare(row), self.frozen.built.max_len)
                result[record.id] = counted(record.category, [own for _, own in found])
        return result

    def walk_with(
        self, records: Sequence[Record], vocab_ids: Sequence[int], share: float
    ) -> dict[str, Walked]:
        """The same with drafts from these tokens alone."""
        kept = self._walked_heads
        self._walked_heads = self._lm_heads(vocab_ids)
        try:
            return self.walk(records, share)
        finally:
            self._walked_heads = kept

    def draft_from(self, vocab_ids: Sequence[int]) -> None:
        """Walk answers with drafts from these tokens alone from now on."""
        self._walked_heads = self._lm_heads(vocab_ids)
        if self._taught is None:
            self._taught_heads = self._walked_heads

    def adopt(self, share: float) -> None:
        """The head that was written serves from now on; learning goes on from where it is."""
        learner = self._at(share)
        with as_written(self.frozen, learner):
            _copy(learner, self._serving)

    def serve(self, head: Path | None) -> None:
        """Another stored head serves (None: the model's own), and is what learning goes on from."""
        source = self.frozen.source if head is None else dequantize(open_head(head))
        master = self.frozen.master()
        load_head(master, source.tensors, self.frozen.head_config)
        self._serving = self._new_learner(master)
        self.reset()

    def reset(self) -> None:
        """Go back to the head that serves, with nothing left of the steps since."""
        self._learner = self._new_learner(self.frozen.master())
        _copy(self._serving, self._learner)
        _copy(self._serving, self._mean)
        self._since_reset = 0

    def write(self, out: Path, details: dict[str, Any], share: float = 1.0) -> None:
        """The head as `stitch`, `score`, `export` and `--head` take it."""
        tensors = self._at(share).tensors()
        if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
            raise HeadstartError("the head has weights that are not finite; it is not written.")
        write_head(self.frozen, tensors, out, details)

    @torch.no_grad()
    def _at(self, share: float) -> Learner:
        """`share` of the way from the serving head to the learned one."""
        for name, parameter in self._between.parameters.items():
            served, learned = (each.parameters[name] for each in (self._serving, self._mean))
            torch.lerp(served, learned, share, out=parameter)
        return self._between

    @torch.no_grad()
    def _move_mean(self) -> None:
        """Fewer steps count while there are few."""
        count = self._since_reset
        newest = 1 - min(_MEMORY, count / (count + 9))
        for name, parameter in self._mean.parameters.items():
            parameter.lerp_(self._learner.parameters[name], newest)

    def _fitting(self, records: Sequence[Record]) -> list[Record]:
        return fit(records, self.options.max_len, self.options.long_records or "cut").records

    def _prepare(self, row: Row, source: StateSource | None = None) -> Batch:
        frozen = self.frozen
        ids, states = row.ids.to(frozen.device), (source or self._source).states(row)
        return Batch(
            row.names, ids, row.mask, row.documents, frozen.trunk.embed[ids], states,
            teacher_states(frozen.trunk, states, frozen.kind), frozen.trunk.rotary,
        )  # fmt: skip

    def _taught_batch(self, row: Row, source: StateSource | None = None) -> Batch:
        """With the tokens' places in the part of the vocabulary that losses run over."""
        batch = self._prepare(row, source)
        return batch if self._taught is None else replace(batch, ids=self._taught[batch.ids])

    def _use(self, learner: Learner, lm_heads: tuple[LmHead, ...]) -> None:
        learner.lm_head, learner.own_lm_heads = lm_heads[0], lm_heads[1:]

    def _lm_heads(self, vocab_ids: Sequence[int] | None) -> tuple[LmHead, ...]:
        """The trunk's, then those of modules that have their own."""
        ids = None if vocab_ids is None else torch.tensor(vocab_ids)
        weight, *own = self._matrices()
        return (LmHead.of(weight, ids), *(LmHead.of(weight, ids, part) for part in own))

    def _matrices(self) -> list[torch.Tensor]:
        """[V, D] of the trunk's LM head, then of those that modules have."""
        head = self.frozen.built.head
        assert head is not None
        own = [lm_head.matrix for lm_head in head.own_lm_heads]
        return [self.frozen.trunk.lm_head.matrix, *own]

    def _new_learner(self, head: MTPHead) -> Learner:
        shared, *own = self._walked_heads
        return Learner(
            "head", self.options, head, shared, dtype=self.frozen.dtype,
            world=World(), own_lm_heads=tuple(own),
        )  # fmt: skip


@torch.no_grad()
def _copy(source: Learner, target: Learner) -> None:
    for name, parameter in target.parameters.items():
        parameter.copy_(source.parameters[name])
