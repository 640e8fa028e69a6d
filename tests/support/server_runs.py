"""What the server tests share: a small model that writes bytes, and a real server process.

The tokenizer has all 256 bytes, so characters are often split over tokens, and a chat template
with special tokens around the roles.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.tiny_fixture import Tiny

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
VOCAB = 272
SIZES: dict[str, Any] = {
    "hidden_size": 256, "vocab_size": VOCAB, "head_dim": 16, "intermediate_size": 64,
    "num_hidden_layers": 2, "max_position_embeddings": 4096,
}  # fmt: skip
TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }} <tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if thinking is defined %}<think>{% if not thinking %}</think>{% endif %}{% endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # bytes, as the tokenizer writes them
# Space, newline, tab, return: a model of no sense likes them wherever a grammar allows any.
BLANKS = [len(SPECIAL) + ALPHABET.index(char) for char in "\u0120\u010a\u0109\u010d"]
_READY_SECONDS = 180  # a limit for what hangs: importing torch takes a minute on a busy machine
# One for all: httpx.get() and its like read all certificates of the system, every time.
HTTP = httpx.Client(
    verify=False, timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)


def served(tiny: Tiny, **changes: Any) -> Path:
    """A small mimo whose text is varied and whose head is right now and then."""
    folder = tiny("mimo", **{"rate": 0.9, "seed": 3, "dtype": "F32", **SIZES, **changes})
    out = folder.parent / f"{folder.name}-served"
    if not out.exists():
        shutil.copytree(folder, out)
        write_tokenizer(out)
    return out


def write_tokenizer(
    folder: Path, template: str | None = TEMPLATE, special: Sequence[str] = SPECIAL
) -> None:
    words = [*special, *ALPHABET]
    words += [f"<unused{i}>" for i in range(VOCAB - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>",
        "clean_up_tokenization_spaces": False, "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Server:
    """A server process, its address and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process, self.lines = process, list[str]()
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(r"ready at (http://\S+?),", line):
                self.url = found[1]
                self._is_ready.set()
        self._is_ready.set()

    def wait_ready(self) -> None:
        assert self._is_ready.wait(_READY_SECONDS) and hasattr(self, "url"), "\n".join(self.lines)

    def end(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


@contextmanager
def running(
    folder: Path, *flags: str, python: str = sys.executable,
    script: Sequence[str] = ("-m", "headstart"), **env: str,
) -> Iterator[Server]:  # fmt: skip
    """`headstart serve` on a free port, ready when this gives it."""
    command = [
        python, *script, "serve", str(folder), "--port", "0", "--threads", "1",
        "--dtype", "float32", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    server = Server(process)
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)
        assert process.stderr is not None
        server._reader.join(5)
        process.stderr.close()
