"""Checkpoints that are whole or not there at all.

DeepSpeed writes its files straight to their final names and its `latest` before other ranks have finished. Here every rank writes
into a hidden folder; when all have finished, rank 0 lists every file and its size in `manifest.json`, flushes it to disk and renames
the folder to `step-00001500`; then `latest` is replaced. A kill at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmds.engine import Engine, Ranks
from mmds.engine.zero import whole_tensors
from mmds.errors import CheckpointError
from mmds.model.lora import adapters_of
from mmds.plan_state import PlanState
from mmds.planner import RunPlan

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
_PREFIX = "step-"
_SAVING = ".saving-"
_REPLACED = ".replaced-"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a checkpoint says of its run, so that resuming into another one is refused by name.

    step: finished optimizer steps. world: ranks. trainable: hash of names, shapes and rates of what trains.
    plan: hash of the plan's inputs. frozen: checksums of what does not train, by part. place: from where the plan goes on
    (`PlanState`), so that no step before it is planned again; not compared.
    """

    step: int
    world: int
    zero_stage: int
    trainable: str
    plan: str
    frozen: Mapping[str, str]
    place: Mapping[str, Any] | None = None

    @staticmethod
    def of(engine: Engine, plan: str) -> RunState:
        """The state of a live engine; every rank calls it. plan: hash of the plan's inputs."""
        return RunState(
            step=engine.step_index,
            world=engine.ranks.world,
            zero_stage=engine.ds.zero_optimization_stage(),
            trainable=trainable_fingerprint(engine),
            plan=plan,
            frozen=frozen_checksums(engine),
        )

    def at(self, step: int, place: PlanState | None = None) -> RunState:
        """The same run after `step` finished steps; place: from where its plan goes on."""
        return replace(self, step=step, place=None if place is None else place.to_json())

    def must_match(self, saved: RunState, folder: Path) -> None:
        """Raise CheckpointError unless a run in this state may continue from `saved`."""
        if saved.world != self.world:
            raise CheckpointError(
                f"{folder} was written by {saved.world} ranks and this run has {self.world}; start {saved.world} ranks, or make a model "
                "folder with scripts/consolidate.py and start a new run from it with init_from"
            )
        for key, what in (
            ("zero_stage", "another zero_optimization.stage"),
            ("trainable", "other trained parameters or rates"),
            ("plan", "other data, row size, batch or seed"),
            ("frozen", "other frozen weights"),
        ):
            if getattr(saved, key) != getattr(self, key):
                raise CheckpointError(
                    f"{folder} belongs to a run with {what}; restore that configuration, or start a new run in another output_dir "
                    "(--resume never starts over in this one)"
                )


def save(engine: Engine, folder: Path, state: RunState, *, keep: int) -> Path:
    """Write checkpoint `step-N` of the engine into `folder`; every rank calls it. Returns the checkpoint's folder.

    Older checkpoints beyond `keep` are removed once the new one is complete. Raises CheckpointError on every rank when one
    rank cannot write; the older checkpoints are then untouched.
    """
    name = f"{_PREFIX}{state.step:08d}"
    hidden, final = folder / (_SAVING + name), folder / name
    with engine.ranks.together("saving a checkpoint"):
        if engine.ranks.first:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
    with engine.ranks.together("saving a checkpoint"):
        engine.save(folder, hidden.name)
    with engine.ranks.together("saving a checkpoint"):
        if engine.ranks.first:
            _write_json(hidden / STATE, {**state.__dict__, "frozen": dict(state.frozen)})
            _sync(hidden)  # before the manifest: what it lists is on disk when it appears
            _write_json(hidden / MANIFEST, {"files": _sizes(hidden)})
            _sync(hidden)
            _give_name(hidden, final)
            _sync_folder(folder)
            _replace(folder / LATEST, name)
            for old in complete(folder)[:-keep]:
                if old != final:  # it is not the newest after going back to an older one
                    shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """Checkpoint folders whose manifest holds, oldest first."""
    return [path for path in _steps(folder) if not _faults(path)]


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint to resume from; None to start from step 0.

    resume: `never`; `auto` = the newest complete one under `folder`, whatever `latest` says; or the path of one. Raises
    CheckpointError when checkpoints are there but none is complete: nothing starts over in silence.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume)
        faults = _faults(path)
        if faults:
            raise CheckpointError(f"{path} is not a complete checkpoint: {faults}")
        return path
    found = complete(folder)
    if found:
        return found[-1]
    torn = {path.name: _faults(path) for path in _steps(folder)}
    if torn or (folder / LATEST).exists():
        raise CheckpointError(
            f"{folder} has no complete checkpoint ({torn or 'only ' + LATEST}); repair it, or start over with --resume never"
        )
    return None


def read_state(path: Path) -> RunState:
    """state.json of a checkpoint."""
    return RunState(**json.loads((path / STATE).read_text(encoding="utf-8")))


