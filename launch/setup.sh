# Sourced by quickstart.sh and test.sh:  set_up_python EXTRAS
#
# Leaves in $PYTHON an interpreter that runs ep_moe: that of a virtual environment in the project's
# .venv, made and filled on the first call. Later calls install nothing and need no network until
# pyproject.toml, the torch chosen or the project's place changes.
#
#   EP_MOE_PYTHON=/path/to/python   use that interpreter as it is and install nothing
#   EP_MOE_TORCH='torch==2.12.0'    which torch, in the words of pip install; by default the newest
#                                   where there is an NVIDIA GPU, and where there is none a version
#                                   that is known to install quickly
# shellcheck shell=bash

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

set_up_python() {
    local extras=$1 torch key stamp base
    if [[ -n ${EP_MOE_PYTHON:-} ]]; then
        PYTHON=$EP_MOE_PYTHON
        export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}" # ep_moe may not be installed there
        return
    fi
    PYTHON=$project/.venv/bin/python
    if command -v nvidia-smi >/dev/null; then torch=torch; else torch=torch==2.13.0; fi
    torch=${EP_MOE_TORCH:-$torch}

    # One stamp file for each state of the project; it lists the extras that are installed. dev
    # contains all others.
    key=$(cat "$project/pyproject.toml" <(echo "$torch" "$project") | cksum | cut -d ' ' -f 1)
    stamp=$project/.venv/ep_moe-$key.installed
    if [[ -f $stamp ]] && grep -qx -e "$extras" -e dev "$stamp"; then
        return
    fi

    if ! is_new_enough "$PYTHON"; then
        base=$(find_python)
        echo "Making .venv with $("$base" --version)"
        "$base" -m venv --clear "$project/.venv"
    fi
    # Without pip: made by another tool, or interrupted.
    "$PYTHON" -m pip --version &>/dev/null || "$PYTHON" -m ensurepip
    echo "Installing $torch and ep-moe[$extras] into .venv"
    find "$project/.venv" -maxdepth 1 -name 'ep_moe-*.installed' ! -path "$stamp" -delete
    # torch first, and as asked for: resolving the project alone would choose one itself.
    # shellcheck disable=SC2086 # EP_MOE_TORCH may be several words
    "$PYTHON" -m pip install $torch
    "$PYTHON" -m pip install -e "${project}[$extras]"
    echo "$extras" >>"$stamp"
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' &>/dev/null
}

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if is_new_enough "$name"; then
            echo "$name"
            return
        fi
    done
    echo "ep_moe needs Python 3.11 or newer, but python3 is $(python3 --version 2>&1 || true)" \
        "and no python3.11 to python3.14 is on the PATH. Install one, or set EP_MOE_PYTHON to one" \
        "that has the requirements" >&2
    return 1
}
