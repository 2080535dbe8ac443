"""The metadata and the lock belong together, and the scripts that use them are sound."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def asked() -> list[Requirement]:
    """The requirements of setup.cfg, those of all extras included."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    blocks = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    return [Requirement(line) for block in blocks for line in block.strip().splitlines()]


def locked() -> dict[str, Version]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        assert [spec.operator for spec in pin.specifier] == ["=="], f"{pin} is not pinned"
    return {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}


@pytest.mark.parametrize("requirement", asked(), ids=lambda requirement: requirement.name)
def test_the_lock_holds_every_requirement_within_its_range(requirement: Requirement) -> None:
    version = locked()[canonicalize_name(requirement.name)]
    assert version in requirement.specifier


def test_torch_and_torchvision_are_the_pair_that_was_tested() -> None:
    pins = locked()
    assert (str(pins["torch"]), str(pins["torchvision"])) == ("2.14.1", "0.29.1")


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0


def test_the_environment_script_finds_a_python_and_refuses_an_old_one(tmp_path: Path) -> None:
    def find(chosen: str, path: str) -> subprocess.CompletedProcess[str]:
        script = f"source {ROOT}/scripts/env.sh; PATH={path}; mmds_find_python"
        environment = {"MMDS_PYTHON": chosen, "PATH": "/usr/bin:/bin"}
        return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)

    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\nexit 1\n")  # what an interpreter older than 3.11 answers to the question
    fake.chmod(0o755)
    found = find(sys.executable, str(tmp_path))
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)
    refused = find("", str(tmp_path))
    assert refused.returncode == 1 and "no Python 3.11" in refused.stderr
