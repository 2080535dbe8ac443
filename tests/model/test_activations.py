"""Bytes that autograd keeps of real packed rows in bf16, part by part, against `mmds.memory`.

Attention is stood in for by a function that keeps what a variable-length kernel keeps: queries, keys, values, output, one fp32 number
per head and token. (The CPU's own keeps fp32 copies.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn

from mmds.config_types import RecomputeSection
from mmds.engine.assemble import set_recompute
from mmds.memory import activation_bytes
from mmds.model import segments
from mmds.model.attention import register_backends
from mmds.model.mllm import encode
from mmds.model.recompute import non_reentrant
from tests.model.test_shapes import MODES, TRAININGS, Net, experts, make_encoder, own_linear, qwen2, towers

__all__ = ["own_linear", "towers"]


class Kernel(torch.autograd.Function):
    """Keeps what a kernel keeps; what it computes is nothing."""

    @staticmethod
    def forward(ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        out = torch.zeros_like(q_THD)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out, torch.zeros(q_THD.shape[1], q_THD.shape[0]))
        return out


def run_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[1, H, T, D] each -> [T, H, D]."""
    out: Tensor = Kernel.apply(*(x[0].transpose(0, 1) for x in (q, k, v)))
    return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        segments, "segment_attention", lambda q, k, v, *_, **__: run_kernel(q, k, v).transpose(0, 1)[None]
    )
    register_backends(lambda _, q, k, v, *__, **___: (run_kernel(q, k, v)[None], None))
    yield
    register_backends()


def kept_bytes(net: Net) -> dict[str, int]:
    """Bytes that autograd keeps of one forward pass by part, weights left out; what the loss keeps is "loss"."""
    modules = (net.mllm, net.encoder)
    weights = {t.untyped_storage().data_ptr() for m in modules for t in (*m.parameters(), *m.buffers())}
    part, kept = ["loss"], dict[int, tuple[str, Tensor]]()

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept.setdefault(address, (part[-1], tensor))
        return tensor

    def watch(module: nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda *_: part.append(name))
        module.register_forward_hook(lambda *_: part.pop() and None)

    for name in ("encoder", "connector", "decoder"):
        if isinstance(module := getattr(net.mllm, name), nn.Module):
            watch(module, name)
    features = None if net.training.encoder else encode(net.encoder, net.row).detach()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net.mllm(net.row, features)[0]
    totals = dict.fromkeys(("encoder", "connector", "decoder", "loss"), 0)
    for name, tensor in kept.values():
        totals[name] += tensor.untyped_storage().nbytes()
    del loss
    return totals


CASES = [
    ("trained", "mlp2x", False),
    ("trained", "merge_mlp", True),
    ("align", "mlp2x", False),
    ("frozen", "mlp2x", True),
]


@pytest.mark.parametrize(("stage", "connector", "recomputes"), CASES)
def test_kept_bytes_are_as_predicted(
    stage: str, connector: str, recomputes: bool, towers: Any, kernel: None
) -> None:
    net = Net(
        make_encoder(towers, "open_clip ViT"),
        qwen2(),
        TRAININGS[stage],
        connector=connector,
        resolution=MODES["native"],
    )
    net.mllm.to(torch.bfloat16)
    net.encoder.to(torch.bfloat16)
    recompute = RecomputeSection(encoder=2, connector=1, decoder=2) if recomputes else None
    if recompute is not None:
        set_recompute(net.mllm, recompute, non_reentrant)
    predicted = activation_bytes(net.shape, net.sums, net.training, recompute=recompute)
    measured = kept_bytes(net)
    for part in ("encoder", "connector", "decoder"):
        assert measured[part] == pytest.approx(float(getattr(predicted, part)), rel=0.08), part
    assert float(predicted.head) == pytest.approx(3 * measured["loss"], rel=0.08)


@pytest.mark.parametrize("recomputes", [False, True])
def test_deepspeeds_linear_keeps_inputs_of_frozen_matrices_too(
    recomputes: bool, towers: Any, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(make_encoder(towers, "open_clip ViT"), qwen2(), TRAININGS["align"], resolution=MODES["native"])
    net.mllm.to(torch.bfloat16)
    net.encoder.to(torch.bfloat16)
    recompute = RecomputeSection(encoder=0, connector=0, decoder=2) if recomputes else None
    if recompute is not None:
        set_recompute(net.mllm, recompute, non_reentrant)
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    predicted = activation_bytes(net.shape, net.sums, net.training, recompute=recompute, keeps_inputs=True)
    assert kept_bytes(net)["decoder"] == pytest.approx(float(predicted.decoder), rel=0.08)
    less = activation_bytes(net.shape, net.sums, net.training, recompute=recompute)
    assert float(less.decoder) < 0.9 * float(predicted.decoder)


def test_experts_keep_what_their_tokens_need(towers: Any, kernel: None) -> None:
    net = Net(
        make_encoder(towers, "open_clip ViT"),
        experts("Qwen3Moe"),
        TRAININGS["trained"],
        resolution=MODES["native"],
    )
    net.mllm.to(torch.bfloat16)
    predicted = activation_bytes(net.shape, net.sums, net.training)
    assert kept_bytes(net)["decoder"] == pytest.approx(float(predicted.decoder), rel=0.1)


def test_recomputation_trades_what_is_kept_for_one_block_at_work(towers: Any) -> None:
    net = Net(make_encoder(towers, "open_clip ViT"), qwen2(), TRAININGS["trained"])
    plain = activation_bytes(net.shape, net.sums, net.training)
    again = activation_bytes(net.shape, net.sums, net.training, recompute=RecomputeSection())
    assert float(plain.working) == 0.0
    assert float(again.decoder) < 0.5 * float(plain.decoder)
    assert float(again.decoder) + float(again.working) < float(plain.decoder)
    assert float(again.peak) < float(plain.peak)
