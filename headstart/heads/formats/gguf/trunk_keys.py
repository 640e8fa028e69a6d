"""The keys of a GGUF file below its architecture's name, each of the kind that is expected.

Every one must be asked for, or be known to change nothing: a file that asks for more than the
engine computes is refused instead of giving wrong text.
"""

from __future__ import annotations

import struct
from math import isfinite
from typing import Any

from headstart.checkpoint.gguf.fields import ARRAY
from headstart.errors import BadConfig, UnsupportedFamily, some
from headstart.heads.formats.gguf.model import GgufModel

# keys that say nothing which a config would
_NO_MATTER = (
    "block_count", "nextn_predict_layers", "vocab_size", "rope.scaling.finetuned",
    "tensor_data_layout",
)  # fmt: skip
_KINDS = {
    int: "whole number", float: "number", bool: "yes or no", str: "text", list: "list",
}  # fmt: skip


class Keys:
    """The keys of a file below its architecture's name; what is never asked for is refused."""

    def __init__(self, model: GgufModel, num_layers: int):
        self.model, self.num_layers = model, num_layers
        blocks = model.blocks()
        self.layers = [blocks.get(layer, {}) for layer in range(num_layers)]
        self._asked = set(_NO_MATTER)

    def get(self, name: str, kind: type = int) -> Any:
        """The value of a key, None where there is none; BadConfig for one of another kind."""
        self._asked.add(name)
        found = self.model.value(name)
        return None if found is None else self._checked(name, found, kind)

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number; BadConfig where there is none, and no default."""
        found = self.get(name)
        found = default if found is None else found
        if type(found) is not int:
            raise self._wrong(name, found, "whole number")
        return found

    def listed(self, name: str, kind: type) -> list[Any] | None:
        """An array of one kind, None where there is none."""
        found = self.get(name, list)
        return None if found is None else [self._checked(name, each, kind) for each in found]

    def each(self, name: str, default: Any = None, kind: type = int) -> list[Any]:
        """One value for each layer of the trunk, and of the head's modules where there are any."""
        field = self.model.fields.get(f"{self.model.arch_name}.{name}")
        if field is None or field.kind != ARRAY:
            found = self.get(name, kind)
            return [default if found is None else found] * self.num_layers
        values = self.listed(name, kind) or []
        if len(values) < self.num_layers:
            raise BadConfig(
                f"{self.model.folder}: {self.model.arch_name}.{name} has {len(values)} values; "
                f"expected one for each of {self.num_layers} layers. Convert the model again."
            )
        return values

    def _checked(self, name: str, found: Any, kind: type) -> Any:
        if kind is bool and found in (0, 1) and isinstance(found, int):
            return bool(found)
        is_right = type(found) is kind
        if is_right and kind is int:
            is_right = found >= 0
        elif is_right and kind is float:
            is_right = isfinite(found)
        if not is_right:
            raise self._wrong(name, found, _KINDS[kind])
        return shortest(found) if kind is float else found

    def _wrong(self, name: str, found: Any, expected: str) -> BadConfig:
        return BadConfig(
            f"{self.model.folder}: {self.model.arch_name}.{name} is {str(found)[:60]}; expected a "
            f"{expected}. Convert the model again."
        )

    def layers_with(self, tensor: str) -> list[int]:
        return [number for number, own in enumerate(self.layers) if tensor in own]

    def any_has(self, tensor: str) -> bool:
        return bool(self.layers_with(tensor))

    def refuse_others(self) -> None:
        """UnsupportedFamily for keys that nothing asked for."""
        prefix = f"{self.model.arch_name}."
        names = [n.removeprefix(prefix) for n in self.model.fields if n.startswith(prefix)]
        others = sorted(name for name in names if name not in self._asked)
        if others:
            raise UnsupportedFamily(
                f"{self.model.folder} sets {some(prefix + name for name in others)}, which is not "
                f"known of {self.model.arch_name} here: without it the text might be wrong. "
                "llama.cpp runs the file (`headstart launch FILE.gguf --engine llamacpp`)."
            )


def shortest(value: float) -> float:
    """A number that was stored in 32 bits as it was written: 1e-06, not 9.99999997e-07."""
    for digits in range(6, 10):
        found = float(f"{value:.{digits}g}")
        if struct.pack("<f", found) == struct.pack("<f", value):
            return found
    return value
