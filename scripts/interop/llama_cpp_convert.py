"""Converts tiny checkpoints with llama.cpp's own converter, whose tree is given.

    python llama_cpp_convert.py TREE END_TOKEN MODEL OUT.gguf [option ...] [-- MODEL OUT.gguf ...]

The converter knows tokenizers of releases only; ours is replaced by words t0, t1, ... and a token
that ends a text. Options are the converter's: --mtp, --no-mtp, --outtype bf16. Several
conversions, with -- between them, take the time of importing torch once.
"""

from __future__ import annotations

import runpy
import sys
from itertools import groupby
from typing import Any


def set_vocab(self: Any, end: int) -> None:
    from gguf import TokenType

    count, writer = self.hparams["vocab_size"], self.gguf_writer
    writer.add_tokenizer_model("gpt2")
    # GLM-4.7-Flash and DeepSeek have one architecture, and this tells them apart.
    is_flash = self.hparams.get("model_type") == "glm4_moe_lite"
    writer.add_tokenizer_pre("glm4" if is_flash else "default")
    writer.add_token_list([f"t{token}" for token in range(count)])
    writer.add_token_types([TokenType.NORMAL] * count)
    writer.add_token_merges(["t 2"])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def convert(tree: str, end: int, model: str, out: str, options: list[str]) -> None:
    from conversion import base  # type: ignore[import-not-found]

    def without_tokenizers(kind: Any) -> None:
        for each in kind.__subclasses__():
            if "set_vocab" in vars(each):
                each.set_vocab = lambda self: set_vocab(self, end)
            each.no_mtp = each.mtp_only = False
            without_tokenizers(each)

    base.TextModel.set_vocab = lambda self: set_vocab(self, end)
    # Configs as they are published: newer releases of transformers rename their fields.
    base.AutoConfig.from_pretrained = lambda *words, **options: 1 / 0
    sys.modules["conversion"].load_all_models()
    without_tokenizers(base.TextModel)
    sys.argv = ["convert", model, "--outfile", out, *options]
    runpy.run_path(f"{tree}/convert_hf_to_gguf.py", run_name="__main__")


def main() -> int:
    tree, end, *rest = sys.argv[1:]
    sys.path[:0] = [tree, f"{tree}/gguf-py"]
    failed = 0
    for is_mark, words in groupby(rest, lambda word: word == "--"):
        if is_mark:
            continue
        model, out, *options = words
        try:
            convert(tree, int(end), model, out, options or ["--outtype", "f32"])
        except (SystemExit, Exception) as error:
            print(f"{model} {' '.join(options)}: {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
