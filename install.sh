#!/usr/bin/env bash
# install.sh PYTHON [EXTRAS]: makes .venv and installs Tidemill there, editable, at the versions pinned in requirements.lock.
set -euo pipefail
cd "$(dirname "$0")"

"$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Tidemill needs Python 3.11 or newer; $1 is $("$1" --version). Name another: make PYTHON=python3.12 ..." >&2
    exit 1
}
[ -x .venv/bin/pip ] || "$1" -m venv .venv
# Most of what packages bring is never imported: Python compiles what is, when it first is, in half a minute less.
pip() { .venv/bin/pip --disable-pip-version-check install --quiet --no-compile --constraint requirements.lock "$@"; }

# Without an NVIDIA GPU the CPU build of torch spares gigabytes: the one that this machine offers by itself, else that of PyTorch's own index.
if ! nvidia-smi >/dev/null 2>&1; then
    pip --no-deps --no-index torch >/dev/null 2>&1 \
        || pip --no-deps --index-url https://download.pytorch.org/whl/cpu torch \
        || echo "PyTorch's index of CPU builds does not answer; installing the default build." >&2
fi
echo "Installing Tidemill${2:+ with $2} into .venv" >&2
pip --editable ".${2:+[$2]}"
.venv/bin/python -m compileall -q src  # else each process compiles it anew wherever PYTHONDONTWRITEBYTECODE is set
