"""bf16 matrix products on CPUs that have no bf16 instructions.

There torch falls back to a scalar loop (measured on an AVX2 machine: 5 GFLOP/s against 31 in fp32), so a bf16 run on such a CPU would
be many times slower than it need be. The kernels here widen the operands to fp32, multiply, and round once at the end: the same
arithmetic as hardware bf16 with fp32 accumulation. GPUs, and CPUs with the instructions, are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARIES: list[torch.library.Library] = []  # registrations live as long as their Library object

_SHAPES: dict[str, Callable[..., tuple[int, ...]]] = {
    # operator: shape of its result
    "mm": lambda a, b: (a.shape[0], b.shape[1]),
    "bmm": lambda a, b: (a.shape[0], a.shape[1], b.shape[2]),
    "addmm": lambda bias, a, b: (a.shape[0], b.shape[1]),
    "baddbmm": lambda bias, a, b: (a.shape[0], a.shape[1], b.shape[2]),
}


def needed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this run computes bf16 on a CPU without bf16 instructions."""
    return (
        device.type == "cpu" and dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def widen_products() -> None:
    """Replace the CPU kernels of mm, bmm, addmm and baddbmm by ones that widen bf16 operands; other dtypes compute as before."""
    if _LIBRARIES:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel.*")
        for name, shape in _SHAPES.items():
            library.impl(name, _widened(getattr(torch.ops.aten, name).out, shape), "CPU")
    _LIBRARIES.append(library)


def _widened(out_variant: Any, shape: Callable[..., tuple[int, ...]]) -> Callable[..., Tensor]:
    """The operator through its `out` variant, which keeps torch's own kernel."""

    def kernel(*operands: Tensor, **scalars: Any) -> Tensor:
        dtype = operands[0].dtype
        alike = all(x.dtype is torch.bfloat16 for x in operands)  # mixed types stay torch's error
        wide = tuple(x.float() for x in operands) if alike else operands
        result = torch.empty(shape(*operands), dtype=wide[0].dtype)
        out_variant(*wide, **scalars, out=result)
        return result.to(dtype)

    return kernel
