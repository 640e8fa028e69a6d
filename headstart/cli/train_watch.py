"""Training on a terminal: lines and a bar on stderr, and signals that stop it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from headstart.report.terminal import say
from headstart.train.watching import Watch

if TYPE_CHECKING:
    from headstart.train.trainer import Outcome


class CommandWatch(Watch):
    """Ctrl-C (or SIGTERM) once: save after this step and leave; twice, or while nothing is there
    to be saved: leave at once."""

    def __init__(self) -> None:
        self._is_stopped = False
        # Of several processes none may leave the others alone in the middle of loading.
        self._is_heeded = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._bar: Any = None
        self._task: Any = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> CommandWatch:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._bar is not None:
            self._bar.stop()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._is_stopped or not self._is_heeded:
            if number == signal.SIGTERM:
                raise SystemExit(128 + number)
            raise KeyboardInterrupt
        self._is_stopped = True
        self.say("stopping after this step; once more stops at once")

    def heeds_stops(self) -> None:
        self._is_heeded = True

    def is_stopped(self) -> bool:
        return self._is_stopped

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            say(text, file=sys.stderr)

    def started(self, step: int, num_steps: int) -> None:
        if not sys.stderr.isatty():
            return
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

        from headstart.cli.look import bar_of

        columns = (
            TextColumn("step {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )  # fmt: skip
        self._bar = bar_of(*columns)
        self._task = self._bar.add_task("", total=num_steps, completed=step)
        self._bar.start()

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._bar is not None:
            rates = " ".join(f"{rate:.2f}" for rate in metrics["cumulative_match"])
            text = f"loss {metrics['loss']:.4f}  match by depth {rates}"
            self._bar.update(self._task, completed=step, description=text)

    def validated(self, name: str, step: int, metrics: Mapping[str, Any]) -> None:
        self.say(f"{name}, step {step}: {_numbers(metrics)}")


def describe(outcome: Outcome) -> str:
    """A few lines on how a head came out."""
    state = "finished" if outcome.is_finished else "dropped" if outcome.failure else "stopped"
    lines = [f"{outcome.name}  {state} at step {outcome.step} of {outcome.num_steps}"]
    if outcome.before is not None and outcome.after is not None:
        lines.append(f"before  {_numbers(outcome.before)}")
        lines.append(f"after   {_numbers(outcome.after)} (best, step {outcome.best_step})")
    if outcome.failure is not None:
        lines.append(f"it diverged; {outcome.folder}/failed.json says where")
    if outcome.is_finished:
        if outcome.after is not None and outcome.best_step == 0:
            lines.append("training did not help: the result is the head as it was")
        lines.append(f"wrote {outcome.folder}/head and {outcome.folder}/report.html")
    return "\n".join(lines)


def ranking(outcomes: Sequence[Outcome]) -> list[str]:
    """Heads trained side by side, the best first; nothing where they were not validated."""
    found = [(o, o.after) for o in outcomes if o.after is not None and o.failure is None]
    found.sort(key=lambda pair: -pair[1]["acceptance_length"])
    width = max((len(outcome.name) for outcome, _ in found), default=0)
    return [
        f"{place}. {outcome.name:<{width}}  {_numbers(after)} (step {outcome.best_step})"
        for place, (outcome, after) in enumerate(found, 1)
    ]


def _numbers(metrics: Mapping[str, Any]) -> str:
    rates = " / ".join(f"{rate:.1%}" for rate in metrics["cumulative_acceptance"])
    return f"acceptance length {metrics['acceptance_length']:.3f}, cumulative {rates}"
