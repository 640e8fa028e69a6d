"""What the engine tests share: checkpoints whose heads agree with their trunk now and then, engines
with little memory, and the checks that keep a dead head from passing."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headstart.calibrate.tensors import LIVELY, Disturbance
from headstart.checkpoint.config import Config
from headstart.engine.engine import Engine
from headstart.engine.output import Result
from headstart.families.registry import GRAFTED_AS
from headstart.sampling.params import SamplingParams
from support.head_edits import edited, graft, tensors
from support.tiny_fixture import Tiny

SIZES: dict[str, Any] = {
    "hidden_size": 128, "vocab_size": 64, "head_dim": 16, "intermediate_size": 64,
    "num_hidden_layers": 2,
}  # fmt: skip
VOCAB = SIZES["vocab_size"]
AGREEING: dict[str, Any] = {"rate": 0.9, "seed": 1, "dtype": "F32", **SIZES}
FAMILIES = ("mimo", "qwen3", "llama", "qwen2")
# of models with recurrent layers: one such layer, one that attends
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}  # fmt: skip
# of models with latent attention: an entry takes as much as K and V of the others
LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 48, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "n_group": 2, "topk_group": 1,
}  # fmt: skip
# and where rows see a choice of entries only
SPARSE: dict[str, Any] = {
    **LATENT, "kv_lora_rank": 32, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
# of MiMo-V2, as transformers would make it of the rest
MIMO_V2: dict[str, Any] = {
    "head_dim": 24, "v_head_dim": 8, "swa_head_dim": 24, "swa_v_head_dim": 8,
    "num_key_value_heads": 1, "swa_num_key_value_heads": 2, "sliding_window_size": 6,
    "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-6, "rope_theta": 5e6,
}  # fmt: skip
STEP: dict[str, Any] = {
    "layer_types": ["full_attention"] + ["sliding_attention"] * 4, "moe_layers_enum": "1",
    "sliding_window": 7, "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6,
        "num_attention_groups": 2, "head_dim": 16,
    },
    "rope_theta": [5e6, 1e4, 1e4, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0],
    "moe_router_scaling_factor": 1.5,
}  # fmt: skip
# of Nemotron-H: one layer of each kind, the last one recurrent
NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": 5, "hybrid_override_pattern": "M*E-M", "mamba_num_heads": 4,
    "mamba_head_dim": 12, "ssm_state_size": 16, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    # transformers cuts off time steps below it in prompts, and not where it decodes
    "time_step_min": 1e-30,
    # squares are larger than what gates leave
    "disturbance": Disturbance(LIVELY.trunk, 1.0),
}  # fmt: skip
LING: dict[str, Any] = {
    "layer_group_size": 2, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "kv_lora_rank": 32, "n_group": 2, "topk_group": 1,
    "expert_swiglu_limit_list": [0, 0.2], "share_expert_swiglu_limit_list": [0, 0.3],
}  # fmt: skip
EXAONE: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
}  # fmt: skip
MELLUM: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
    "sliding_window": 6,
}  # fmt: skip
# of models with several residual streams
HY_V4: dict[str, Any] = {
    **SPARSE, "n_group": 1, "indexer_types": ["full", "shared"], "swiglu_limit": 1.0, "hc_mult": 2,
    "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
GLM5_NEXT: dict[str, Any] = {
    **SPARSE, "n_group": 1, "qk_rope_head_dim": 0, "head_dim": 0, "hc_mult": 2,
    "layer_types": ["linear_attention", "indexed_attention"], "index_kpool": 4,
    "mlp_layer_types": ["dense", "sparse"], "linear_num_heads": 2, "linear_head_dim": 12,
    "swiglu_limit": 1.0, "max_position_embeddings": 1024,
}  # fmt: skip
QWEN4_EXP: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"], "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 8,
    "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "ple_layer_ids": [1], "ple_embed_dim": 16, "ngram_vocab_size_base": 50, "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "ple_conv_kernel_size": 4,
    "ngram_size": 3,
}  # fmt: skip
DEEPSEEK_V4: dict[str, Any] = {
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 3},
    "compress_ratios": None, "num_hash_layers": 1, "num_key_value_heads": 1, "head_dim": 16,
    "q_lora_rank": 24, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 12, "hc_mult": 2,
    "sliding_window": 6, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 2,
    "swiglu_limit": 1.0,
}  # fmt: skip
_LATENT = ("deepseek_v3", "glm4_moe_lite")
_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_LAYER_BYTES = 2 * 2 * 16 * 8  # of a token: K and V, heads, head_dim, float64
_STATE_BYTES = 128 * 8


def checkpoint(tiny: Tiny, family: str = "mimo", **changes: Any) -> Path:
    """A small model with a head; llama and qwen2 get theirs by grafting."""
    if family in _HYBRIDS:
        changes = {**HYBRID, **changes}
    if family in _LATENT:
        changes = {**LATENT, **changes}
    several = {
        "mimo_v2": MIMO_V2, "step3p5": STEP, "nemotron_h": NEMOTRON, "mellum": MELLUM,
        "exaone4_5": EXAONE,
        "exaone_moe": {**EXAONE, "mlp_layer_types": ["dense", "sparse"], "sliding_windows": [7, 0]},
        "deepseek_v32": SPARSE, "hy_v4": HY_V4, "glm5_next": GLM5_NEXT, "qwen4_exp": QWEN4_EXP,
        "bailing_moe_v3": LING, "deepseek_v4": DEEPSEEK_V4,
        "glm_moe_dsa": {**SPARSE, "indexer_types": ["full", "shared"]},
    }  # fmt: skip
    changes = {**several.get(family, {}), **changes}
    if family not in GRAFTED_AS:
        return tiny(family, **{**AGREEING, **changes})
    plain = tiny(family, **{**AGREEING, **changes}, with_head=False)
    out = plain.parent / f"{plain.name}-grafted"
    if out.exists():
        return out
    fresh = graft(plain, plain.parent / f"{plain.name}-fresh")
    # A fresh head agrees by chance only. The trunk is built like mimo's, so mimo's head fits it.
    donor = tensors(tiny("mimo", **AGREEING))

    def give(own: dict[str, torch.Tensor]) -> None:
        own.update({name: value for name, value in donor.items() if "mtp_layers" in name})

    return edited(fresh, out, change=give)


def soft(tiny: Tiny, family: str = "mimo", **changes: Any) -> Path:
    """The same with flatter logits: at temperature 1 a sample is not simply the best token."""
    folder = checkpoint(tiny, family, **changes)
    out = folder.parent / f"{folder.name}-soft"

    def flatten(own: dict[str, torch.Tensor]) -> None:
        own["lm_head.weight" if "lm_head.weight" in own else "head.weight"] *= 0.4

    return out if out.exists() else edited(folder, out, change=flatten)


def start(folder: Path, *, slots: int = 1200, topology: Any = None, **settings: Any) -> Engine:
    """An fp64 engine with K/V memory for about `slots` tokens."""
    size = settings.setdefault("block_size", 4)
    fields = Config(json.loads((folder / "config.json").read_text())).fields
    usual = 3 if fields["model_type"].startswith("mimo_v2") else 1
    modules = fields.get("num_nextn_predict_layers", usual) if settings.get("speculate") != 0 else 0
    block = size * _LAYER_BYTES * (fields["num_hidden_layers"] + modules) + modules * _STATE_BYTES
    memory = max(1, slots // size) * block
    options = {"dtype": "float64", "device": "cpu", "kv_bytes": memory, **settings}
    engine = Engine(folder, **options)
    if topology is not None and engine.model.head is not None:
        engine.model.head.layout = replace(engine.model.head.layout, topology=topology)
    return engine


def run(
    engine: Engine, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams],
    **options: Any,
) -> list[Result]:  # fmt: skip
    """Answer all prompts together, checking the books after every step."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.add(p, s, **options) for p, s in zip(prompts, each, strict=True)]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.pool.num_used == 0
    return [engine.collect(request_id) for request_id in ids]


