"""The checkpoints of the interoperability checks, and our command line as a user calls it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headstart.checkpoint.reader import Checkpoint
from headstart.heads.detection import find_head

Tensors = dict[str, torch.Tensor]


class CommandFailed(Exception):
    """A command line exited with an error; the message is its last line of output."""


def command(*words: str | Path) -> str:
    """Run a command and return its output."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        raise CommandFailed(f"{' '.join(map(str, words[:4]))} ...: {lines[-1]}")
    return done.stdout


def headstart(*words: str | Path) -> str:
    """Run one of our own commands in a process of its own."""
    return command(sys.executable, "-m", "headstart", *words)


def tensors_of(folder: Path) -> Tensors:
    """Every tensor in a folder, read by the safetensors library and not by us."""
    result: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        result |= load_file(file)
    return result


def differences(one: Path, other: Path) -> list[str]:
    """Tensors that are not in both folders with the same dtype, shape and bytes."""
    left, right = tensors_of(one), tensors_of(other)
    return sorted(
        name
        for name in left.keys() | right.keys()
        if name not in left or name not in right or not _same(left[name], right[name])
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def head_names(folder: Path) -> dict[str, str]:
    """Our name of each head tensor -> its name in the checkpoint."""
    return dict(find_head(Checkpoint.open(folder)).tensors)


def with_changed(
    model: Path, out: Path, change: Callable[[str, torch.Tensor], torch.Tensor]
) -> Path:
    """A copy of `model` whose tensors went through `change(published name, values)`."""
    shutil.copytree(model, out)
    for file in out.glob("*.safetensors"):
        changed = {
            name: change(name, value).contiguous() for name, value in load_file(file).items()
        }
        save_file(changed, file, metadata={"format": "pt"})
    return out


def with_changed_head(
    model: Path, out: Path, change: Callable[[str, torch.Tensor], torch.Tensor]
) -> Path:
    """The same for the tensors of its head, by our names."""
    names = {theirs: ours for ours, theirs in head_names(model).items()}
    return with_changed(
        model, out, lambda name, value: change(names[name], value) if name in names else value
    )


def swap_fusion_halves(name: str, value: torch.Tensor) -> torch.Tensor:
    """Control: the head takes the embedding for the hidden state and the reverse."""
    if not name.endswith(".fuse.weight"):
        return value
    one, other = value.chunk(2, dim=1)
    return torch.cat([other, one], dim=1)


def drop_block(name: str, value: torch.Tensor) -> torch.Tensor:
    """Control: the head's decoder layer adds nothing."""
    is_output = ".block." in name and ("o_proj" in name or "down_proj" in name)
    return torch.zeros_like(value) if is_output else value


def shift_norms(name: str, value: torch.Tensor) -> torch.Tensor:
    """Control: one is added to the norms once more than it should be."""
    return value + 1 if name.endswith("norm.weight") else value
