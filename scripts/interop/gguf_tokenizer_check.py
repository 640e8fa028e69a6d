"""Tokenizers that we read out of GGUF files beside llama.cpp's own, on texts of every kind.

    python scripts/interop/gguf_tokenizer_check.py --libs DIR

DIR holds llama.cpp's libraries (`llama_cpp_library.py` says which). For every way of splitting a
text that is read here a small BPE is trained on this repository's documents, with some Chinese,
accents and digits, and written into a GGUF file without tensors. Tokens of a few thousand texts,
real lines and made-up ones, must be the same.

Prints a table, exits 1 on any failure.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import random
import sys
import tempfile
import unicodedata
from pathlib import Path

from llama_cpp_library import Library
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from headstart.checkpoint.gguf.fields import ARRAY, BOOL, INT32, STRING, UINT32, field
from headstart.checkpoint.gguf.shard import GgufShard
from headstart.data.prompt_reader import PromptReader
from headstart.heads.formats.gguf.model import open_gguf
from headstart.heads.formats.gguf.tokenizer import _SPLITTINGS, tokenizer_of
from headstart.heads.published import published_model

_ROOT = Path(__file__).parents[2]
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_ODD = [
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m", "\u4f60\u597d\uff0c\u4e16\u754c\uff01 2026\u5e74",
    "\u3053\u3093\u306b\u3061\u306f 12345 \u30ab\u30bf\u30ab\u30ca", "it's I'LL we'Re they'd 'S",
    "a\u0301b\u0302 \u0915\u094d\u0937 \u0e01\u0e33", "x  y   z\t\tw \n\n  end  ",
    "1234567 89,012.5",
    "\r\n\r\nfoo(bar)[0] += 3.14e-5;", "\U0001f389\U0001f600 ok", "#!$%&/()=?`{}|~^", " leading",
    "<|im_start|>user\nhi<|im_end|>\n", "", "   ", "\n", "don\u2019t \u201cquote\u201d \u2014 dash",
]  # fmt: skip
_ALPHABET = "ab Z9\u00e9\u4e00\u3042\n\t'.,-_#\u0301 \u00a0\U0001f600"


def trained(lines: list[str]) -> tuple[list[str], list[str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=_SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return vocab, [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
    ]


def write(path: Path, pre: str, vocab: list[str], merges: list[str]) -> None:
    keys = (
        field("general.architecture", "qwen2", STRING),
        field("qwen2.block_count", 1, UINT32),
        field("qwen2.context_length", 64, UINT32),
        field("qwen2.embedding_length", 32, UINT32),
        field("qwen2.feed_forward_length", 32, UINT32),
        field("qwen2.attention.head_count", 1, UINT32),
        field("qwen2.attention.layer_norm_rms_epsilon", 1e-6, 6),
        field("tokenizer.ggml.model", "gpt2", STRING),
        field("tokenizer.ggml.pre", pre, STRING),
        field("tokenizer.ggml.tokens", vocab, ARRAY, STRING),
        field(
            "tokenizer.ggml.token_type", [3 if t in _SPECIALS else 1 for t in vocab], ARRAY, INT32
        ),
        field("tokenizer.ggml.merges", merges, ARRAY, STRING),
        field("tokenizer.ggml.bos_token_id", 1, UINT32),
        field("tokenizer.ggml.eos_token_id", 2, UINT32),
        field("tokenizer.ggml.add_bos_token", False, BOOL),
    )
    path.write_bytes(GgufShard({}, keys).header())


def theirs(library: Library, path: Path, texts: list[str]) -> list[list[int]]:
    params = library.lib.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    model = library.lib.llama_model_load_from_file(str(path).encode(), params)
    vocab = library.lib.llama_model_get_vocab(model)
    call = library.lib.llama_tokenize
    call.argtypes = [
        c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool,
    ]  # fmt: skip
    found = []
    for text in texts:
        data, room = text.encode(), (c.c_int32 * (len(text.encode()) + 8))()
        count = call(vocab, data, len(data), room, len(room), True, True)
        found.append(list(room[:count]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--libs", type=Path, required=True)
    library = Library(parser.parse_args().libs.resolve())
    lines = [
        line
        for path in sorted((_ROOT / "docs").glob("*.md"))
        for line in path.read_text().splitlines()
    ]
    draw = random.Random(0)
    made = ["".join(draw.choices(_ALPHABET, k=draw.randrange(1, 30))) for _ in range(2000)]
    texts = [*_ODD, *draw.sample(lines, 1000), *made]
    vocab, merges = trained([*lines, *_ODD * 20])
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for pre, splitting in _SPLITTINGS.items():
            path = Path(folder, f"{pre}.gguf")
            write(path, pre, vocab, merges)
            model = open_gguf(path)
            documents, _ = tokenizer_of(model)
            reader = PromptReader(published_model(path, {}, {}, (), documents))
            # What is composed first is not the same text to llama.cpp.
            own = [
                t for t in texts if not splitting.is_composed or unicodedata.is_normalized("NFC", t)
            ]
            wrong = [
                text
                for text, ids in zip(own, theirs(library, path, own), strict=True)
                if reader.encode(text) != ids
            ]
            failures += bool(wrong)
            said = f"DIFFER: {len(wrong)}, {wrong[:3]!r}" if wrong else "equal"
            print(f"{pre:18} {len(own)} texts {said}", flush=True)
    print(f"{len(_SPLITTINGS)} checked, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
