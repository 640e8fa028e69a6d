"""A server under load and in trouble, for minutes: nothing may be lost, wrong, leaked or left over.

python benchmarks/server_soak.py [--minutes 5] [--streams 200] [--seed 0] [--exact] [--device cuda]

1. Clients keep asking a server process with K/V memory for a fraction of them, with settings of all
   kinds: greedy, sampled, penalties, biases, log-probabilities, grammars. Some go away midway;
   all other requests must get the complete answer that an engine gave offline. Resident memory
   must stay flat, requests must have been preempted, and all blocks must be free at the end.
2. Another process, whose engine can be made to fail by a signal: in the middle of as many streams
   every client must get an error within 2 s, and the server must answer correctly afterwards.
3. The engine fails for good: errors within 2 s, and the process must end with 1.

The last line of output is one JSON document; the exit code is 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from server_process import ServerProcess, get, serving
from server_soak_clients import Case, Tally, keep_asking, until_error

from headstart.calibrate.tiny import write_tiny
from headstart.engine.output import Result

_NUM_CASES = 300
_VOCAB = 512
_MAX_LEN = 1024
_FLAGS = (
    "--speculate", "3", "--threads", "1", "--dtype", "float32", "--log-format", "json",
    "--kv-bytes", "9000000",
)  # fmt: skip
_WARM_UP = 0.2  # of the time; memory is compared from then on
_MOST_GROWTH = 1.05
_SAMPLE_SECONDS = 5.0
_ERROR_SECONDS = 2.0


def serve_failing() -> None:
    """`headstart serve` whose engine fails at SIGUSR1, and at SIGUSR2 for good."""
    from headstart.cli.main import main
    from headstart.engine.engine import Engine

    step, fails = Engine.step, {"once": False, "always": False}

    def failing(engine: Engine) -> Any:
        if fails["always"] or fails["once"]:
            fails["once"] = False
            raise RuntimeError("a fault that was asked for")
        return step(engine)

    patch.object(Engine, "step", failing).start()
    signal.signal(signal.SIGUSR1, lambda *_: fails.update(once=True))
    signal.signal(signal.SIGUSR2, lambda *_: fails.update(always=True))
    sys.argv = ["headstart", *sys.argv[2:]]
    main()


def make_model(folder: Path) -> Path:
    """A tiny model that writes bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = write_tiny(
        "mimo", folder / "model", dtype="F32", rate=0.9, vocab_size=_VOCAB, hidden_size=128,
        max_position_embeddings=_MAX_LEN,
    )  # fmt: skip
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{number} " for number in range(_VOCAB - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    (model / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


# What requests ask for beside lengths, temperature and seed.
_SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.05}, {"logprobs": 3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3}, {"repetition_penalty": 1.2},
    {"logit_bias": {5: 2.0, 9: -3.0}}, {"min_tokens": 8, "ignore_eos": False},
    {"allowed_token_ids": list(range(300))},
)  # fmt: skip
_GRAMMAR = "[a-z ]{5,40}"


def offline_answers(
    model: Path, asked: list[tuple[list[int], dict[str, Any]]], given: argparse.Namespace
) -> list[Result]:
    """By an engine with memory for all of them, without drafts."""
    from headstart.engine.engine import Engine
    from headstart.server.grammars.compiler import GrammarCompiler
    from headstart.server.grammars.specs import regex

    engine = Engine(
        model, speculate=0, threads=1, dtype="float32", exact=given.exact, kv_bytes=1 << 26,
        device=given.device,
    )  # fmt: skip
    prompts = engine.prompts
    compiler = GrammarCompiler(prompts.tokenizer, _VOCAB, end_ids=prompts.end_ids)
    try:
        names = []
        for prompt, fields in asked:
            own = {name: value for name, value in fields.items() if name != "structured_outputs"}
            grammar = compiler.compile(regex(_GRAMMAR)) if len(own) < len(fields) else None
            names.append(engine.add(prompt, prompts.default_params(**own), grammar=grammar))
        while engine.has_work:
            engine.step()
        return [engine.collect(name) for name in names]
    finally:
        compiler.close()


def make_cases(model: Path, given: argparse.Namespace) -> list[Case]:
    """Requests, and what they are answered offline."""
    draw = random.Random(given.seed)
    asked = []
    for number in range(_NUM_CASES):
        shared = [2 + number % 7] * draw.choice((0, 40))  # prefixes that others have, too
        prompt = shared + [draw.randrange(2, _VOCAB) for _ in range(draw.randrange(4, 80))]
        fields = {
            "max_tokens": draw.randrange(8, 200), "temperature": draw.choice((0.0, 0.7, 1.2)),
            "seed": number, "ignore_eos": draw.random() < 0.5, **draw.choice(_SETTINGS),
        }  # fmt: skip
        if number % 8 == 0:
            fields |= {"ignore_eos": False, "structured_outputs": {"regex": _GRAMMAR}}
        asked.append((prompt, fields))
    cases = []
    for (prompt, fields), result in zip(asked, offline_answers(model, asked, given), strict=True):
        (output,) = result.outputs
        reason = str(output.finish_reason)
        cases.append(Case({"prompt": prompt, **fields}, output.token_ids, output.text, reason))
    return cases


