"""Write what is made from the keys of a config: docs/config.md and ds_configs/schema.json. `--check`: only say what is stale."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mmds.config_reference import reference_page
from mmds.config_schema import config_schema

ROOT = Path(__file__).resolve().parents[1]


def generated() -> dict[Path, str]:
    """Each file that this script owns, with the text it should hold. The working folder is the repository's root."""
    template = Path("docs/config.template.md").read_text(encoding="utf-8")
    schema = json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"
    return {
        Path("docs/config.md"): reference_page(template, Path("ds_configs/stage2.json")),
        Path("ds_configs/schema.json"): schema,
    }


def main() -> int:
    """Write the files, or with --check compare them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    check = parser.parse_args().check
    os.chdir(ROOT)
    texts = generated()
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is stale: run python scripts/config_reference.py")
        else:
            path.write_text(texts[path], encoding="utf-8")
            print(f"wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
