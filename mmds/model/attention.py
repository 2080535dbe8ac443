"""Two attention backends for Hugging Face decoders: packed rows for training, one cached sequence for generation.

Shapes: B = 1, H = query heads, G = key/value heads, T = tokens of a row, S = segments of a row, D = head size.

Isolation of packed samples is a property of this code: `rows_attention` cuts queries, keys and values at the segment boundaries
that it is given and refuses to run without them. No T x T mask exists at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ROWS = "mmds_rows"
SEQUENCE = "mmds_sequence"

# Arguments that transformers passes to every backend and that change nothing here: bookkeeping of positions, caches and outputs.
_NEUTRAL = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
    "logits_to_keep",
    "num_items_in_batch",
    "layer_idx",
    "past_key_values",
    "inputs_embeds",
    "input_ids",
    "labels",
    "max_length_q",
    "max_length_k",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}


def register_backends(rows: Callable[..., tuple[Tensor, None]] | None = None) -> None:
    """Make both backends known to transformers as `mmds_rows` (or `rows` in its place) and `mmds_sequence`; repeatable."""
    AttentionInterface.register(ROWS, rows or rows_attention)
    AttentionInterface.register(SEQUENCE, sequence_attention)


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of a packed row.

    query [1, H, T, D], key and value [1, G, T, D]; cu_seq_lens_q int32 [S + 1] starts at 0 and ends at T. Returns
    [1, T, H, D]. Raises ValueError for a mask, missing boundaries, or an argument that it does not honour.
    """
    _refuse(module, attention_mask, rest)
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            "packed rows need segment boundaries (cu_seq_lens_q, max_length_q); without them samples would leak"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"packed rows are one row without a cache; got queries {tuple(query.shape)}, keys {tuple(key.shape)}"
        )
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, dropout, window), None
    lengths = cu_seq_lens_q.diff().tolist()
    pieces = zip(
        query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True
    )
    outputs = [_causal(q, k, v, scaling, dropout, window) for q, k, v in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def sequence_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one unpacked sequence whose last Tq tokens are queries and whose Tk >= Tq tokens are cached keys.

    query [1, H, Tq, D], key and value [1, G, Tk, D]. Returns [1, Tq, H, D]. Raises ValueError as `rows_attention` does.
    """
    _refuse(module, attention_mask, rest)
    if query.shape[0] != 1:
        raise ValueError(f"generation runs one sequence at a time, got a batch of {query.shape[0]}")
    window = sliding_window if sliding_window is not None and sliding_window < key.shape[2] else None
    return _causal(query, key, value, scaling, dropout, window).transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, attention_mask: Tensor | None, rest: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(
            "an attention mask was given; mmds isolates samples by segment boundaries and takes no mask"
        )
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{type(module).__name__} is not causal; mmds trains causal decoders")
    unknown = sorted(name for name, value in rest.items() if value is not None and name not in _NEUTRAL)
    if unknown:
        raise ValueError(
            f"{type(module).__name__} passes attention arguments that mmds does not honour: {', '.join(unknown)}; "
            "use a decoder family without them"
        )


def _causal(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    """SDPA with the last query aligned to the last key; `window` counts the keys that a query sees, itself included."""
    queries, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    mask = None
    if window is not None or (1 < queries < keys):
        offset = (
            torch.arange(keys - queries, keys, device=q.device)[:, None]
            - torch.arange(keys, device=q.device)[None, :]
        )
        mask = offset >= 0
        if window is not None:
            mask &= offset < window
    dtype = q.dtype
    if (
        q.device.type == "cpu" and dtype is torch.bfloat16
    ):  # as a GPU accumulates; and far faster than the CPU's own bf16
        q, k, v = q.float(), k.float(), v.float()
    causal = mask is None and queries > 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    ).to(dtype)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    longest: int,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """torch's variable-length kernel: one call for all segments of the row, causal by its window (-1, 0)."""
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError(
            "attention dropout is not supported in packed rows on CUDA; set attention_dropout to 0 in the decoder"
        )
    left = -1 if window is None else window - 1
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(
        q_THD, k_TGD, v_TGD, cu, cu, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=grouped
    )
    assert isinstance(out, Tensor)
    return out[None]


register_backends()
