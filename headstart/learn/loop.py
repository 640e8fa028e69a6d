"""How a head goes on learning: read what is new, train, check, offer; again and again.

The loop knows no process and no server. `turn` does one piece of work; what is worth telling goes
to `tell`, and what the server decided comes back through `served`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import HeadstartError
from headstart.learn.certainty import FEWEST, compare
from headstart.learn.checking import WORST_ON_BASE, Checker, Verdict
from headstart.learn.known import KnownWalks
from headstart.learn.mixing import Mix
from headstart.learn.reading import Reading
from headstart.learn.steering import Steering
from headstart.learn.training import HeadTraining, NotFinite
from headstart.learn.vocabs import FILE, renewed, vocab_beside, write_vocab
from headstart.vocab.draft_vocab import DraftVocab

if TYPE_CHECKING:
    from headstart.data.records import Record
    from headstart.learn.store import Store

Tell = Callable[[str, dict[str, Any]], None]  # name of an event, and its facts

FEWEST_TEXTS = 24  # to learn from; of fewer a head learns by heart
_RECENT, _FEW_RECENT = 128, 64  # held-out answers that heads are compared on, newest first
# Of the base, or older ones. A loss of a per cent is to be told from none (docs/lab-log.md).
NUM_BASE = 192
_AHEAD_TOKENS = 1024  # of the base, whose states are computed in one turn
_CHECK_SHARE = 0.2  # of the time, for checks
_PATIENCE = 2  # checks in a row without a better head, until the rate is halved
_LOWEST_RATE = 1 / 16  # of the first; below it learning rests until there is more to learn
_WAKING = 0.1  # of the texts at rest, that must be new to learn again


@dataclass(frozen=True)
class Base:
    """The dataset of the first tuning."""

    train: Sequence[Record] = ()
    heldout: Sequence[Record] = ()


class LearningLoop:
    """One head that learns from one store."""

    def __init__(
        self, store: Store, training: HeadTraining, base: Base, out: Callable[[], Path],
        tell: Tell, *, batch_tokens: int, base_share: float = 0.4, least_seconds: float = 60.0,
        vocab: DraftVocab | None = None, renews_vocab: bool = True,
        known: KnownWalks | None = None,
        ahead: Sequence[Record] = (), clock: Callable[[], float] = time.process_time,
    ):  # fmt: skip
        """out: where the next head goes. least_seconds: of training between two checks. vocab: that
        is served. renews_vocab: whether it is counted anew. known: of the first head. ahead: whose
        states are computed while there is nothing to learn. clock: of the work that is done, not of
        waiting."""
        base = Base([r for r in base.train if training.can_learn(r)], base.heldout)
        self._training, self._base = training, base
        self._base_names = {record.id for record in (*base.train, *base.heldout)}
        self._reading = Reading(store, training.can_learn, tell)
        self._out, self._tell, self._clock = out, tell, clock
        self._steering = Steering(base_share if base.train else 0.0)
        self._mix = Mix(base.train, self._steering.base_share)
        self._batch_tokens, self._least_seconds = batch_tokens, least_seconds
        self._vocab, self._renews_vocab = vocab, renews_vocab
        self._checker = Checker(known)
        self._trained_seconds = self._check_seconds = 0.0
        self._failures, self._rate_share = 0, 1.0
        self._texts_at_rest: int | None = None
        self._new_at_rest = 0  # texts that came since then
        self._seen: set[int] = set()  # tokens of all answers
        self._count_tokens(base.train)
        self._ahead = list(ahead)[::-1]
        self._num_ahead, self._prepared, self._ahead_seconds = len(self._ahead), 0, 0.0
        self._offered: Path | None = None
        self._offered_share = 1.0  # of the way to the learned head

    def take_memory(self, *, blank_step: bool) -> dict[str, int]:
        """Before the first turn: see `HeadTraining.take_memory`."""
        return self._training.take_memory(blank_step=blank_step)

    @property
    def is_waiting(self) -> bool:
        """Whether there is nothing to do: too few texts, nothing new, or an answer is awaited."""
        few = len(self._reading.train) < FEWEST_TEXTS or len(self._reading.heldout) < FEWEST
        return few or self._texts_at_rest is not None or self._offered is not None

    def turn(self) -> bool:
        """One piece of work: a step, a check, or something that will be needed while there is
        nothing to learn; False if there is nothing to do."""
        self._refresh()
        if self.is_waiting:
            return self._offered is None and self._prepare_base()
        if self._is_check_due:
            self._check()
        else:
            self._step()
        return True

    def served(self, head: Path) -> None:
        """The server serves this head: the one that was offered, or again another one, where what
        was promised did not come."""
        is_offered = head == self._offered
        if is_offered:
            self._training.adopt(self._offered_share)
        else:
            self._training.serve(head)
            self._trained_seconds = 0.0
            self._slow_down()  # else the same head could be learned and taken back for ever
        self._checker.swapped(is_learned=is_offered)
        self._steering.served(is_learned=is_offered)
        self._draft_from(vocab_beside(head))
        self._offered, self._failures = None, 0

    def _draft_from(self, vocab: DraftVocab | None) -> None:
        """The list that lies beside the serving head, where lists are swapped with heads."""
        if self._vocab is None or vocab is None or not self._renews_vocab:
            return
        if vocab.ids != self._vocab.ids:
            self._vocab = vocab
            self._training.draft_from(vocab.ids)

    def refused(self) -> None:
        """The server keeps its head; learning starts anew from that one."""
        self._offered = None
        self._start_anew()

    def _refresh(self) -> None:
        new = self._reading.refresh()
        if new is None:
            return
        texts = self._reading.store.texts
        self._training.forget(lambda name: name not in texts and name not in self._base_names)
        self._mix.replace(self._reading.train)
        self._new_at_rest += sum(not text.is_heldout for text in new)
        self._count_tokens(text.record for text in new)
        rested = self._texts_at_rest
        if rested is not None and self._new_at_rest > _WAKING * rested:
            self._texts_at_rest, self._rate_share = None, 1.0
            self._steering.begin_anew()

    def _prepare_base(self) -> bool:
        """States of a few texts of the base: it is the time for what will be needed anyway."""
        if not self._ahead:
            return False
        started, tokens = self._clock(), 0
        part: list[Record] = []
        while self._ahead and tokens < _AHEAD_TOKENS:
            part.append(self._ahead.pop())
            tokens += len(part[-1].ids)
        has_room = self._training.prepare(part)
        self._ahead_seconds += self._clock() - started
        self._prepared += len(part) if has_room else 0
        if not has_room:
            self._ahead.clear()
        self._tell("base", {
            "prepared": self._prepared, "of": self._num_ahead, "is_done": not self._ahead,
            "seconds": self._ahead_seconds,
        })  # fmt: skip
        return True

    def _count_tokens(self, records: Iterable[Record]) -> None:
        for record in records:
            self._seen.update(record.ids[record.mask].tolist())
        self._training.learn_tokens(self._seen)

    def _step(self) -> None:
        started = self._clock()
        rate = (self._training.options.learning_rate or 0.0) * self._rate_share
        rate *= self._steering.rate_share
        records = self._mix.step(self._batch_tokens)
        try:
            loss = self._training.step(records, rate)
        except NotFinite as error:
            self._tell("diverged", {"reason": f"a training step failed: {error}"})
            self._start_anew()
            return
        seconds = self._clock() - started
        self._trained_seconds += seconds
        self._tell("step", {
            "steps": self._training.num_steps, "loss": loss, "seconds": seconds,
            "tokens": sum(int(record.mask.sum()) for record in records), "rate": rate,
        })  # fmt: skip

    @property
    def _is_check_due(self) -> bool:
        wanted = max(self._least_seconds, self._check_seconds * (1 / _CHECK_SHARE - 1))
        return self._trained_seconds >= wanted

    def _check(self) -> None:
        recent, base = self._compared()
        self._checker.prepare(recent, base, self._training.walk)  # once, so it delays no check
        started = self._clock()
        verdict = self._checker.check(recent, base, self._training.walk)
        self._check_seconds, self._trained_seconds = self._clock() - started, 0.0
        mix, may_protect = self._mix, self._steering.can_protect and verdict.base.is_telling
        self._steering.checked(verdict)
        mix.base_share, mix.weights = self._steering.base_share, self._steering.weights
        self._tell("checked", {
            "steps": self._training.num_steps, **verdict.as_json(),
            "base_share": mix.base_share, "rate_share": self._steering.rate_share,
            "weights": mix.weights,
        })  # fmt: skip
        if verdict.is_accepted:
            self._offer(verdict)
        elif not (verdict.recent.is_better and may_protect):
            self._rejected(verdict)

    def _offer(self, verdict: Verdict) -> None:
        out, promise = self._out(), verdict.as_json(names_kinds=False)
        details = {
            "learned": promise, "steps": self._training.num_steps,
            "texts": len(self._reading.train), "num_depths": self._training.options.num_depths,
        }  # fmt: skip
        try:
            self._training.write(out, details, verdict.share)
            self._renew_vocab(out, verdict.share)
        except (OSError, HeadstartError) as error:
            shutil.rmtree(out, ignore_errors=True)  # it may be there without its list
            self._tell("failed", {"reason": f"the head could not be written: {error}"})
            return
        self._offered, self._offered_share = out, verdict.share
        self._tell("offer", {"name": out.name, "promise": promise})

    def _renew_vocab(self, out: Path, share: float) -> None:
        """Put the draft vocabulary beside the head: counted anew where that is certainly better.

        It takes the running one's place with the head. Both together keep what was known.
        """
        if self._vocab is None:
            return
        new = self._vocab
        if self._renews_vocab:
            new = renewed(new, [*self._reading.train, *self._base.train])
        if new.ids == self._vocab.ids:
            write_vocab(self._vocab, out)
            return
        started, (recent, base) = self._clock(), self._compared()
        old_walks = self._checker.learned
        new_walks = self._training.walk_with([*recent, *base], new.ids, share)
        names = [record.id for record in recent if record.id in old_walks]
        gain = compare([old_walks[name] for name in names], [new_walks[name] for name in names])
        on_base = self._checker.gain_on_known(base, new_walks)
        is_better = gain.is_better and not on_base.is_worse_by(WORST_ON_BASE)
        self._check_seconds += self._clock() - started
        write_vocab(new if is_better else self._vocab, out)
        if is_better:
            self._checker.learned = dict(new_walks)
            self._tell("vocab", {"reason": (
                f"a draft vocabulary counted anew is better ({gain.value:+.1%} on recent "
                f"answers) and comes with head {out.name}: {out / FILE}"
            )})  # fmt: skip

    def _compared(self) -> tuple[list[Record], list[Record]]:
        """Held-out answers that heads are compared on: recent ones, and what was known.

        Without a base, what was known is what older texts show, up to half of all.
        """
        number, base = _RECENT, list(self._base.heldout)
        heldout = self._reading.heldout
        if not base:
            number = min(_RECENT, max(_FEW_RECENT, len(heldout) // 2))
            base = heldout[:-number]
        return heldout[-number:], base[:NUM_BASE]

    def _rejected(self, verdict: Verdict) -> None:
        if verdict.recent.high < 0:  # certainly worse
            self._start_anew()
            return
        self._failures += 1
        if self._failures < _PATIENCE:
            return
        self._failures = 0
        self._slow_down()

    def _slow_down(self) -> None:
        """Half the rate; where that is too low, rest until there is more to learn."""
        self._rate_share /= 2
        if self._rate_share < _LOWEST_RATE:
            self._start_anew()
            self._texts_at_rest, self._new_at_rest = len(self._reading.train), 0
            self._tell("rests", {"reason": "no better head was found; more texts are awaited"})

    def _start_anew(self) -> None:
        """From the head that serves, more carefully."""
        self._training.reset()
        self._failures, self._trained_seconds = 0, 0.0
        self._rate_share /= 2
