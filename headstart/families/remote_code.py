"""Config classes that a checkpoint must bring along because transformers does not have them."""

from __future__ import annotations

MIMO_AUTO_MAP = {"AutoConfig": "configuration_mimo.MiMoConfig"}

_CONFIGURATION_MIMO = '''\
"""The config of MiMo: Qwen2's, plus how many prediction heads follow the layers."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, num_nextn_predict_layers: int = 1, **fields):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(**fields)
'''


def mimo_remote_code() -> dict[str, str]:
    """Files that go beside the config of a MiMo checkpoint, whose `auto_map` names them."""
    return {"configuration_mimo.py": _CONFIGURATION_MIMO}
