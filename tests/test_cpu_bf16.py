"""The kernels replace torch's for the whole process, so each test looks at the answers of a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmds import cpu_bf16

ROOT = Path(__file__).resolve().parent.parent

CHILD = """
import sys, torch
from mmds import cpu_bf16

def run():
    dice = torch.Generator().manual_seed(0)
    rand = lambda *shape, dtype: torch.randint(-9, 9, shape, generator=dice).div(7).to(dtype)
    out = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        a, b, c = rand(5, 300, dtype=dtype), rand(300, 4, dtype=dtype), rand(5, 4, dtype=dtype)
        p, q, r = rand(3, 5, 300, dtype=dtype), rand(3, 300, 4, dtype=dtype), rand(3, 5, 4, dtype=dtype)
        out[dtype] = {
            "inputs": (a, b, c, p, q, r),
            "mm": a @ b,
            "mm transposed": b.t() @ a.t(),
            "mm empty": a[:0] @ b,
            "mm inner empty": a[:, :0] @ b[:0],
            "bmm": torch.bmm(p, q),
            "addmm": torch.addmm(c, a, b),
            "addmm scaled": torch.addmm(c, a, b, beta=0.5, alpha=2.0),
            "addmm row": torch.addmm(c[0], a, b),
            "addmm beta 0": torch.addmm(torch.full_like(c, torch.nan), a, b, beta=0),
            "baddbmm": torch.baddbmm(r, p, q),
            "baddbmm scaled": torch.baddbmm(r, p, q, beta=0.5, alpha=2.0),
            "einsum": torch.einsum("bij,bjk->bik", p, q),
            "linear": torch.nn.functional.linear(p, b.t(), c[0]),
        }
        leaves = [x.clone().requires_grad_() for x in (a, b, c)]
        torch.addmm(leaves[2], leaves[0], leaves[1]).sum().backward()
        out[dtype]["grads"] = [x.grad for x in leaves]
    out["int"] = torch.arange(6).reshape(2, 3) @ torch.arange(6).reshape(3, 2)
    try:
        torch.ones(2, 2, dtype=torch.bfloat16) @ torch.ones(2, 2)
        out["mixed"] = "computed"
    except RuntimeError:
        out["mixed"] = "refused"
    return out

before = run()
cpu_bf16.widen_products()
cpu_bf16.widen_products()
torch.save((before, run()), sys.argv[1])
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What products give before and after `widen_products`, called twice."""
    file = tmp_path_factory.mktemp("bf16") / "answers.pt"
    subprocess.run([sys.executable, "-W", "error", "-c", CHILD, str(file)], cwd=ROOT, check=True, timeout=120)
    before, after = torch.load(file)
    return before, after


def exact(name: str, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The product in fp32 of operands that were bf16, rounded once."""
    a, b, c, p, q, r = (x.float() for x in inputs)
    results = {
        "mm": lambda: a @ b,
        "mm transposed": lambda: b.t() @ a.t(),
        "mm empty": lambda: torch.zeros(0, 4),
        "mm inner empty": lambda: torch.zeros(5, 4),
        "bmm": lambda: torch.stack([x @ y for x, y in zip(p, q, strict=True)]),
        "addmm": lambda: a @ b + c,
        "addmm scaled": lambda: 2 * (a @ b) + 0.5 * c,
        "addmm row": lambda: a @ b + c[0],
        "addmm beta 0": lambda: a @ b,
        "baddbmm": lambda: torch.stack([x @ y + z for x, y, z in zip(p, q, r, strict=True)]),
        "baddbmm scaled": lambda: torch.stack(
            [2 * (x @ y) + 0.5 * z for x, y, z in zip(p, q, r, strict=True)]
        ),
        "einsum": lambda: torch.stack([x @ y for x, y in zip(p, q, strict=True)]),
        "linear": lambda: torch.stack([x @ b + c[0] for x in p]),
    }
    return results[name]()


PRODUCTS = [
    "mm",
    "mm transposed",
    "mm empty",
    "mm inner empty",
    "bmm",
    "addmm",
    "addmm scaled",
    "addmm row",
    "addmm beta 0",
    "baddbmm",
    "baddbmm scaled",
    "einsum",
    "linear",
]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_bf16_product_is_the_fp32_product_rounded_once(answers: Any, name: str) -> None:
    _, after = answers
    wide = exact(name, after[torch.bfloat16]["inputs"])
    got = after[torch.bfloat16][name]
    assert got.dtype is torch.bfloat16
    assert got.shape == wide.shape
    assert bool(((got.float() - wide).abs() <= 2**-8 * wide.abs() + 1e-5).all())


def test_gradients_of_a_bf16_product_are_bf16_and_right(answers: Any) -> None:
    _, after = answers
    a, b, *_ = (x.float() for x in after[torch.bfloat16]["inputs"])
    ones = torch.ones(5, 4)
    for got, wide in zip(after[torch.bfloat16]["grads"], (ones @ b.t(), a.t() @ ones, ones), strict=True):
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_float_types_compute_bit_for_bit_as_before(answers: Any, dtype: torch.dtype) -> None:
    before, after = answers
    for name in PRODUCTS:
        assert after[dtype][name].dtype is dtype
        assert torch.equal(after[dtype][name], before[dtype][name]), name
    for a, b in zip(after[dtype]["grads"], before[dtype]["grads"], strict=True):
        assert torch.equal(a, b)


def test_integers_compute_and_mixed_types_are_refused_as_before(answers: Any) -> None:
    before, after = answers
    assert torch.equal(after["int"], before["int"])
    assert after["mixed"] == before["mixed"] == "refused"


def test_only_bf16_on_a_cpu_can_need_it() -> None:
    assert not cpu_bf16.needed(torch.device("cpu"), torch.float32)
    assert not cpu_bf16.needed(torch.device("cuda"), torch.bfloat16)
    has_instructions = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    assert cpu_bf16.needed(torch.device("cpu"), torch.bfloat16) is not has_instructions