def counter(metrics: str, name: str, label: str = "") -> float:
    found = re.findall(rf"^headstart:{name}\{{.*{label}.*\}} (\S+)$", metrics, re.M)
    return sum(map(float, found))


async def soak(
    server: ServerProcess, cases: list[Case], given: argparse.Namespace
) -> dict[str, Any]:
    tally, draw = Tally(), random.Random(given.seed)
    started = time.monotonic()
    end = started + 60 * given.minutes
    memory: list[tuple[float, float]] = []

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append((time.monotonic() - started, server.resident_mb))
            await asyncio.sleep(min(_SAMPLE_SECONDS, given.minutes))

    clients = [
        keep_asking(
            server.port, cases, random.Random(draw.random()), lambda: time.monotonic() > end, tally
        )
        for _ in range(given.streams)
    ]
    await asyncio.gather(watch(), *clients)
    seconds = time.monotonic() - started
    await asyncio.sleep(2)  # for aborts of the last ones that left
    metrics = (await get(server.port, "/metrics")).decode()
    warm = [size for at, size in memory if at > _WARM_UP * 60 * given.minutes]
    used = counter(metrics, "kv_cache_blocks", 'state="used"')
    return {
        "seconds": round(seconds), "asked": dict(tally.asked),
        "complete_and_correct": tally.complete,
        "problems": len(tally.problems), "first_problems": tally.problems[:3],
        "tokens_per_second": round(tally.tokens / seconds),
        "preemptions": counter(metrics, "num_preemptions_total"),
        "aborted": counter(metrics, "request_success_total", 'finished_reason="abort"'),
        "accepted_drafts": counter(metrics, "spec_decode_num_accepted_tokens_total"),
        "blocks": counter(metrics, "kv_cache_blocks", 'state="free"')
        + counter(metrics, "kv_cache_blocks", 'state="cached"') + used,
        "blocks_used_at_end": used,
        "requests_left": counter(metrics, "num_requests_running")
        + counter(metrics, "num_requests_waiting"),
        "resident_mb": {
            "at_start": round(memory[0][1]), "warm": round(warm[0]), "last": round(warm[-1]),
            "most": round(max(warm)),
        },
        "is_good": not tally.problems and used == 0 and warm[-1] < _MOST_GROWTH * warm[0]
        and counter(metrics, "num_preemptions_total") > 0,
    }  # fmt: skip


async def fail(
    server: ServerProcess, number: int, cases: list[Case], streams: int
) -> dict[str, Any]:
    """Let the engine fail while all clients wait for a long answer."""
    tally = Tally()
    fields = {"prompt": [2, 3], "max_tokens": 900, "ignore_eos": True, "stream": True}
    clients = [
        asyncio.create_task(
            until_error(server.port, {**fields, "seed": n, "stream": n % 2 == 0}, tally)
        )
        for n in range(streams)
    ]
    await asyncio.sleep(2)
    failed = time.monotonic()
    server.process.send_signal(number)
    await asyncio.gather(*clients)
    slowest = max((at - failed for at in tally.error_seconds), default=float("nan"))
    report: dict[str, Any] = {
        "streams": streams, "errors": len(tally.error_seconds),
        "slowest_error_seconds": round(slowest, 2), "problems": tally.problems[:3],
    }  # fmt: skip
    is_good = len(tally.error_seconds) == streams and slowest < _ERROR_SECONDS
    if number == signal.SIGUSR1:
        after, deadline = Tally(), time.monotonic() + 3
        await keep_asking(
            server.port, cases, random.Random(1), lambda: time.monotonic() > deadline, after
        )
        report |= {"correct_afterwards": after.complete, "wrong_afterwards": len(after.problems)}
        is_good = is_good and after.complete > 0 and not after.problems
    else:
        report["exit_code"] = await _exit_code(server, fields)
        is_good = is_good and report["exit_code"] == 1
    return {**report, "is_good": is_good}


async def _exit_code(server: ServerProcess, fields: dict[str, Any]) -> int | None:
    """Of a server whose engine fails with every request; None if it does not end."""
    deadline = time.monotonic() + 20
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await until_error(server.port, fields, Tally())
        await asyncio.sleep(0.1)
    return server.process.poll()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exact", action="store_true", help="bit by bit, and several times slower")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    report: dict[str, Any] = {"load_average": [round(os.getloadavg()[0], 1)]}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        cases = make_cases(model, given)
        flags = (*_FLAGS, "--device", given.device, *(["--exact"] if given.exact else []))
        with serving(model, *flags) as server:
            report["soak"] = asyncio.run(soak(server, cases, given))
        with serving(model, *flags, script=(__file__, "--serve-failing")) as server:
            for name, number in (("a fault", signal.SIGUSR1), ("the end", signal.SIGUSR2)):
                report[name] = asyncio.run(fail(server, number, cases, given.streams))
    report["load_average"].append(round(os.getloadavg()[0], 1))
    print(json.dumps(report))
    sys.exit(not all(part["is_good"] for part in report.values() if isinstance(part, dict)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve-failing"]:
        serve_failing()
    else:
        main()
