"""Where vLLM's own MTP classes are, as its registry had them before ours took their names."""

from __future__ import annotations

from importlib import import_module

_PLACES: dict[str, tuple[str, str]] = {}  # architecture -> module, class


def remember(architecture: str, module: str, name: str) -> None:
    _PLACES[architecture] = (module, name)


def stock_class(architecture: str) -> type:
    """vLLM's own class of an architecture, imported now."""
    if architecture not in _PLACES:
        from headstart.vllm_plugin.registration import register_all

        register_all()  # a process that asks before its plugins were loaded
    module, name = _PLACES[architecture]
    found: type = getattr(import_module(module), name)
    return found
