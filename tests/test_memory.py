"""Model states against DeepSpeed's own estimators; activations are held in tests/model/test_activations.py."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from mmds.memory import StateBytes, state_bytes

SIZE, LAYER = 7_000_000_000, 545_000_000


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 8), (4, 8)])
@pytest.mark.parametrize("offload", ["nothing", "optimizer", "optimizer and weights"])
def test_zero3_is_what_deepspeed_estimates(offload: str, nodes: int, gpus: int) -> None:
    optimizer, weights = offload != "nothing", offload.endswith("weights")
    host, device, _ = estimate_zero3_model_states_mem_needs(
        SIZE,
        LAYER,
        num_gpus_per_node=gpus,
        num_nodes=nodes,
        cpu_offload=optimizer,
        cpu_offload_params=weights,
    )
    ours = state_bytes(
        trained=SIZE,
        zero_stage=3,
        ranks=nodes * gpus,
        ranks_per_node=gpus,
        largest_layer=LAYER,
        offload_optimizer=optimizer,
        offload_weights=weights,
    )
    assert (ours.device, ours.host) == (pytest.approx(device, abs=2), pytest.approx(host, abs=2))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 8), (4, 8)])
@pytest.mark.parametrize("offload", [False, True])
def test_zero2_is_what_deepspeed_estimates(offload: bool, nodes: int, gpus: int) -> None:
    host, device = estimate_zero2_model_states_mem_needs(
        SIZE, num_gpus_per_node=gpus, num_nodes=nodes, cpu_offload=offload
    )
    ours = state_bytes(
        trained=SIZE, zero_stage=2, ranks=nodes * gpus, ranks_per_node=gpus, offload_optimizer=offload
    )
    assert (ours.device, ours.host) == (pytest.approx(device, abs=2), pytest.approx(host, abs=2))


def test_what_each_stage_shares_out() -> None:
    """Per trained parameter on 1000 ranks, per frozen one, and per one of a frozen encoder outside the engine."""
    per: dict[int, tuple[float, float, float]] = {}
    for stage in range(4):

        def device(stage: int = stage, **sizes: int) -> float:
            sizes = {"trained": 0, **sizes}
            return state_bytes(**sizes, zero_stage=stage, ranks=1000).device / 10**6  # type: ignore[arg-type]

        per[stage] = (device(trained=10**6), device(frozen=10**6), device(replicated=10**6))
    assert per[0] == (16, 4, 4)
    assert per[1] == (pytest.approx(2 + 6 + 0.012), 2, 2)
    assert per[2] == (pytest.approx(2 + 0.018), 2, 2)
    assert per[3] == (pytest.approx(0.018), pytest.approx(0.002), 2)


def test_frozen_weights_are_offloaded_without_states() -> None:
    some: dict[str, Any] = {"zero_stage": 3, "ranks": 8, "offload_optimizer": True, "offload_weights": True}
    assert state_bytes(trained=0, frozen=1000, **some) == StateBytes(device=0, host=3000)


@pytest.mark.parametrize(
    "wrong", [{"zero_stage": 2, "offload_weights": True}, {"zero_stage": 0, "offload_optimizer": True}]
)
def test_offloading_that_does_not_exist_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="offloaded"):
        state_bytes(trained=1, ranks=1, **wrong)
