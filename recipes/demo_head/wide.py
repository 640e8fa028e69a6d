"""The demo's head from wider text: the model's own questions, tasks of many kinds, many answers.

    python recipes/demo_head/collect.py --out work/passages.jsonl.xz            # with a network
    python recipes/demo_head/wide.py text --passages work/passages.jsonl.xz --work work ...
    python recipes/demo_head/wide.py head --passages work/passages.jsonl.xz --work work --out head

`text` is the stages questions, prompts and answers; `head` is begin, long, curve, score and
publish; `evaluation` and `look` are given by name. What is there is not done again. `--minutes`
ends the whole command in time: `long` gets what the others leave. README.md says the rest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from carry import pack_small, pack_text, unpack_text
from wide_answers import make_answers, write_joined
from wide_evaluation import curve, make_evaluation, score_heads
from wide_publish import publish
from wide_settings import Wide, small
from wide_text import write_prompts, write_questions
from wide_training import look, train_begin, train_long

GROUPS = {
    "text": ("questions", "prompts", "answers"),
    "head": ("begin", "long", "curve", "score", "publish"),
}
STAGES = ("evaluation", "questions", "prompts", "answers", "begin", "look", "long", "curve",
          "score", "publish")  # fmt: skip
_AFTER = 100.0  # seconds that score, publish and packing take on a GPU
_LEAST_LONG = 300.0  # seconds of the long training that earlier stages leave it


def main() -> None:
    started = time.monotonic()
    arguments = _arguments()
    settings = _settings(arguments)
    settings.work.mkdir(parents=True, exist_ok=True)
    settings = _with_model(settings, arguments.gguf)
    if arguments.text is not None and not (settings.answers / "dataset.json").is_file():
        header, splits = unpack_text(arguments.text)
        write_joined(settings.answers, header, splits, settings)
    names = [n for given in arguments.stages for n in GROUPS.get(given, (given,))]
    end = started + 60 * arguments.minutes
    for place, name in enumerate(names):
        begun = time.monotonic()
        after = _seconds_of(settings, names[place + 1 :])
        _stages(_in_time(settings, name, end - begun, after), arguments.out)[name]()
        spent = time.monotonic() - begun
        _note(settings.work, {"stage": name, "seconds": round(spent, 1)})
        print(f"stage {name}: {spent:.0f} s, {begun + spent - started:.0f} s in all", flush=True)
    if arguments.home is not None:
        _pack_home(settings, arguments, has_head="publish" in names)
    print(f"done after {time.monotonic() - started:.0f} s", flush=True)


def _stages(settings: Wide, out: Path) -> dict[str, Callable[[], None]]:
    return {
        "evaluation": lambda: make_evaluation(settings),
        "questions": lambda: write_questions(settings),
        "prompts": lambda: write_prompts(settings),
        "answers": lambda: make_answers(settings),
        "begin": lambda: train_begin(settings),
        "look": lambda: look(settings),
        "long": lambda: train_long(settings),
        "curve": lambda: curve(settings),
        "score": lambda: score_heads(settings),
        "publish": lambda: publish(settings, out),
    }


def _seconds_of(settings: Wide, names: list[str]) -> float:
    """That stages to come need; the long training does with less than it would like."""
    least = {**settings.seconds, "long": min(settings.seconds["long"], _LEAST_LONG)}
    return _AFTER + sum(least.get(name, 0.0) for name in names)


def _in_time(settings: Wide, name: str, left: float, after: float) -> Wide:
    """The stage's seconds, so that what comes after has its own; `long` takes all that is left."""
    if name not in settings.seconds or left == float("inf"):
        return settings
    room = max(1.0, left - after)
    own = room if name == "long" else min(settings.seconds[name], room)
    return replace(settings, seconds={**settings.seconds, name: own})


def _note(work: Path, line: dict[str, Any]) -> None:
    with open(work / "times.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def _pack_home(settings: Wide, arguments: argparse.Namespace, *, has_head: bool) -> None:
    begun = time.monotonic()
    pack_small(settings.work, arguments.home)
    if (settings.answers / "dataset.json").is_file() and arguments.text is None:
        print(f"home: text: {pack_text(settings.answers, arguments.home)}", flush=True)
    if has_head:
        shutil.make_archive(str(arguments.home / "head"), "gztar", arguments.out)
    for path in sorted(arguments.home.iterdir()):
        print(f"home: {path.name} {path.stat().st_size / 1e6:.1f} MB", flush=True)
    print(f"home: packed in {time.monotonic() - begun:.0f} s", flush=True)


def _with_model(settings: Wide, gguf: Path | None) -> Wide:
    """The demo's model with a fresh head, not with the one that ships: that was made here."""
    if settings.model != "demo":
        return settings
    from headstart.demo.unpacked import ready

    return replace(settings, model=str(ready(gguf, is_fresh=True)), is_demo=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="+", choices=(*GROUPS, *STAGES))
    add("--passages", type=Path, help="what collect.py wrote")
    add("--prompts", type=Path, help="prompts of people, too")
    add("--questions", type=Path, help="MT-Bench's file, to score on")
    add("--avoid", type=Path, nargs="*", default=[], help="more question files to keep away from")
    add("--work", type=Path, required=True, help="folder for everything")
    add("--out", type=Path, default=Path("head"), help="the head to ship")
    add("--home", type=Path, help="also pack head, tables and text into archives here")
    add("--text", type=Path, help="train on the text that an earlier --home packed in this folder")
    add("--gguf", type=Path, help="the demo's GGUF file, where pip has no network")
    add("--model", default="demo", help="folder of a model with a fresh head")
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--running", type=int, help="requests at once in each process")
    add("--processes", type=int, default=1, help="side by side on one GPU")
    add("--minutes", type=float, default=float("inf"), help="of the whole command")
    add("--seconds", nargs="*", default=[], metavar="STAGE=N", help="of a stage, about")
    add("--option", nargs="*", default=[], metavar="NAME=VALUE", help="of the long training")
    add("--small", action="store_true", help="a try: a few prompts, a few steps")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> Wide:
    if arguments.processes < 1:
        raise SystemExit(f"--processes is {arguments.processes}; give at least 1")
    settings = Wide(
        work=arguments.work, passages=arguments.passages, prompts=arguments.prompts,
        questions=arguments.questions, avoided=tuple(arguments.avoid), model=arguments.model,
        device=arguments.device, processes=arguments.processes,
    )  # fmt: skip
    settings = small(settings) if arguments.small else settings
    if arguments.running is not None:
        settings = replace(settings, running=arguments.running)
    seconds = {name: float(value) for name, value in _pairs(arguments.seconds)}
    unknown = seconds.keys() - settings.seconds
    if unknown:
        raise SystemExit(f"--seconds: {sorted(unknown)} take no time of their own")
    options = {name: _value(value) for name, value in _pairs(arguments.option)}
    return replace(
        settings, seconds={**settings.seconds, **seconds}, options={**settings.options, **options}
    )


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise SystemExit(f"{wrong[0]!r} is no NAME=VALUE")
    return [(name, value) for name, _, value in (word.partition("=") for word in words)]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
