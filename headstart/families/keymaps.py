"""The name classes in which checkpoints store heads (docs/checkpoint-format.md, part 1)."""

from __future__ import annotations

from headstart.families.names import KeyMap


def appended_layer(
    *,
    roots: tuple[str, ...] = ("",),
    out_norm: str = "shared_head.norm",
    lm_head: str = "shared_head.head",
    layers: str = "model.layers.",
    embed: str = "",
) -> KeyMap:
    """Class A: the head is layer num_hidden_layers + i, its extras inside that layer.

    `embed` is the full name of the embedding where it lies outside the layer (one module only).
    """
    at = layers + "{layer}."
    embeds = {at + "embed_tokens.{rest}": "modules.{module}.embed_tokens.{rest}"}
    if embed:
        embeds = {embed + ".{rest}": "modules.0.embed_tokens.{rest}"}
    return KeyMap(
        {
            **embeds,
            at + "enorm.{rest}": "modules.{module}.embed_norm.{rest}",
            at + "hnorm.{rest}": "modules.{module}.hidden_norm.{rest}",
            at + "eh_proj.{rest}": "modules.{module}.fuse.{rest}",
            at + out_norm + ".{rest}": "modules.{module}.out_norm.{rest}",
            at + lm_head + ".{rest}": "modules.{module}.lm_head.{rest}",
            at + "{rest}": "modules.{module}.block.{rest}",
        },
        roots,
    )


def qwen_style(roots: tuple[str, ...] = ("", "model.")) -> KeyMap:
    """Class B: `mtp.fc`, `mtp.norm`, two `mtp.pre_fc_norm_*` and `mtp.layers.{i}`.

    vLLM and SGLang take names that begin with `mtp.`; some trainers save `model.mtp.` instead.
    """
    return KeyMap(
        {
            "mtp.pre_fc_norm_embedding.{rest}": "modules.0.embed_norm.{rest}",
            "mtp.pre_fc_norm_hidden.{rest}": "modules.0.hidden_norm.{rest}",
            "mtp.fc.{rest}": "modules.0.fuse.{rest}",
            "mtp.norm.{rest}": "modules.0.out_norm.{rest}",
            "mtp.layers.{module}.{rest}": "modules.{module}.block.{rest}",
        },
        roots,
        unread=("model.",),
    )


def mtp_layers(
    prefix: str,
    *,
    embed_norm: str = "enorm",
    hidden_norm: str = "hnorm",
    fuse: str = "eh_proj",
    out_norm: str = "final_layernorm",
    block: str = "",
    shared: dict[str, str] | None = None,
    roots: tuple[str, ...] = ("",),
    respelled: dict[str, str] | None = None,
) -> KeyMap:
    """Classes C and D: `<prefix>{i}.` with fusion tensors and block tensors side by side.

    `shared` maps what lies outside the modules; `out_norm` is empty where the norm does.
    """
    at = prefix + "{module}."
    norms = {at + out_norm + ".{rest}": "modules.{module}.out_norm.{rest}"} if out_norm else {}
    return KeyMap(
        {
            **(shared or {}),
            **norms,
            at + embed_norm + ".{rest}": "modules.{module}.embed_norm.{rest}",
            at + hidden_norm + ".{rest}": "modules.{module}.hidden_norm.{rest}",
            at + fuse + ".{rest}": "modules.{module}.fuse.{rest}",
            at + block + "{rest}": "modules.{module}.block.{rest}",
        },
        roots,
        respelled=respelled,
    )