def load(engine: Engine, path: Path, state: RunState) -> None:
    """Restore the engine from a checkpoint, on every rank or on none.

    Raises CheckpointError on every rank when it is torn, belongs to another run, or one rank cannot read it.
    """
    with engine.ranks.together(f"reading {path}"):
        faults = _faults(path)
        if faults:
            raise CheckpointError(f"{path} is not a complete checkpoint: {faults}")
        saved = read_state(path)
        state.must_match(saved, path)
    with engine.ranks.together(f"loading {path}"):
        try:
            engine.load(path.parent, path.name)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
        if engine.step_index != saved.step:
            raise CheckpointError(
                f"{path}: {STATE} says step {saved.step}, DeepSpeed's files say {engine.step_index}"
            )


def frozen_checksums(engine: Engine) -> dict[str, str]:
    """SHA-256 of the tensors that do not train, by part; every rank calls it and gets rank 0's answer."""
    digests: dict[str, Any] = {}
    trained = {name for name, _, _ in engine.trained}
    for name, value in whole_tensors(engine.model):
        if engine.ranks.first and name not in trained:
            _digest(digests, name, value)
    if engine.ranks.first and engine.frozen is not None:
        for name, value in engine.frozen.encoder.state_dict().items():
            _digest(digests, f"encoder.{name}", value)
    return engine.ranks.from_first({part: digest.hexdigest() for part, digest in sorted(digests.items())})


def trainable_fingerprint(engine: Engine) -> str:
    """Hash of the names, table rates and decays of what trains, and of the adapters' rank and scale where there are any."""
    adapters = adapters_of(engine.model.decoder)
    trained: list[Any] = engine.trained if adapters is None else [*engine.trained, adapters]
    return hashlib.sha256(json.dumps(trained).encode()).hexdigest()


def resume(engine: Engine, folder: Path, state: RunState, how: str, plan: RunPlan) -> Path | None:
    """Bring engine and plan to where `--resume how` asks; every rank calls it. Returns the checkpoint they go on from, or None.

    Going back to an older checkpoint of this folder sets the later ones aside, so that `auto` will not prefer them.
    Raises CheckpointError when there is something to resume that cannot be: nothing starts over in silence.
    """
    with engine.ranks.together("tidying checkpoints"):
        clean(folder, engine.ranks)
    with engine.ranks.together("looking for a checkpoint"):
        found = find(folder, how)
    if found is not None:
        load(engine, found, state)
        if (place := read_state(found).place) is not None:
            plan.restore(PlanState.from_json(place))
    with engine.ranks.together("setting later checkpoints aside"):
        if how == "never":
            set_aside(folder, _steps(folder), engine.ranks)
        elif found is not None and found.resolve().parent == folder.resolve():
            later = [path for path in _steps(folder) if path.name > found.name]
            set_aside(folder, later, engine.ranks)
    return found


def clean(folder: Path, ranks: Ranks) -> None:
    """Finish or remove what an interrupted save has left behind: a whole one gets its name, a partial one goes."""
    if ranks.first and folder.is_dir():
        for left in folder.glob(_SAVING + "*"):
            if _faults(left):
                shutil.rmtree(left)
            else:
                _give_name(left, folder / left.name.removeprefix(_SAVING))
        for replaced in folder.glob(_REPLACED + "*"):
            shutil.rmtree(replaced)


def set_aside(folder: Path, checkpoints: Sequence[Path], ranks: Ranks) -> None:
    """Move checkpoints to `checkpoints.old-1` (or the next free number) beside their folder, on rank 0."""
    if not ranks.first or not checkpoints:
        return
    count = 1
    while (aside := folder.with_name(f"{folder.name}.old-{count}")).exists():
        count += 1
    aside.mkdir()
    for checkpoint in checkpoints:
        checkpoint.rename(aside / checkpoint.name)
    (folder / LATEST).unlink(missing_ok=True)


def _give_name(hidden: Path, final: Path) -> None:
    """Rename a whole checkpoint to its final name; one that had the name before goes only afterwards."""
    replaced = final.with_name(_REPLACED + final.name)
    if final.exists():
        final.rename(replaced)
    hidden.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def _steps(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def _faults(path: Path) -> str:
    """What is wrong with a checkpoint folder, in words; empty when it is complete."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        sizes = dict(files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no readable {MANIFEST} ({type(error).__name__})"
    if STATE not in sizes:
        return f"{MANIFEST} lists no {STATE}"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {MANIFEST} says {size}"
    return ""


def _sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _digest(digests: dict[str, Any], name: str, value: Tensor) -> None:
    digest = digests.setdefault(name.split(".", 1)[0], hashlib.sha256())
    digest.update(name.encode())
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _replace(file: Path, text: str) -> None:
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync_file(temporary)
    temporary.replace(file)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync_file(path)
    _sync_folder(folder)


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
