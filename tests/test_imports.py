"""Arrows between modules point only downwards; who may import what is written down here and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import modules of its own level and of lower levels.
LEVELS: dict[str, int] = {
    "mmds": 0,
    "mmds.errors": 0,
    "mmds.jsonc": 0,
    **dict.fromkeys(
        (
            "mmds.config",
            "mmds.config_decode",
            "mmds.config_explain",
            "mmds.config_guards",
            "mmds.config_keys",
            "mmds.config_load",
            "mmds.config_names",
            "mmds.config_reference",
            "mmds.config_schema",
            "mmds.config_text",
            "mmds.config_types",
            "mmds.ds_keys",
            "mmds.ds_models",
            "mmds.ds_rules",
            "mmds.ds_schema",
            "mmds.rate_patterns",
            "mmds.stages",
        ),
        1,
    ),
    "mmds.architecture": 2,
    "mmds.calibration": 2,
    "mmds.cost": 2,
    "mmds.worked_example": 2,
    "mmds.geometry": 2,
    "mmds.memory": 2,
    "mmds.text_tables": 0,
    "mmds.shuffle": 1,
    "mmds.packing": 2,
    "mmds.exchange": 2,
    "mmds.balance": 2,
    "mmds.sample_stream": 2,
    "mmds.sample_sizes": 2,
    "mmds.plan_state": 2,
    "mmds.schemes": 3,
    "mmds.plan_ahead": 3,
    "mmds.planner": 3,
    "mmds.data": 4,
    "mmds.model": 5,
    "mmds.cpu_bf16": 5,
    "mmds.engine": 6,
    **dict.fromkeys(
        (
            "mmds.checkpoint",
            "mmds.dry_run",
            "mmds.evaluate",
            "mmds.export",
            "mmds.fit",
            "mmds.generate",
            "mmds.hf_export",
            "mmds.hf_target",
            "mmds.inspect_page",
            "mmds.measure_rows",
            "mmds.monitor",
            "mmds.plan_page",
            "mmds.plan_plots",
            "mmds.plan_report",
            "mmds.rehearse",
            "mmds.run_data",
            "mmds.run_forecast",
            "mmds.run_outline",
        ),
        7,
    ),
}

FILES = sorted((ROOT / "mmds").rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level(module: str) -> int | None:
    """The level of the longest listed prefix; None for a module that nobody has placed."""
    parts = module.split(".")
    if len(parts) == 1:
        return LEVELS[module]
    names = (".".join(parts[:n]) for n in range(len(parts), 1, -1))
    return next((LEVELS[name] for name in names if name in LEVELS), None)


def imports_of(path: Path) -> set[str]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    return set(imports(path.read_text(encoding="utf-8"), package))


def imports(source: str, package: str) -> Iterator[str]:
    """Every module that `source` imports, lazily or not; `from mmds.data import rows` counts as mmds.data.rows."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if is_module(inner) else base


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def is_under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_its_own_level_and_lower(path: Path) -> None:
    name = module_name(path)
    own = level(name)
    assert own is not None, f"{name} has no level: place it in LEVELS of this test"
    for imported in imports_of(path):
        if is_under(imported, "mmds"):
            other = level(imported)
            assert other is not None and other <= own, (
                f"{name} (level {own}) imports {imported} (level {other})"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_outside_packages_come_in_only_where_they_belong(path: Path) -> None:
    name, found = module_name(path), imports_of(path)
    own = level(name)
    assert own is not None
    may_deepspeed = is_under(name, "mmds.engine", "mmds.ds_models")
    assert may_deepspeed or not any(is_under(module, "deepspeed") for module in found)
    if own < 4:
        assert not any(is_under(module, "torch", "transformers", "open_clip") for module in found)
    if own < 5:
        assert not any(is_under(module, "torch.distributed") for module in found)
    if is_under(name, "mmds.model"):
        data = {module for module in found if is_under(module, "mmds.data")}
        assert data <= {"mmds.data.rows"}


def test_train_stays_short_and_has_no_trainer_class() -> None:
    script = ROOT / "train.py"
    tree = ast.parse(script.read_text(encoding="utf-8"))
    assert len(script.read_text(encoding="utf-8").splitlines()) < 150
    assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_the_walk_sees_lazy_relative_and_from_imports() -> None:
    source = (
        "from . import rows\nfrom ..errors import DataError\ndef f():\n    import torch.distributed as d\n"
    )
    assert set(imports(source, "mmds.data")) == {"mmds.data.rows", "mmds.errors", "torch.distributed"}
