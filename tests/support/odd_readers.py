"""The commands of `odd_files`, with a folder of everything that they read.

Commands run inside of that folder, with relative paths. What a server answers lies in `answers/`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headstart.calibrate.tiny import write_tiny
from headstart.train.job import Job
from headstart.train.options import TrainOptions, resolve
from headstart.train.trainer import train
from headstart.vocab.draft_vocab import DraftVocab
from headstart.vocab.files import write
from support.bench_documents import document
from support.commands import headstart
from support.distill_runs import TEMPLATE, write_prompts
from support.odd_files import Reader
from support.server_runs import SIZES, write_tokenizer
from support.training_data import random_records, write_data
from support.training_runs import QUICK, StopAt, flags

# Families that the engine runs, one of each kind, and others that only checkpoints are made of.
RUN = ("deepseek_v3", "glm4_moe", "mimo", "mimo_v2", "qwen3_5", "qwen3_next", "step3p5",
       "ernie4_5_moe", "glm_moe_dsa", "qwen2")  # fmt: skip
KNOWN = (*RUN, "deepseek_v4", "nemotron_h", "qwen3_5_moe")
VOCABS = ("v.json", "d2t.npy", "t2d.npy", "v.pt", "v.safetensors")
ENGINE = ("--device", "cpu", "--dtype", "float32", "--kernels", "off", "--kv-bytes", "67108864")
TRAIN: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cache": "cache"}


def prepare(folder: Path) -> Path:
    """Make everything that the readers read; seconds."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        for family in KNOWN:
            out = Path("models") / family
            write_tiny(family, out, dtype="F32", max_position_embeddings=512)
        Path("models/mimo/chat_template.jinja").write_text(TEMPLATE)
        _chat_model(Path("chat"))
        _vocabs(Path("vocabs"))
        heldout = random_records(3, seed=9, prefix="h")
        write_data(Path("models/mimo"), Path("data"), random_records(16), heldout)
        _stopped_training()
        write_prompts(Path("prompts.jsonl"), 2)
        _journal()
        for name, slowness in (("old", 1.0), ("new", 1.1)):
            Path(f"{name}.json").write_text(json.dumps(document(slowness)))
        variants = [{"name": f"v{x}", "overrides": {"learning_rate": x / 10}} for x in (1, 2)]
        Path("variants.json").write_text(json.dumps(variants))
        Path("words.txt").write_text("the quick brown fox and a lazy dog " * 200)
        _answers(Path("answers"))
    return folder


def _chat_model(folder: Path) -> None:
    write_tiny("mimo", folder, dtype="F32", **{**SIZES, "hidden_size": 64})
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _vocabs(folder: Path) -> None:
    folder.mkdir()
    vocab = DraftVocab.of(range(0, 120, 3), vocab_size=128, language="en")
    for name in VOCABS:
        write([vocab], folder / name)


def _stopped_training() -> None:
    """A run that is to go on, and the cache of states that it reads."""
    options = resolve(TrainOptions(**{**QUICK, **TRAIN}))
    job = Job(
        model=Path("models/mimo"), data=Path("data"), out=Path("run"), options={"": options}
    )  # fmt: skip
    train(job, StopAt(4))


