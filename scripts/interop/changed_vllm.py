"""A folder for PYTHONPATH whose file Python runs when it starts: it changes one module of vLLM's.

vLLM's own files stay as they are, and every process that it starts is changed alike.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

_STARTED = '''import importlib.util
import sys


class Changed:
    """Lets Python find the module itself, and changes it when it has been loaded."""

    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def changed(module):
            load(module)
{change}

        spec.loader.exec_module = changed
        return spec


sys.meta_path.insert(0, Changed())
'''
# vLLM's connector of states asks for pinned memory and for events that can be asked, of which its
# CPU build has neither: copies there are done when the call returns.
STATES_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
WITHOUT_GPU = """
import torch

class Event:
    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...
    def query(self): return True

class Cuda:
    def __getattr__(self, name): return getattr(torch.cuda, name)

class Torch:
    cuda = Cuda()
    def __getattr__(self, name): return getattr(torch, name)
    def empty_like(self, *args, pin_memory=False, **kwargs):
        return torch.empty_like(*args, **kwargs)

Torch.cuda.Event = Event
module.torch = Torch()
"""


def changing(module: str, change: str, folder: Path) -> Path:
    """`change` is code that has the loaded `module` under that name."""
    folder.mkdir(parents=True)
    body = textwrap.indent(change.strip("\n"), " " * 12)
    (folder / "sitecustomize.py").write_text(_STARTED.format(module=module, change=body))
    return folder
