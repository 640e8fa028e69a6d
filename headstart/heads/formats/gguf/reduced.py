"""A draft vocabulary in a GGUF file with a head alone, as llama.cpp's pull request 29143 reads it.

`d2t` lists the target's token of each row of the LM head, which has that many rows; every other
token gets no probability. The pull request was open in October 2026: no release loads such files,
and a file with a trunk cannot be one, because the trunk's own LM head would be cut as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headstart.checkpoint.dtypes import byte_size
from headstart.checkpoint.gguf.values import byte_blocks
from headstart.checkpoint.source import TensorSource
from headstart.errors import ConfigError, UnsupportedFamily
from headstart.heads.formats.gguf.arch import Arch
from headstart.vocab.draft_vocab import DraftVocab

BUILD = "llama.cpp's pull request 29143, which no release holds"
MAP = "d2t"
_ARCHS = ("qwen35", "qwen35moe")
_OUTPUT, _EMBED = "output.weight", "token_embd.weight"
_ROWS_AT_ONCE = 256


def refuse_in_models(path: str | None) -> None:
    """ConfigError where a head with a draft vocabulary would go into a whole model."""
    if path is not None:
        raise ConfigError(
            "--draft-vocab: llama.cpp would cut the trunk's own LM head to the draft vocabulary, "
            "too, so only a file with a head alone can have one: headstart export HEAD --format "
            "gguf --draft-vocab FILE --out DIR."
        )


def reduced(
    tensors: Mapping[str, TensorSource], arch: Arch, vocab: DraftVocab
) -> dict[str, TensorSource]:
    """The tensors of a file with a head alone, its LM heads cut to the draft vocabulary."""
    if arch.name not in _ARCHS:
        raise UnsupportedFamily(
            f"--draft-vocab: {BUILD}, is for {' and '.join(_ARCHS)}, and this head is for "
            f"{arch.name}. Leave it out."
        )
    embed = tensors[_EMBED]
    vocab.check(vocab_size=embed.shape[0], tokenizer_sha=None)
    result = {_EMBED: embed, **tensors}
    result[_OUTPUT] = tensors.get(_OUTPUT, embed)  # tied: rows of the embedding
    for name, source in result.items():
        if name == _OUTPUT or name.endswith("nextn.shared_head_head.weight"):
            result[name] = _rows_of(source, vocab.ids)
    return {**result, MAP: map_tensor(vocab.ids)}


def about_reduced(vocab: DraftVocab | None) -> tuple[str, ...]:
    """What to know of a file with a draft vocabulary, in words."""
    if vocab is None:
        return ()
    return (
        f"experimental: it drafts from {len(vocab.ids)} tokens, for which the server must be built "
        f"with {BUILD}; others refuse the file",
    )


def map_tensor(ids: Sequence[int]) -> TensorSource:
    """The target's ids as they stand in a file."""
    import numpy as np

    data = np.array(ids, dtype="<i8").tobytes()
    return TensorSource("I64", (len(ids),), lambda: (data,), is_copy=False)


def _rows_of(source: TensorSource, ids: Sequence[int]) -> TensorSource:
    """Rows of a matrix, which must be ascending; a row is whole blocks in every type."""
    row = byte_size(source.dtype, source.shape[1:])

    def pieces() -> Iterator[bytes]:
        wanted = iter(ids)
        number, first = next(wanted, None), 0
        for block in byte_blocks(source, _ROWS_AT_ONCE * row):
            end = first + len(block) // row
            while number is not None and number < end:
                at = (number - first) * row
                yield block[at : at + row]
                number = next(wanted, None)
            first = end

    return TensorSource(source.dtype, (len(ids), *source.shape[1:]), pieces, is_copy=False)
