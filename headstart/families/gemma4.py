"""Gemma 4 assistants: a drafter in a checkpoint of its own, reading the target's KV cache.

There is no head inside the target, so nothing can be exported from it or stitched into it; the
names below serve to recognise an assistant.
"""

from __future__ import annotations

from headstart.families.base import Family, HeadLayout, parts
from headstart.families.names import KeyMap

ASSISTANT = Family(
    name="gemma4_assistant",
    title="Gemma 4 assistants",
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    architectures=("Gemma4AssistantForCausalLM",),
    count_field=None,
    # The layers, the norm and the small embedding have the names of a trunk and are left alone.
    keys=KeyMap(
        {
            "pre_projection.{rest}": "modules.0.fuse.{rest}",
            "post_projection.{rest}": "modules.0.post_projection.{rest}",
            "masked_embedding.{rest}": "modules.0.masked_embedding.{rest}",
        }
    ),
    # No head norms; the embedding is scaled by the root of the target's hidden size.
    layout=HeadLayout(shares=("embed_tokens",)),
    head=parts("""
        fuse.weight              hidden            2*target_hidden
        post_projection.weight   target_hidden     hidden
        masked_embedding.centroids.weight   num_centroids   hidden   if use_ordered_embeddings
        masked_embedding.token_ordering     vocab            if use_ordered_embeddings
    """),
    kv_elements="0",
    served={
        "vllm": "0.21.0 the assistant is the draft of a Gemma 4 model",
        "sglang": "0.5.12 the assistant is the draft of a Gemma 4 model",
        "trtllm": "1.3.0rc20 the assistant is the draft of a Gemma 4 model",
    },
    lacks="attention over the K/V of another model",
    notes=(
        "llama.cpp drafts with it from b9549 on",
        "a separate checkpoint: it cannot be exported from the target nor stitched into it",
        "attention has queries only, over the target's KV cache; positions stay while drafting",
        "the next depth receives the output of post_projection",
        "the LM head is small and tied to the assistant's own embedding",
    ),
)
