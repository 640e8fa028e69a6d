"""Headstart inside vLLM: what its entry point `vllm.general_plugins` calls in every process.

Importing this costs nothing and needs neither vLLM nor torch. `register` makes vLLM's MTP classes
known a second time under their own names; a class of ours gives way to vLLM's own unless a draft
vocabulary was asked for (settings.py). Nothing here touches a device.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM once in each of its processes; never raises, so that vLLM always starts."""
    from headstart.vllm_plugin.registration import register_all

    register_all()
