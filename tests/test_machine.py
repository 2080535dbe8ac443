"""What a run asks of its machine: refused, or explained, in words that say what to do."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from mmds.engine import machine
from mmds.engine.launch import start_ranks
from mmds.engine.machine import check_card, check_compiler, explain, explained, own_tools_first
from mmds.errors import ConfigError, DataError, MmdsError
from tests.spawn import ROOT, plain_environment

OFFLOAD = {
    "optimizer": {"type": "AdamW", "params": {}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
CPU_ADAM = "cpu_adam"


def tools(folder: Path, *names: str) -> str:
    """A PATH on which only these tools of the machine are found."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name, path=plain_environment()["PATH"])
        assert found is not None, f"{name} is needed for this test"
        (folder / name).symlink_to(found)
    return str(folder)


def test_a_port_in_use_is_refused_with_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched = {
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_PORT": port,
            "MASTER_ADDR": "127.0.0.1",
        }
        for name, value in {"PATH": os.environ["PATH"], **launched}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(MmdsError, match=rf"port {port} of 127\.0\.0\.1.* is in use") as error:
            start_ranks()
    (suggested,) = [
        word
        for word in str(error.value).split()
        if word.isdecimal() and int(word) > 1024 and int(word) != port
    ]
    assert f"deepspeed --master_port {suggested} train.py" in str(error.value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(suggested)))


def test_a_start_on_the_cpu_compiles_nothing_and_needs_no_compiler(tmp_path: Path) -> None:
    environment = {
        **plain_environment(),
        "PATH": tools(tmp_path / "bin", "bash"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "built"),
    }
    script = "from mmds.engine.launch import start_ranks, stop_ranks\nprint(start_ranks())\nstop_ranks()"
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and "world=1" in ended.stdout, ended.stderr
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    ("found", "lacking"),
    [((), ["g++", "pip install ninja"]), (("ninja",), ["g++"]), (("c++",), ["pip install ninja"])],
)
def test_an_op_that_cannot_be_compiled_is_refused_with_what_to_install(
    found: tuple[str, ...], lacking: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", *found))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    with pytest.raises(MmdsError, match=f"op {CPU_ADAM} .* this machine lacks") as error:
        check_compiler(OFFLOAD)
    for line in ("apt-get install g++", "pip install ninja"):
        assert (line in str(error.value)) == any(word in line for word in lacking)
    assert "--set optimizer.params.torch_adam=true" in str(error.value)
    check_compiler({**OFFLOAD, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})


def test_an_op_that_is_there_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", "ninja"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    (tmp_path / "built" / CPU_ADAM).mkdir(parents=True)
    (tmp_path / "built" / CPU_ADAM / f"{CPU_ADAM}.so").touch()
    assert check_compiler(OFFLOAD) is None


def test_the_lock_of_a_build_that_was_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / CPU_ADAM / "lock"
    lock.parent.mkdir()
    lock.touch()
    check_compiler(OFFLOAD)  # somebody may be building
    yesterday = time.time() - 24 * 3600
    os.utime(lock, (yesterday, yesterday))
    with pytest.raises(MmdsError, match=f"rm {lock}"):
        check_compiler(OFFLOAD)


def test_a_failed_build_of_deepspeed_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", "ninja", "bash", "lscpu", "sh", "uname"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    builder = get_accelerator().create_op_builder("CPUAdamBuilder")
    with pytest.raises(MmdsError, match="apt-get install g") as error, explained():
        builder.load()
    assert f"its op {CPU_ADAM} " in str(error.value) and "pip install" not in str(error.value)
    assert re.search(r"\(said: .*c\+\+: .*not found\)", str(error.value))
    assert error.value.__cause__ is not None


def test_an_error_that_is_not_known_stays_what_it_is() -> None:
    for known in (ValueError("tensors differ"), MmdsError("port 1 of a, EADDRINUSE")):
        assert explain(known) is None
        with pytest.raises(type(known)) as error, explained():
            raise known
        assert error.value is known


BUS = (
    "a loader process was lost (DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
    "are out of shared memory. Please try to raise your shared memory limit.)"
)


@pytest.mark.parametrize(
    "error",
    [
        DataError(BUS),
        RuntimeError("unable to write to file </torch_12_345_6>: No space left on device (28)"),
        RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
        ),
        RuntimeError(
            "NCCL error: Error while creating shared memory segment /dev/shm/nccl-K3 (size 9637888)"
        ),
    ],
)
def test_shared_memory_that_ran_out_on_the_way_is_explained(error: Exception) -> None:
    told = str(explain(error))
    assert "--shm-size=" in told and str(error)[:60] in told


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "known"), [(2**19, True), (2**30, False)])
def test_no_space_left_means_shared_memory_only_when_that_is_full(
    free: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: Usage(2**26, 0, free))
    assert (explain(OSError(28, "No space left on device")) is not None) == known


def test_tools_beside_the_interpreter_are_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/somewhere")
    own_tools_first()
    own_tools_first()
    assert os.environ["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/somewhere"]


@pytest.mark.parametrize(
    ("capability", "bf16", "refused"),
    [
        ((7, 0), True, True),
        ((7, 5), True, True),
        ((7, 5), False, False),
        ((8, 0), True, False),
        ((9, 0), True, False),
    ],
)
def test_a_card_without_bf16_is_refused_by_name_in_a_bf16_run(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], bf16: bool, refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    check_card(torch.device("cpu"), bf16=True)
    if not refused:
        check_card(torch.device("cuda:0"), bf16=bf16)
        return
    with pytest.raises(
        ConfigError, match=rf"Tesla T4 \(compute capability {capability[0]}\.{capability[1]}\)"
    ) as error:
        check_card(torch.device("cuda:0"), bf16=bf16)
    assert "\n" not in str(error.value) and "--set bf16.enabled=false" in str(error.value)


def test_a_run_asks_about_its_card_before_it_opens_anything() -> None:
    steps = (ROOT / "train.py").read_text(encoding="utf-8")
    assert steps.index("check_card(ranks.device, bf16=config.bf16)") < steps.index("RunFolder(")
