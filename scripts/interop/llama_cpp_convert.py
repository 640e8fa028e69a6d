"""Converts a tiny checkpoint with llama.cpp's own converter, whose tree is given.

    python llama_cpp_convert.py TREE MODEL OUT.gguf END_TOKEN

The converter knows tokenizers of releases only; ours is replaced by words t0, t1, ... and a token
that ends a text.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any


def set_vocab(self: Any, end: int) -> None:
    from gguf import TokenType

    count, writer = self.hparams["vocab_size"], self.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{token}" for token in range(count)])
    writer.add_token_types([TokenType.NORMAL] * count)
    writer.add_token_merges(["t 2"])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def main() -> None:
    tree, model, out, end = sys.argv[1:]
    sys.path[:0] = [tree, f"{tree}/gguf-py"]
    from conversion import qwen  # type: ignore[import-not-found]

    for kind in (qwen.Qwen3_5TextModel, qwen.Qwen3_5MoeTextModel):
        kind.set_vocab = lambda self: set_vocab(self, int(end))
    sys.argv = ["convert", model, "--outfile", out, "--outtype", "f32"]
    runpy.run_path(f"{tree}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
