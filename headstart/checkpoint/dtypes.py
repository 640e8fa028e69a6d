"""How many bytes a tensor takes: plain dtypes by bits, block types of GGUF by blocks.

F32, F16, BF16 and the integers are called alike in safetensors and in GGUF; no other name is in
both.
"""

from __future__ import annotations

from math import prod

# Bits, because the newest dtypes pack two or more elements into a byte.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# type -> its number in GGUF, values of a block, bytes of a block
GGUF_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8),
    "I8": (24, 1, 1), "I16": (25, 1, 2), "I32": (26, 1, 4), "I64": (27, 1, 8),
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66), "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50), "IQ4_NL": (20, 32, 18), "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82), "IQ4_XS": (23, 256, 136), "IQ1_M": (29, 256, 56),
    "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66), "MXFP4": (39, 32, 17),
    "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18),
}  # fmt: skip
BLOCK_TYPES = frozenset(GGUF_TYPES) - frozenset(DTYPE_BITS)  # several values in a block


def byte_size(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of this dtype and shape takes; KeyError for an unknown dtype."""
    if dtype in DTYPE_BITS:
        return (prod(shape) * DTYPE_BITS[dtype] + 7) // 8
    _, values, num_bytes = GGUF_TYPES[dtype]
    return prod(shape) // values * num_bytes
