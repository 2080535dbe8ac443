from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from mmds.model.attention import ROWS, SEQUENCE, register_backends, rows_attention, sequence_attention
from mmds.model.decoder import Decoder
from tests.model.families import gap, random_samples, stock_model


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention written out in fp64: [1, H, T, D] and [1, G, T, D] -> [1, T, H, D]."""
    q, k, v = (x.double() for x in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    distance = positions[:, None] - positions[None, :]
    seen = (segments[:, None] == segments[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


def operands(
    lengths: tuple[int, ...], *, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], dict[str, Any]]:
    """Random q, k, v of a row; the backend's boundary arguments; the reference's segment and position arguments."""
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(1, n, total, 8).mul(2).to(dtype) for n in (heads, groups, groups))
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ours = {"cu_seq_lens_q": bounds, "max_length_q": max(lengths)}
    return (q, k, v), ours, {"segments": segments, "positions": torch.arange(total)}


@pytest.mark.parametrize("window", [None, 1, 2, 5, 9, 100])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rows_equal_masked_attention_written_out(groups: int, window: int | None) -> None:
    qkv, ours, theirs = operands((5, 1, 9, 3), groups=groups)
    out, weights = rows_attention(nn.Module(), *qkv, None, scaling=0.3, sliding_window=window, **ours)
    assert weights is None
    assert gap(out, dense(*qkv, scale=0.3, window=window, **theirs)) < 1e-6


def test_the_default_scale_is_one_over_the_root_of_the_head_size() -> None:
    qkv, ours, theirs = operands((6, 2))
    assert (
        gap(rows_attention(nn.Module(), *qkv, None, **ours)[0], dense(*qkv, scale=8**-0.5, **theirs)) < 1e-6
    )


def test_bf16_on_a_cpu_is_rounded_once_at_the_end() -> None:
    qkv, ours, theirs = operands((5, 9), dtype=torch.bfloat16)
    out, _ = rows_attention(nn.Module(), *qkv, None, **ours)
    exact = dense(*qkv, scale=8**-0.5, **theirs)
    assert out.dtype is torch.bfloat16
    assert bool(((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all())


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operator returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("window", [None, 3])
def test_no_tensor_of_row_length_squared_is_ever_made(window: int | None) -> None:
    qkv, ours, _ = operands((8,) * 64)
    row = 8 * 64
    with _Largest() as largest:
        rows_attention(nn.Module(), *qkv, None, sliding_window=window, **ours)
    assert 0 < largest.numel <= qkv[0].numel() < row**2


@pytest.mark.parametrize("queries", [1, 3, 11])
@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_a_sequence_with_cached_keys_equals_the_end_of_the_whole_sequence(
    queries: int, window: int | None
) -> None:
    (q, k, v), _, theirs = operands((11,))
    whole = dense(q, k, v, scale=0.5, window=window, **theirs)
    out, _ = sequence_attention(
        nn.Module(), q[:, :, -queries:], k, v, None, scaling=0.5, sliding_window=window
    )
    assert gap(out, whole[:, -queries:]) < 1e-6


@pytest.mark.parametrize("backend", [rows_attention, sequence_attention])
@pytest.mark.parametrize(
    "extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"head_mask": torch.ones(4)}, {"invented": 1}]
)
def test_an_argument_that_is_not_honoured_is_refused_by_name(backend: Any, extra: dict[str, Any]) -> None:
    qkv, ours, _ = operands((4, 3))
    with pytest.raises(ValueError, match=f"Linear passes .* {next(iter(extra))}"):
        backend(nn.Linear(1, 1), *qkv, None, **ours, **extra)
    backend(nn.Linear(1, 1), *qkv, None, **ours, **dict.fromkeys(extra))  # None asks for nothing


@pytest.mark.parametrize("backend", [rows_attention, sequence_attention])
def test_any_mask_is_refused(backend: Any) -> None:
    qkv, ours, _ = operands((4, 3))
    with pytest.raises(ValueError, match="mask"):
        backend(nn.Module(), *qkv, torch.ones(1, 7), **ours)


@pytest.mark.parametrize("backend", [rows_attention, sequence_attention])
def test_a_module_that_is_not_causal_is_refused(backend: Any) -> None:
    qkv, ours, _ = operands((4, 3))
    module = nn.Module()
    module.is_causal = False
    with pytest.raises(ValueError, match="not causal"):
        backend(module, *qkv, None, **ours)


def test_rows_without_boundaries_are_refused_also_deep_inside_transformers() -> None:
    qkv, ours, _ = operands((4, 3))
    for name in ours:
        with pytest.raises(ValueError, match="boundaries"):
            rows_attention(nn.Module(), *qkv, None, **{**ours, name: None})
    llm = Decoder(stock_model("llama")).llm
    with pytest.raises(ValueError, match="boundaries"):
        llm(input_ids=random_samples((7,))[0][None], use_cache=False)


def test_rows_refuse_a_batch_and_cached_keys() -> None:
    (q, k, v), ours, _ = operands((4, 3))
    with pytest.raises(ValueError, match="one row without a cache"):
        rows_attention(nn.Module(), q[:, :, -1:], k, v, None, **ours)
    with pytest.raises(ValueError, match="one row without a cache"):
        rows_attention(nn.Module(), *(x.repeat(2, 1, 1, 1) for x in (q, k, v)), None, **ours)
    with pytest.raises(ValueError, match="one sequence"):
        sequence_attention(nn.Module(), *(x.repeat(2, 1, 1, 1) for x in (q, k, v)), None)


def test_both_backends_are_registered_with_transformers_and_registering_again_restores_them() -> None:
    register_backends(rows=sequence_attention)
    assert AttentionInterface()[ROWS] is sequence_attention
    register_backends()
    assert AttentionInterface()[ROWS] is rows_attention
    assert AttentionInterface()[SEQUENCE] is sequence_attention


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 4])
def test_the_variable_length_kernel_equals_attention_written_out(window: int | None) -> None:
    qkv, ours, theirs = operands((5, 1, 90, 3), dtype=torch.bfloat16)
    padded = [nn.functional.pad(x, (0, 56)).cuda() for x in qkv]
    bounds = {**ours, "cu_seq_lens_q": ours["cu_seq_lens_q"].cuda()}
    out, _ = rows_attention(nn.Module(), *padded, None, scaling=0.3, sliding_window=window, **bounds)
    exact = dense(*qkv, scale=0.3, window=window, **theirs)
    assert gap(out[..., :8].cpu(), exact) < 2e-2
