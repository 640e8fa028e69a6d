"""What `headstart demo` shows: set-up, two answers side by side, a table, what to type next."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.box import ROUNDED
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headstart.cli.commands import COMMANDS
from headstart.cli.generate import Tint
from headstart.cli.look import ORIGIN_STYLES, console_of, table_of
from headstart.demo.page import NAMES, by_depth
from headstart.demo.race import SIDES, Race, Side, best_drafts, mean_speed_up
from headstart.heads.operation import megabytes
from headstart.report.terminal import Console, say

if TYPE_CHECKING:
    from headstart.engine.engine import Engine
    from headstart.engine.output import Update
    from headstart.heads.inspection import Report
    from headstart.sampling.params import SamplingParams

_REDRAW_SECONDS = 0.1  # drawing is not counted, but it takes time from the viewer


@contextmanager
def setting_up(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with what is being done: a spinner on a terminal, else lines."""
    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        with Console(stderr=True).status("setting up") as status:
            yield lambda text: status.update(text)
    else:
        yield lambda text: say(f"set-up: {text}", file=sys.stderr, flush=True)


def show_file(file: Path, seconds: float) -> None:
    """The model that runs from its GGUF file."""
    say(f"ready after {seconds:.0f} s: {file}")
    say("model     SmolLM2-135M-Instruct as its GGUF file stores it, with the head that ships")


def show_head(report: Report, folder: Path, seconds: float, *, is_trained: bool) -> None:
    """The model and its head, as `inspect` finds them."""
    head = report.head
    assert report.family is not None
    say(f"ready after {seconds:.0f} s: {folder}")
    say(
        f"model     SmolLM2-135M-Instruct in the {report.family.name} layout; head {head.state}, "
        f"{megabytes(head.num_bytes)}{'' if is_trained else ', untrained'}"
    )
    if not is_trained:
        say(
            "note: this copy ships no trained head. An untrained one guesses nothing right: it "
            "shows that drafts change no text, and it cannot make anything faster."
        )
    for warning in report.warnings:
        say(f"note: {warning}")


class View:
    """One question and its two answers, drawn while they come on a terminal."""

    def __init__(
        self, engine: Engine, question: str, params: SamplingParams, *, quiet: bool
    ) -> None:
        self._question, self._quiet = question, quiet
        self._console = Console(highlight=False)
        self._tints = {side: Tint(engine.prompts.tokenizer, params) for side in SIDES}
        self._texts = {side: Text() for side in SIDES}
        self._notes = dict.fromkeys(SIDES, "")
        self._counts = dict.fromkeys(SIDES, 0)
        self._drawn = 0.0
        self._live: Live | None = None

    def __enter__(self) -> View:
        if not self._quiet:
            self._console.print(f"\n[bold]> {self._question}[/]")
            if self._console.is_terminal:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, side: Side, update: Update, seconds: float) -> None:
        for piece, colour in self._tints[side].pieces(
            update.text, update.token_ids, update.origins
        ):
            self._texts[side].append(piece, style=colour if side == "drafted" else "default")
        self._counts[side] += len(update.token_ids)
        self._notes[side] = f"{self._counts[side] / seconds:.0f} tokens/s" if seconds else ""
        now = time.monotonic()
        if self._live is not None and now - self._drawn > _REDRAW_SECONDS:
            self._live.update(self._table(), refresh=True)
            self._drawn = now

    def finish(self, found: Race) -> None:
        """Both answers whole; where there is no terminal, the text once if it is the same."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        same = found.answers["plain"].text == found.answers["drafted"].text
        for side in SIDES[same:]:
            say(f"[{'both' if same else NAMES[side]}] {found.answers[side].text}")
        rates = ", ".join(f"{NAMES[side]} {found.rates[side]:.1f}" for side in SIDES)
        say(f"tokens/s: {rates}", flush=True)

    def _table(self) -> Table:
        table = Table(box=ROUNDED, expand=True, header_style="bold", border_style="dim")
        for side in SIDES:
            table.add_column(f"{NAMES[side]}  {self._notes[side]}", ratio=1, overflow="fold")
        table.add_row(*(self._texts[side] for side in SIDES))
        return table


def summary(races: list[Race], *, is_trained: bool) -> None:
    """The table, whether the texts are the same, and why nothing is faster where that is so."""
    console = console_of()
    table = table_of(
        [
            "", "tokens/s without", "with MTP", "speed-up", "accepted by depth, where drafted",
            "length",
        ]
    )  # fmt: skip
    for one in races:
        depths = " / ".join(by_depth(one.acceptance)) or "no drafts"
        rates = (f"{one.rates[side]:.1f}" for side in SIDES)
        length = f"{one.acceptance.length:.2f}"
        table.add_row(one.category, *rates, f"{one.speed_up:.2f}x", depths, length)
    console.print()
    console.print(table)
    console.print("accepted  cumulative, of the rounds that drafted so deep; - below 5 rounds")
    console.print(f"best K    {best_drafts(races)}, chosen most often by auto")
    differing = [one for one in races if one.divergence is not None]
    if not differing:
        console.print(f"texts     identical, all {len(races)}")
    for one in differing:
        assert one.divergence is not None
        console.print(
            f"texts     {one.category}: the same up to token {one.divergence.position}: "
            f"{one.divergence.reason} (`headstart generate demo --exact`, in fp32, rules that out)"
        )
    if not is_trained:
        console.print(
            "speed     about 1x or a little less: the head is untrained, so its few tries are "
            "time lost"
        )
    elif mean_speed_up(races) < 1:
        console.print("speed     below 1x: on this machine drafting cost more than it brought")
    if console.is_terminal:
        names = {"accepted": "accepted drafts", "bonus": "bonus tokens"}
        seen = {origin for one in races for origin in one.answers["drafted"].origins}
        named = (f"[{s}]{names.get(o, o)}[/]" for o, s in ORIGIN_STYLES.items() if o in seen)
        console.print(f"colours   {', '.join(named)}")


def next_steps(page: Path, *, is_trained: bool) -> None:
    fast = "--weights int8 --speculate auto"
    wanted = {
        "generate": f'demo "Name three rivers." --chat {fast}',
        "serve": f"demo {fast}",
        "inspect": "demo",
    }
    say(f"\nwrote {page}; what to type next:")
    is_script = Path(sys.argv[0]).name == "headstart" and not shutil.which("headstart")
    program = shlex.quote(sys.argv[0]) if is_script else "headstart"
    for name, rest in wanted.items():
        if name in COMMANDS:
            say(f"  {program} {name} {rest}")
    if is_trained:
        say("docs/training.md tunes the head of your own model, recipes/demo_head made this one")
    else:
        say("docs/training.md tunes the head of your own model; recipes/demo_head is for this one")
