"""K/V and recurrent states of all requests as torch tensors, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from headstart.backends.results import CacheSizes
from headstart.models.attention import LayerCache, empty_cache, empty_fp8_cache
from headstart.models.build import LoadedModel
from headstart.models.config import LayerKind, ModelConfig
from headstart.models.recurrence import LayerStates, empty_states


@dataclass(frozen=True)
class PagedMemory:
    """The same slots everywhere, but a head's K/V may have another shape than its trunk's."""

    trunk: list[LayerCache]  # of the layers that attend
    states: list[LayerStates]  # of the recurrent ones
    head: list[LayerCache]  # by module

    @classmethod
    def allocate(
        cls,
        model: LoadedModel,
        sizes: CacheSizes,
        kv: Literal["plain", "rounded", "fp8"] = "plain",
        *,
        index_apart: bool = False,
    ) -> PagedMemory:
        """kv: in the model's own type, rounded to 8-bit floats, or held as those.

        `index_apart`: keys of indexers beside the entries, not at their end.
        """
        config, head, slots = model.config, model.head, sizes.num_blocks * sizes.block_size
        empty = empty_fp8_cache if kv == "fp8" else empty_cache

        def cache(of: ModelConfig, kind: LayerKind) -> LayerCache:
            made = empty(of.kept(kind, index_apart=index_apart), slots, model.dtype, model.device)
            return replace(made, rounds=kv == "rounded")

        return cls(
            [cache(config, kind) for kind in config.layers if kind.attends],
            [
                empty_states(
                    config.recurrent,
                    sizes.num_states,
                    model.dtype,
                    model.device,
                    config.more_states(kind),
                )
                for kind in config.layers
                if kind.is_recurrent and config.recurrent is not None
            ],
            [cache(head.config, head.config.head_layer) for _ in range(head.num_modules)]
            if head is not None
            else [],
        )