def _journal() -> None:
    messages = [{"role": role, "content": "t1 t2"} for role in ("user", "assistant")]
    Path("answered.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    done = headstart(*IMPORT)
    assert done.returncode == 0, done.stderr


def _answers(folder: Path) -> None:
    folder.mkdir()
    models = {"object": "list", "data": [{"id": "m", "max_model_len": 100, "root": "m"}]}
    message = {"role": "assistant", "content": "t3 t4"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [3, 4, 1]}
    usage = {
        "prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    whole = {"id": "a", "choices": [choice], "usage": usage, "prompt_token_ids": [2, 11, 3]}
    delta = {"index": 0, "delta": {"content": "t3 "}, "finish_reason": None, "token_ids": [3]}
    (folder / "models.json").write_text(json.dumps(models))
    (folder / "whole.json").write_text(json.dumps(whole))
    (folder / "chunk.json").write_text(json.dumps({"id": "a", "choices": [delta], "usage": usage}))


class _Answers(BaseHTTPRequestHandler):
    """Answers with what lies in the working folder of the trial."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        is_list = self.path.endswith("/models")
        self._send(_file("models.json") if is_list else b"", "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            self._send(_file("whole.json"), "application/json")
            return
        chunk = b"data: " + _file("chunk.json").replace(b"\n", b" ") + b"\n\n"
        self._send(chunk * 3 + b"data: [DONE]\n\n", "text/event-stream")

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _file(name: str) -> bytes:
    return (Path("answers") / name).read_bytes()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A command that goes away while it is answered is nothing to talk about."""


@cache
def _server() -> ThreadingHTTPServer:
    made = _Server(("127.0.0.1", 0), _Answers)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    return made


def _asking(*words: str) -> Callable[[], list[str]]:
    """A command that asks the server, which starts with the first one."""
    return lambda: [
        f"http://127.0.0.1:{_server().server_port}" if word == "URL" else word for word in words
    ]


def _saying(*words: str) -> Callable[[], list[str]]:
    return lambda: list(words)


def _generate(model: str, *more: str) -> Callable[[], list[str]]:
    return _saying("generate", model, "t1 t2", "--max-tokens", "3", *ENGINE, *more)


IMPORT = ("distill", "models/mimo", "--prompts", "answered.jsonl", "--import", "--out", "distilled",
          "--heldout", "0")  # fmt: skip
_CHAT = _generate("chat", "--chat")
_TRAIN = _saying(
    "train", "models/mimo", "--data", "data", "--out", "run", *flags(**TRAIN)
)  # fmt: skip
_CHAT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json",
               "chat_template.jinja")  # fmt: skip
READERS = (
    Reader("generate: chat", tuple(f"chat/{name}" for name in _CHAT_FILES), _CHAT),
    Reader("generate: text", ("chat/tokenizer.json",), _generate("chat")),
    Reader("vocab: text", ("chat/tokenizer.json", "words.txt"),
           _saying("vocab", "chat", "--text", "words.txt", "--by", "none", "--size", "270",
                   "--out", "made.json")),
    *(Reader(f"generate: {name}", (f"models/{name}/config.json",), _generate(f"models/{name}"))
      for name in RUN),
    *(Reader(f"inspect: {name}", (f"models/{name}/config.json",),
             _saying("inspect", f"models/{name}")) for name in KNOWN),
    *(Reader(f"launch: {name}", (f"models/{name}/config.json",),
             _saying("launch", f"models/{name}", "--engine", "vllm", "--engine-version", "0.30.0",
                     "--speculate", "0" if name == "qwen2" else "1")) for name in KNOWN),
    *(Reader(f"vocab: {name}", (f"vocabs/{name}",),
             _saying("vocab", "models/mimo", "--from", f"vocabs/{name}", "--out", "made.json"))
      for name in VOCABS),
    Reader("generate: draft vocabulary", ("vocabs/v.json",),
           _generate("models/mimo", "--draft-vocab", "vocabs/v.json")),
    Reader("score: dataset", ("data/dataset.json", "data/heldout.safetensors"),
           _saying("score", "models/mimo", "--data", "data", "--bandwidth", "100", "--max-drafts",
                   "2", "--device", "cpu", "--dtype", "float32")),
    Reader("train: dataset", ("data/dataset.json", "data/train.safetensors"), _TRAIN),
    Reader("train: cache", ("cache/header.json", "cache/index.json"), _TRAIN),
    Reader("train: run", ("run/options.json", "run/metrics.jsonl",
           "run/checkpoints/step-00000004.safetensors"), _TRAIN),
    Reader("train: variants", ("variants.json",),
           _saying("train", "models/mimo", "--data", "data", "--out", "study", "--variants",
                   "variants.json", "--dry-run")),
    Reader("distill: import", ("answered.jsonl", "distilled/journal.jsonl",
           "distilled/dataset.json"), _saying(*IMPORT)),
    Reader("distill: server", ("answers/whole.json", "answers/models.json", "prompts.jsonl"),
           _asking("distill", "models/mimo", "--prompts", "prompts.jsonl", "--retries", "0",
                   "--server", "URL", "--out", "answered", "--heldout", "0")),
    Reader("bench: diff", ("old.json",), _saying("bench", "diff", "old.json", "new.json")),
    Reader("bench: server", ("answers/chunk.json", "answers/models.json", "prompts.jsonl"),
           _asking("bench", "run", "--url", "URL", "--num-requests", "1", "--repeats", "1",
                   "--warm-up", "0", "--prompts", "prompts.jsonl", "--output-tokens", "3")),
    Reader("bench: tasks", ("answers/chunk.json", "prompts.jsonl"),
           _asking("bench", "tasks", "--question-file", "prompts.jsonl", "--url", "URL",
                   "--max-gen-length", "3")),
    Reader("calibrate: tokenizer", ("chat/tokenizer.json", "chat/tokenizer_config.json"),
           _saying("calibrate", "--shape",
                   "layers=1,hidden=512,heads=4,kv_heads=2,vocab=272,intermediate=64",
                   "--acceptance", "0.5", "--tokenizer", "chat", "--out", "calibrated")),
)  # fmt: skip
