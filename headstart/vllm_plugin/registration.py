"""Makes our classes known to vLLM: a second class for each of its MTP architectures, and our own.

A fault of ours must not keep vLLM from starting: whatever goes wrong is one line in its log.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from headstart.heads.formats.vllm import PLUGIN as GRAFTED
from headstart.vllm_plugin.settings import SWITCH
from headstart.vllm_plugin.versions import why_not

# vLLM shows what loggers below its own name say.
log = logging.getLogger("vllm.headstart")
_CLASSES = "headstart.vllm_plugin.classes"
CONFIG_TYPE = "mtp"  # the only type of MTP heads that vLLM leaves as it is written
_MARK = "MTP"  # in the names of all of vLLM's MTP architectures
_WITHOUT_US = "vLLM runs as without it"


def register_all() -> None:
    """Every class that fits the vLLM of this process; see `register`."""
    if os.environ.get(SWITCH, "") == "off":
        log.info("headstart: %s is off, so %s", SWITCH, _WITHOUT_US)
        return
    try:
        from vllm.version import __version__ as version

        reason = why_not(version)
        if reason:
            log.warning("headstart: the plugin stays out: %s. %s.", reason, _WITHOUT_US)
            return
        from vllm.model_executor.models.registry import ModelRegistry

        _register_drafts(ModelRegistry, version)
        _register_grafted(ModelRegistry, version)
    except Exception as error:  # a fork may lack anything
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        log.warning("headstart: the plugin cannot be used here (%s). %s.", said, _WITHOUT_US)


def class_name(architecture: str, version: str) -> str:
    """The name in classes.py. vLLM keeps what it learns of a class by name; another release's
    class is another one."""
    return f"{architecture}_of_{version.replace('.', '_').replace('+', '_')}"


def _register_drafts(registry: Any, version: str) -> None:
    from headstart.vllm_plugin.stock import remember

    # Also those that are not in our table: asked for a vocabulary they say that they have none.
    for architecture in [name for name in registry.models if _MARK in name]:
        known = registry.models[architecture]
        module = getattr(known, "module_name", "")
        if module.startswith("headstart."):
            continue  # ours already
        if not module:
            log.info("headstart: another plugin has replaced %s; it is left so", architecture)
            continue
        remember(architecture, module, known.class_name)
        registry.register_model(architecture, f"{_CLASSES}:{class_name(architecture, version)}")


def _register_grafted(registry: Any, version: str) -> None:
    from transformers import AutoConfig

    from headstart.vllm_plugin.head_config import HeadConfig
    from headstart.vllm_plugin.stock import remember

    AutoConfig.register(CONFIG_TYPE, HeadConfig, exist_ok=True)
    remember(GRAFTED, "headstart.vllm_plugin.grafted", "HeadstartMTP")
    registry.register_model(GRAFTED, f"{_CLASSES}:{class_name(GRAFTED, version)}")
