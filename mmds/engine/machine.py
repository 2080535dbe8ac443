"""What a run asks of its machine: a compiler, a free port, shared memory.

Checked before the run starts where that can be done, and put into words where torch or DeepSpeed fail for the lack of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops

from mmds.errors import ConfigError, DataError, MmdsError

SHARED_MEMORY = Path("/dev/shm")
"""Where NCCL has its buffers between the GPUs of a machine."""

STALE_S = 3600.0
"""Age of a build's lock, seconds, after which its build cannot be running."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside, an error of torch or DeepSpeed that the user can mend is raised as MmdsError, which says how."""
    try:
        yield
    except Exception as error:
        known = explain(error)
        if known is None:
            raise
        raise known from error


def explain(error: BaseException) -> MmdsError | None:
    """What an error of torch or DeepSpeed means for the user; None for one that is not known, or that mmds has put into words.

    A DataError may be torch's in disguise: the loader passes on why a process was lost.
    """
    if isinstance(error, MmdsError) and not isinstance(error, DataError):
        return None
    text = str(error)
    for pattern, advise in _KNOWN:
        advice = advise(text) if re.search(pattern, text) else None
        if advice is not None:
            telling = [line for line in text.splitlines() if re.search(f"not found|error:|{pattern}", line)]
            return MmdsError(f"{advice}\n(said: {telling[-1].strip()[:300]})")
    return None


def check_card(device: torch.device, *, bf16: bool) -> None:
    """Refuse bf16 on a card that has none (before Ampere: V100, T4, RTX 20). Raises ConfigError naming the card."""
    if device.type != "cuda" or not bf16:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ConfigError(
            f"bf16: the {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) computes no bf16, and fp16 is not "
            "supported: use a card of capability 8.0 or more (A100, RTX 30 and later), or fp32 with --set bf16.enabled=false"
        )


def check_compiler(ds_config: Mapping[str, Any]) -> None:
    """Refuse to start when DeepSpeed would compile an op and this machine lacks what that takes.

    ds_config: what DeepSpeed gets. Raises MmdsError that says what to install, or which lock to remove: torch waits forever for
    a build that was killed.
    """
    import torch.utils.cpp_extension as cpp  # it looks for CUDA, and says so, when it is imported

    for name in _ops(ds_config):
        builder = get_accelerator().create_op_builder(name)
        if builder is None or installed_ops.get(builder.name, False):
            continue
        folder = Path(cpp._get_build_directory(builder.name, verbose=False))
        lock = folder / "lock"
        if lock.exists() and time.time() - lock.stat().st_mtime > STALE_S:
            raise MmdsError(
                f"a build of DeepSpeed's op {builder.name} was killed and left its lock, for which every run waits: rm {lock}"
            )
        lacking = _lacking(cuda=any(source.endswith(".cu") for source in builder.sources()))
        if (folder / f"{builder.name}.so").exists():
            lacking = [
                tool for tool in lacking if tool == "ninja"
            ]  # which is asked whether anything has changed
        if lacking:
            raise MmdsError(_build_advice(f"op {builder.name}", lacking))


def _ops(ds_config: Mapping[str, Any]) -> list[str]:
    """Builders of the ops that a run with this config loads."""
    optimizer = ds_config.get("optimizer", {})
    if optimizer.get("type", "").lower() not in ("adam", "adamw") or optimizer["params"].get("torch_adam"):
        return []
    offload = ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return ["FusedAdamBuilder" if offload.get("device", "none") == "none" else "CPUAdamBuilder"]


def own_tools_first() -> None:
    """Put the interpreter's own folder first in PATH, with the ninja that was installed beside it.

    Otherwise a run by the path of its python finds none, or another one, whose presence alone makes torch compile everything anew.
    """
    own = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != own:
        os.environ["PATH"] = f"{own}{os.pathsep}{os.environ.get('PATH', '')}"


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its collective over shared memory at the first start on a CPU: only inference calls it."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


_INSTALL = {
    "c++": "apt-get install g++",
    "ninja": "pip install ninja",
    "nvcc": "a CUDA toolkit of torch's version (conda install -c nvidia cuda-nvcc), with CUDA_HOME naming its folder",
}


def _lacking(*, cuda: bool) -> list[str]:
    """The tools for building an op that this machine does not have."""
    import torch.utils.cpp_extension as cpp

    commands = {"c++": cpp.get_cxx_compiler(), "ninja": "ninja"}
    if cuda:
        commands["nvcc"] = str(Path(cpp.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc")
    return [tool for tool, command in commands.items() if shutil.which(command) is None]


def _build_advice(op: str, lacking: list[str]) -> str:
    lines = [
        f"DeepSpeed compiles its {op} when it is first used, and "
        + (f"this machine lacks {', '.join(lacking)}. Install" if lacking else "the compiler failed on it.")
    ]
    lines += [f"    {_INSTALL[tool]}" for tool in lacking]
    lines += ["Or leave the work to torch's own Adam, which needs no compiling, with"]
    return "\n".join([*lines, "    --set optimizer.params.torch_adam=true"])


def _failed_build_advice(text: str) -> str:
    named = re.search(r"building extension '(\w+)'|JIT load the (\w+) op", text)
    cuda = re.search("nvcc|CUDA_HOME", text) is not None
    return _build_advice(f"op {named[1] or named[2]}" if named else "ops", _lacking(cuda=cuda))


def _port_advice(text: str) -> str:
    address, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (
        f"port {port} of {address}, where the ranks meet, is in use, perhaps by another run on this machine: choose another one, "
        f"the same on every node, as in\n    deepspeed --master_port {free_port()} train.py ...   (torchrun has the same option)"
    )


def _full_memory_advice(text: str) -> str:
    total = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    return _shared_memory_advice(f"{SHARED_MEMORY} has run full ({_mib(total)} in all)", 2 * total)


def _no_space_advice(text: str) -> str | None:
    """Of what no space is left the error does not say: shared memory, if that is full now."""
    full = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free < 2**20
    return _full_memory_advice(text) if full else None


def _shared_memory_advice(problem: str, wanted: float) -> str:
    size = max(1, -(-int(wanted) // 2**30))
    return (
        f"{problem}. Enlarge it, as in\n"
        f"    docker run --shm-size={size}g ...   or   mount -o remount,size={size}G {SHARED_MEMORY}"
    )


def _gone_advice(text: str) -> str:
    return (
        "the process of another rank has ended without a word. The kernel kills processes when memory runs out (dmesg | tail on the "
        "machine of that rank says so); a batch system does when the time is up"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


_KNOWN: tuple[tuple[str, Callable[[str], str | None]], ...] = (
    (r"EADDRINUSE|[Aa]ddress already in use", _port_advice),
    (r"Error building extension|Unable to JIT load|Ninja is required|CUDA_HOME", _failed_build_advice),
    (r"out of shared memory|unable to .+ file </torch|/dev/shm/nccl", _full_memory_advice),
    (r"No space left on device", _no_space_advice),
    (r"[Cc]onnection (closed|reset) by peer|remote process exited", _gone_advice),
)
