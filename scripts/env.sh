# Sourced by test.sh and quickstart.sh: the virtual environment of this checkout.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
#   mmds_environment EXTRAS # makes .venv if there is none, installs mmds with these extras as locked, activates
#
# MMDS_PYTHON: the interpreter that makes .venv (default: the first Python >= 3.11 found).
# MMDS_VENV: the environment's folder (default: .venv in the checkout).

MMDS_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

mmds_say() { printf '\n== %s\n' "$*"; }

mmds_find_python() {
    local candidate
    for candidate in "${MMDS_PYTHON:-}" python3.11 python3.12 python3.13 python3.14 python3 python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "error: no Python 3.11 or newer (with its venv module) found; install one or set MMDS_PYTHON" >&2
    return 1
}

# What an installation depends on: the extras, the lock, the metadata, and where the checkout lies.
mmds_stamp() {
    { cat "$MMDS_ROOT/requirements.lock" "$MMDS_ROOT/setup.cfg" "$MMDS_ROOT/pyproject.toml"; echo "$MMDS_ROOT $1"; } |
        python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

mmds_environment() {
    local extras="$1" venv="${MMDS_VENV:-$MMDS_ROOT/.venv}" python wanted
    if [ ! -x "$venv/bin/python" ]; then
        python="$(mmds_find_python)" || return 1
        mmds_say "making $venv with $("$python" --version)"
        "$python" -m venv "$venv" || return 1
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
    wanted="$(mmds_stamp "$extras")" || return 1
    if ! grep -qxF "$wanted" "$venv/.mmds-installed" 2>/dev/null; then
        mmds_say "installing mmds[$extras] as locked into $venv (a few minutes the first time)"
        python -m pip install --disable-pip-version-check --quiet -c "$MMDS_ROOT/requirements.lock" -e "$MMDS_ROOT[$extras]" ||
            return 1
        echo "$wanted" >>"$venv/.mmds-installed"
    fi
    # One thread a process unless told otherwise: several ranks on few cores slow each other down.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
}