def ids_of(results: Sequence[Result]) -> list[list[int]]:
    return [output.token_ids for result in results for output in result.outputs]


def assert_head_is_alive(results: Sequence[Result]) -> None:
    seen = {origin for r in results for output in r.outputs for origin in output.origins}
    assert seen - {"copied"} == {"accepted", "recovered", "bonus"}, (
        f"only {seen}: the head proves nothing"
    )


def make_prompts(count: int = 10, seed: int = 0) -> list[list[int]]:
    """Prompts of many lengths that share a beginning, one twice, one of a single token."""
    draw = random.Random(seed)
    shared = [draw.randrange(2, VOCAB) for _ in range(13)]
    prompts = [
        shared[: draw.choice([5, 13, 13])] + [draw.randrange(2, VOCAB) for _ in range(length)]
        for length in (1, 2, 3, 5, 8, 12, 17, 4, 9)[: count - 1]
    ]
    return [*prompts[:-1], prompts[0], [7], prompts[-1]][:count]


def greedy(max_tokens: int = 20, **fields: Any) -> SamplingParams:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, **fields}
    return SamplingParams(**fields)


def transformers_model(folder: Path) -> Any:
    """Transformers' own model in fp64, without a head; mimo runs as the Qwen2 that it is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads((folder / "config.json").read_text())
    kind = {"mimo": "qwen2"}.get(fields["model_type"], fields["model_type"])
    dropped = ("model_type", "auto_map", "architectures", "torch_dtype")
    config = AutoConfig.for_model(kind, **{n: v for n, v in fields.items() if n not in dropped})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    state = {n: v.double() for n, v in tensors(folder).items() if "mtp" not in n}
    model.load_state_dict(state)
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    return model


def published_model(folder: Path) -> Any:
    """The same, where transformers reads the folder as it is and leaves the head unread."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it tells about every tensor of the head
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None
    return model


class GreedyTexts:
    """What a model of transformers writes greedily.

    A text is that one if a single pass over all of it would choose each of its tokens. Only where
    it is another one does transformers generate, which takes a pass for every token.
    """

    def __init__(self, model: Any):
        self._model = model
        self._known: dict[tuple[int, ...], list[int]] = {}

    def like(
        self, texts: Sequence[list[int]], prompts: Sequence[list[int]], count: int
    ) -> list[list[int]]:
        """Its own texts of `count` tokens, which these must have, too."""
        lengths = [len(text) for text in texts]
        assert lengths == [count] * len(texts), f"{lengths} tokens, not {count} each"
        return [self._text(tuple(p), text) for p, text in zip(prompts, texts, strict=True)]

    def _text(self, prompt: tuple[int, ...], text: list[int]) -> list[int]:
        if prompt not in self._known:
            ids = torch.tensor([[*prompt, *text]])
            with torch.inference_mode():
                logits = self._model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            is_own = logits.argmax(-1).tolist() == text
            self._known[prompt] = text if is_own else self._generated(prompt, len(text))
        return self._known[prompt]

    def _generated(self, prompt: tuple[int, ...], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        made = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        return list(made[0, len(prompt) :].tolist())


PROMPT = make_prompts()[3]


def seeded(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 5, "max_tokens": 24, "ignore_eos": True, **fields})
