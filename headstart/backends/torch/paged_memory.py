"""K/V and recurrent states of all requests as torch tensors, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.backends.base import CacheSizes
from headstart.models.attention import LayerCache, empty_cache
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
    def allocate(cls, model: LoadedModel, sizes: CacheSizes) -> PagedMemory:
        config, head, slots = model.config, model.head, sizes.num_blocks * sizes.block_size

        def cache(of: ModelConfig, kind: LayerKind) -> LayerCache:
            return empty_cache(of.kept(kind), slots, model.dtype, model.device)

        return cls(
            [cache(config, kind) for kind in config.layers if kind.attends],
            [
                empty_states(config.recurrent, sizes.num_states, model.dtype, model.device)
                for _ in range(config.num_recurrent)
                if config.recurrent is not None
            ],
            [cache(head.config, head.config.head_layer) for _ in range(head.num_modules)]
            if head is not None
            else [],
        )
