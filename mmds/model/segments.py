"""Attention inside segments of one packed sequence, for encoders and connectors: an image never sees another image.

`Segments` is passed where a tower expects an attention mask. Towers hand their mask on to torch's scaled_dot_product_attention,
which asks an argument of a foreign type what to do (`__torch_function__`, as torch's own `CausalBias` is asked); so every
attention class that takes a mask works, and none needs to be written again. Memory and time grow with the sum of squared lengths:
no T x T mask exists at any time. Shapes: B = 1, H heads, T tokens, S segments, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rotation = Callable[[Tensor], Tensor]
"""[1, H, T, D] -> the same, rotated by the place of each token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Lengths of the images in a packed sequence, in place of an attention mask.

    lengths: tokens of each segment, S of them. rotate: of queries and keys before attention, or None.
    """

    lengths: tuple[int, ...]
    rotate: Rotation | None = None

    def to(self, *_: Any, **__: Any) -> Segments:
        """Itself: open_clip casts masks to the queries' dtype."""
        return self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Scaled dot product attention inside the segments; any other function with a Segments is an error."""
        if function is not F.scaled_dot_product_attention:
            raise TypeError(f"{function} cannot take Segments: this attention is not torch's own fused one")
        return _attend(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Segments,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if is_causal or dropout_p or enable_gqa:
        raise ValueError(
            "packed images: causal attention, attention dropout and grouped keys are not supported in an encoder"
        )
    if attn_mask.rotate is not None:
        query, key = attn_mask.rotate(query).type_as(value), attn_mask.rotate(key).type_as(value)
    return segment_attention(query, key, value, attn_mask.lengths, attn_mask.lengths, scale=scale)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    scale: float | None = None,
) -> Tensor:
    """Segment i of the queries attends to segment i of the keys, both ways in time.

    query [1, H, Tq, D], key and value [1, H, Tk, D] -> [1, H, Tq, D]. query_lengths, key_lengths: S each, adding up to Tq and Tk;
    raises ValueError when they do not.
    """
    if (sum(query_lengths), sum(key_lengths)) != (query.shape[2], key.shape[2]) or query.shape[0] != 1:
        raise ValueError(
            f"segments of {sum(query_lengths)} queries and {sum(key_lengths)} keys do not cover {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, query_lengths, key_lengths, scale)
    dtype = query.dtype
    if query.device.type == "cpu" and dtype is torch.bfloat16:  # as in the decoder's attention
        query, key, value = query.float(), key.float(), value.float()
    outputs = [
        F.scaled_dot_product_attention(q, k, v, scale=scale)
        for q, k, v in zip(
            query.split(list(query_lengths), dim=2),
            key.split(list(key_lengths), dim=2),
            value.split(list(key_lengths), dim=2),
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).to(dtype)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float | None,
) -> Tensor:
    """torch's variable-length kernel: one call for all segments."""
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)
        for lengths in (query_lengths, key_lengths)
    )
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = varlen_attn(q, k, v, cu_q, cu_k, max(query_lengths), max(key_lengths), scale=scale)
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]
