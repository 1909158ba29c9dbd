"""Dimensions and byte counts of the MLA latent cache: the one place they are written down.

An MLA layer (DeepSeek-V2/V3, LongCat-Flash) caches one latent row per token, shared by all heads: a content
part c_KV of ``KV_LORA_RANK`` values and a decoupled RoPE key k_R of ``QK_ROPE_HEAD_DIM`` values. In absorbed
decoding a query is ``QK_HEAD_DIM`` wide and the values are the content part itself.

SnapMLA keeps the content in e4m3 with one float32 scale per token and the RoPE part in BF16, divided by that
scale (paper, Eq 6). A page holds ``PAGE_SIZE`` tokens as three planes, one after another:

    offset 0       content  [64, 512] e4m3     32768 bytes
    offset 32768   rope     [64, 64]  bfloat16  8192 bytes
    offset 40960   scale    [64]      float32    256 bytes
"""

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_HEAD_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
PAGE_SIZE = 64
"""Tokens in a page, as in FlashMLA."""

MAX_HEADS = 128
MAX_QUERIES = 8
"""Largest ``heads`` and ``s_q`` of one decode call."""

CONTENT_BYTES = KV_LORA_RANK  # e4m3
ROPE_BYTES = QK_ROPE_HEAD_DIM * 2  # bfloat16
SCALE_BYTES = 4  # float32
BYTES_PER_TOKEN = CONTENT_BYTES + ROPE_BYTES + SCALE_BYTES
"""SnapMLA's cache, per token and layer."""
BF16_BYTES_PER_TOKEN = QK_HEAD_DIM * 2
"""The BF16 cache it replaces, per token and layer."""

CONTENT_OFFSET = 0
ROPE_OFFSET = CONTENT_OFFSET + PAGE_SIZE * CONTENT_BYTES
SCALE_OFFSET = ROPE_OFFSET + PAGE_SIZE * ROPE_BYTES
PAGE_BYTES = PAGE_SIZE * BYTES_PER_TOKEN

FLOPS_PER_QUERY_KEY = 2 * (QK_HEAD_DIM + KV_LORA_RANK)
"""Operations per (head, query, key): a 576-wide dot product and a 512-wide accumulation."""
