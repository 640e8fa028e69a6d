"""How the demo's head is made, by anyone and with any prompts.

    python recipes/demo_head/recipe.py all --prompts prompts.jsonl --questions mt_bench.jsonl \\
        --work work --out head

Stages: evaluation, answers, stock, study, closer, score, final, score, publish; `all` does them in
this order. What is there is not done again, so a stopped recipe goes on when it is started again.
Most stages have a time, --seconds study=300, into which the number of steps is fitted. README.md
says the rest.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from answers import make_answers, make_evaluation
from final import train_final
from publish import pack_results, publish
from scores import score_heads
from settings import STAGES, Settings, small
from study import run_closer, run_study, train_stock


def main() -> None:
    arguments = _arguments()
    settings = _settings(arguments)
    settings.work.mkdir(parents=True, exist_ok=True)
    if settings.model == "demo":
        from headstart.demo.unpacked import ready

        # Not the head that ships: it was made here.
        settings = replace(settings, model=str(ready(arguments.gguf, is_fresh=True)))
        print(f"unpacked: {settings.model}", flush=True)
    does = {
        "evaluation": lambda: make_evaluation(settings),
        "answers": lambda: make_answers(settings),
        "stock": lambda: train_stock(settings),
        "study": lambda: run_study(settings),
        "closer": lambda: run_closer(settings),
        "final": lambda: train_final(settings),
        "score": lambda: score_heads(settings),
        "publish": lambda: publish(settings, arguments.out),
    }
    for stage in STAGES if "all" in arguments.stages else arguments.stages:
        started = time.monotonic()
        does[stage]()
        print(f"stage {stage}: {time.monotonic() - started:.0f} s", flush=True)
    if arguments.home is not None:
        pack_results(settings, arguments.home, arguments.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=("all", *dict.fromkeys(STAGES)))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--questions", type=Path, help="MT-Bench's file, to score on")
    parser.add_argument("--work", type=Path, required=True, help="folder for everything")
    parser.add_argument("--out", type=Path, default=Path("head"), help="the head to ship")
    parser.add_argument("--home", type=Path, help="also pack head and tables into archives here")
    parser.add_argument("--gguf", type=Path, help="the demo's GGUF file, where pip has no network")
    parser.add_argument("--model", default="demo", help="folder of a model with a fresh head")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--running", type=int, help="requests at once; fewer on a CPU")
    parser.add_argument("--processes", type=int, default=1, help="side by side on one GPU")
    parser.add_argument(
        "--seconds", nargs="*", default=[], metavar="STAGE=N", help="time of a stage, about"
    )
    parser.add_argument("--small", action="store_true", help="a try: a few prompts, a few steps")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> Settings:
    if arguments.processes < 1:
        raise SystemExit(f"--processes is {arguments.processes}; give at least 1")
    settings = Settings(
        work=arguments.work, prompts=arguments.prompts, questions=arguments.questions,
        model=arguments.model, device=arguments.device, processes=arguments.processes,
    )  # fmt: skip
    if arguments.small:
        settings = small(settings)
    if arguments.running is not None:
        settings = replace(settings, running=arguments.running)
    given = dict(pair.split("=") for pair in arguments.seconds)
    unknown = given.keys() - settings.seconds
    if unknown:
        raise SystemExit(f"--seconds: {sorted(unknown)} take no time of their own")
    seconds = {**settings.seconds, **{stage: float(value) for stage, value in given.items()}}
    return replace(settings, seconds=seconds)


if __name__ == "__main__":
    main()
