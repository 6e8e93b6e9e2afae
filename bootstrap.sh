#!/bin/sh
# Makes .venv with everything in lock.txt: finds or fetches uv, finds or fetches a Python >= 3.12.
# usage: sh bootstrap.sh [EXTRAS]      EXTRAS: dev (default), "" (what a run needs), "dev,gpu", "dev,tpu"
set -eu
cd "$(dirname "$0")"
extras=${1-dev}
stamp=".venv/installed-$(echo "$extras" | tr ',' '-')-$(cat pyproject.toml lock.txt | cksum | cut -d' ' -f1)"
[ -e "$stamp" ] && exit 0

find_uv() {
    for candidate in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" .tools/bin/uv; do
        if "$candidate" --version >/dev/null 2>&1; then echo "$candidate"; return; fi
    done
    for python in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        # A version manager's shim can be on the PATH and not run: try it, do not look it up.
        if "$python" -m venv .tools >/dev/null 2>&1 && .tools/bin/python -m pip install -q uv >&2; then
            echo .tools/bin/uv; return
        fi
    done
    echo "no uv, and no python3 that can make a virtual environment to install it in: install uv and try again" >&2
    exit 1
}

find_python() {
    for candidate in python3.12 python3.13 python3.14 python3 \
        "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python3 /usr/local/bin/python3 /opt/python*/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'; return
        fi
    done
    "$1" python find '>=3.12' 2>/dev/null || { "$1" python install -q 3.12 >&2 && "$1" python find 3.12; }
}

uv=$(find_uv)
.venv/bin/python --version >/dev/null 2>&1 || "$uv" venv -q --clear --python "$(find_python "$uv")" .venv
"$uv" pip install -q --python .venv/bin/python -e ".${extras:+[$extras]}" -c lock.txt
case "$extras" in *dev*)
    # What compiles for TPU slices that are not there, apart from .venv: where jax finds it, it looks for a TPU.
    if [ "$(uname -sm)" = "Linux x86_64" ]; then
        "$uv" pip install -q --no-deps --python .venv/bin/python --target .tools/libtpu "$(grep '^libtpu==' lock.txt)"
    fi ;;
esac
touch "$stamp"
echo "installed into .venv ($(.venv/bin/python --version), extras: $extras)" >&2
