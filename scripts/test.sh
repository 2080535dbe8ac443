#!/usr/bin/env bash
# Every check of a change: format, lint, types, tests. Makes and fills .venv when there is none.
#   bash scripts/test.sh [arguments for pytest]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$MMDS_ROOT"
mmds_environment quickstart,test

mmds_say "ruff"
ruff check --config .ci/ruff.toml .
ruff format --check --config .ci/ruff.toml .

mmds_say "mypy"
mypy mmds

mmds_say "pytest"
python -m pytest "$@"
