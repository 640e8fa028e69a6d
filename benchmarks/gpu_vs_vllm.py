"""Our engine and vLLM side by side on one GPU: same calibrated checkpoint, same run, in turns.

PYTHONPATH=. python3 benchmarks/gpu_vs_vllm.py MODEL --out results.json

For each K both engines are started, each in its own process, in their best configuration, and
answer the same prompts in alternation. Output tokens per second, prefill included; time to first
token is that of an answer of one token. Every answer is checked against the cycle that the
checkpoint's trunk walks. Needs vLLM (0.26 for torch 2.11) in the same environment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ENGINES = ("headstart", "vllm")
VLLM_SETTINGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def start_headstart(model: str, drafts: int, given: argparse.Namespace) -> Any:
    from headstart.engine.engine import Engine
    from headstart.sampling.params import SamplingParams

    engine = Engine(
        model, speculate=drafts, max_running_requests=given.most, prefix_caching=False,
        max_model_len=given.prompt + given.answer + 64, kv_bytes=1 << 36,  # as far as needed
        draft_vocab=range(2, given.draft_vocab + 2) if given.draft_vocab and drafts else None,
    )  # fmt: skip

    def answer(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], Any]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        results = engine.generate(prompts, params)
        texts = [result.outputs[0].token_ids for result in results]
        return texts, results[0].stats.acceptance.cumulative

    return answer


def start_vllm(model: str, drafts: int, given: argparse.Namespace) -> Any:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    settings = {"method": "mtp", "num_speculative_tokens": drafts} if drafts else None
    llm = LLM(
        model, skip_tokenizer_init=True, trust_remote_code=True, enable_prefix_caching=False,
        max_model_len=given.prompt + given.answer + 64, max_num_seqs=max(given.most, 16),
        gpu_memory_utilization=given.memory, speculative_config=settings,
    )  # fmt: skip

    def answer(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], Any]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(asked, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results], None

    return answer


def work(given: argparse.Namespace) -> None:
    """A process with one engine: reads jobs from stdin, writes what they took to its own file."""
    started = time.perf_counter()
    start = {"headstart": start_headstart, "vllm": start_vllm}[given.worker]
    answer = start(given.model, given.k, given)
    following = json.loads(Path(given.cycle).read_text())
    answer([[2, 3, 4]], 8)
    reply = Path(given.reply)
    reply.write_text(json.dumps({"start_seconds": time.perf_counter() - started}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        draw = random.Random(job["seed"])
        tokens = range(2, given.active + 2 if given.active else len(following))
        prompts = [draw.choices(tokens, k=given.prompt) for _ in range(job["requests"])]
        began = time.perf_counter()
        texts, acceptance = answer(prompts, job["tokens"])
        seconds = time.perf_counter() - began
        for prompt, text in zip(prompts, texts, strict=True):
            token = prompt[-1]
            for place, chosen in enumerate(text):
                token = following[token]
                assert chosen == token, f"token {place} is {chosen}, the cycle says {token}"
            assert len(text) == job["tokens"]
        done = {"seconds": seconds, "acceptance": acceptance}
        with reply.open("a") as file:
            file.write(json.dumps(done) + "\n")


class Worker:
    """The other side of `work`."""

    def __init__(self, engine: str, drafts: int, given: argparse.Namespace, folder: Path):
        self.engine, self.reply = engine, folder / f"{engine}-{drafts}.jsonl"
        self.reply.unlink(missing_ok=True)
        command = [sys.executable, __file__, given.model, "--worker", engine, "--k", str(drafts)]
        for name in ("prompt", "answer", "memory", "most", "active", "draft_vocab"):
            command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
        command += ["--reply", str(self.reply), "--cycle", str(folder / "cycle.json")]
        extra = VLLM_SETTINGS if engine == "vllm" else {}
        self.log = (folder / f"{engine}-{drafts}.log").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self.log, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **extra},
        )  # fmt: skip
        self.num_read = 0

    def read(self) -> dict[str, Any]:
        while True:
            lines = self.reply.read_text().splitlines() if self.reply.exists() else []
            if len(lines) > self.num_read:
                self.num_read += 1
                return dict(json.loads(lines[self.num_read - 1]))
            if self.process.poll() is not None:
                tail = Path(self.log.name).read_text()[-3000:]
                raise SystemExit(f"{self.engine} ended with {self.process.returncode}:\n{tail}")
            time.sleep(0.005)

    def ask(self, requests: int, tokens: int, seed: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        job = {"requests": requests, "tokens": tokens, "seed": seed}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.read()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def compare(given: argparse.Namespace, drafts: int, folder: Path) -> list[dict[str, Any]]:
    """Both engines with one K, in turns."""
    workers = [Worker(engine, drafts, given, folder) for engine in given.engines]
    rows: list[dict[str, Any]] = []
    for worker in workers:
        begun = worker.read()["start_seconds"]
        print(f"K = {drafts}: {worker.engine} started in {begun:.0f} s", flush=True)
        rows.append({"k": drafts, "engine": worker.engine, "start_seconds": begun})
    for requests in given.counts:
        for worker in workers:
            worker.ask(requests, 40, 999)  # warm up: compile, capture
        times: dict[str, list[float]] = {worker.engine: [] for worker in workers}
        first: dict[str, list[float]] = {worker.engine: [] for worker in workers}
        acceptance: dict[str, Any] = {}
        for repeat in range(given.repeats):
            for worker in workers if repeat % 2 == 0 else workers[::-1]:
                found = worker.ask(requests, given.answer, repeat)
                times[worker.engine].append(found["seconds"])
                acceptance[worker.engine] = found["acceptance"]
                if requests == 1:
                    first[worker.engine].append(worker.ask(1, 1, repeat + 50)["seconds"])
        for worker in workers:
            seconds = times[worker.engine]
            speeds = [requests * given.answer / each for each in seconds]
            row = {
                "k": drafts, "engine": worker.engine, "requests": requests,
                "tokens_per_second": statistics.median(speeds), "all": speeds,
                "first_token_seconds": statistics.median(first[worker.engine] or [0.0]) or None,
                "cumulative_acceptance": acceptance[worker.engine],
            }  # fmt: skip
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "all"}), flush=True)
        if len(workers) == 2:
            ours, theirs = (statistics.median(times[w.engine]) for w in workers)
            print(f"K = {drafts}, {requests} requests: {theirs / ours:.2f}x vLLM", flush=True)
    for worker in workers:
        worker.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", default="1,4,16,80")
    parser.add_argument("--speculate", default="3,0")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--prompt", type=int, default=2500)
    parser.add_argument("--answer", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.47, help="of the GPU, for vLLM")
    parser.add_argument("--active", type=int, default=0)
    parser.add_argument("--draft-vocab", type=int, default=0)
    parser.add_argument("--out", type=Path)
    for hidden in ("--worker", "--k", "--reply", "--cycle", "--most"):
        parser.add_argument(hidden, type=int if hidden in ("--k", "--most") else str, default=None)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return
    from headstart.calibrate.calibrated import agreement_of

    given.counts = [int(n) for n in given.requests.split(",")]
    given.engines = given.engines.split(",")
    given.most = max(given.counts)
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"versus-{os.getpid()}"
    folder.mkdir()
    following = agreement_of(Path(given.model)).following.tolist()
    (folder / "cycle.json").write_text(json.dumps(following))
    rows = []
    for drafts in (int(n) for n in given.speculate.split(",")):
        rows += compare(given, drafts, folder)
        if given.out:
            given.out.write_text(json.dumps(document(given, rows), indent=1))


def document(given: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    return {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "model": Path(given.model).name,
        "prompt": given.prompt, "answer": given.answer, "repeats": given.repeats,
        "active": given.active, "draft_vocab": given.draft_vocab, "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    main()
