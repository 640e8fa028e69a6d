"""Heads that are whole and that engines do not find: by the names of tensors, or by their files."""

from __future__ import annotations

from collections.abc import Iterator

from headstart.checkpoint.reader import Checkpoint
from headstart.errors import some
from headstart.heads.detection import FoundHead, quoted


def about_names(checkpoint: Checkpoint, head: FoundHead) -> Iterator[str]:
    """Names below which engines find no head, and tables beside it that they do not read."""
    keys, folder = head.family.keys, quoted(checkpoint.folder)
    if head.naming.root in keys.unread:
        name = next(iter(head.tensors.values()))
        yield (
            f"head tensors begin with {head.naming.root!r} ({name}); vLLM and SGLang skip such "
            f"names and serve without the head, or with one that was never loaded. `headstart "
            f"stitch {folder} {folder} --out DIR` writes names that they read."
        )
    if others := respelled_names(head):
        yield (
            f"{len(others)} head tensors have other names than vLLM and SGLang ask for "
            f"({others[0]}). `headstart stitch {folder} {folder} --out DIR` writes the usual ones."
        )
    beside = [
        name
        for table in ("lm_head", "embed_tokens")
        if (name := f"{head.naming.root}mtp.{table}.weight") in checkpoint.tensors
        and keys.to_ours(name, head.naming) is None
    ]
    if beside:
        yield (
            f"{some(beside)} is stored beside the head, and engines draft with the trunk's "
            "instead (vllm-project/vllm#52013): a head trained with its own accepts little."
        )


def respelled_names(head: FoundHead) -> tuple[str, ...]:
    """Tensors of the head that are stored under other names than the family's usual ones."""
    keys = head.family.keys
    if not keys.respelled:
        return ()
    return tuple(
        stored
        for ours, stored in head.tensors.items()
        if keys.to_published(ours, head.naming) != stored
    )


def outside_index(checkpoint: Checkpoint, head: FoundHead) -> tuple[str, ...]:
    """Files that hold tensors of the head and that the checkpoint's index does not list."""
    files = {checkpoint.info(name).file.name for name in head.tensors.values()}
    return tuple(sorted(files & set(checkpoint.index.unlisted)))


def about_files(checkpoint: Checkpoint, head: FoundHead) -> Iterator[str]:
    """Files that loaders pass over, and an index that does not agree with them."""
    unlisted = outside_index(checkpoint, head)
    if unlisted:
        hidden = [n for n in head.tensors.values() if checkpoint.info(n).file.name in unlisted]
        folder = quoted(checkpoint.folder)
        yield (
            f"{len(hidden)} head tensors are in {some(unlisted)}, which the index does not list; "
            "vLLM and most loaders ignore such files. A full index is written by `headstart stitch "
            f"{folder} {folder} --out DIR`."
        )
    total = checkpoint.index.index_metadata.get("total_size")
    actual = sum(info.num_bytes for info in checkpoint.tensors.values())
    if isinstance(total, int) and not unlisted and total != actual:
        yield f"the index gives total_size {total:,}, the tensors have {actual:,} bytes."
