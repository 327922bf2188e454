#!/usr/bin/env bash
# Installs the suite for Ascend into a virtual environment. Called by envs/npu_a2/install.sh and envs/npu_a3/install.sh.
#   install.sh --chip a2|a3 [--line main|fallback] [--venv FOLDER | --system] [--vllm-ascend wheel|source] [--no-doctor]
# Needs: CANN toolkit, kernels and NNAL of the line, Python 3.10 to 3.12 (3.11 for fallback), g++, cmake, git.
# Not verified on NPU hardware.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"

chip="" line="main" venv="$root/.venv" vllm_ascend="" doctor="yes"
while (( $# )); do
    case "$1" in
        --chip) chip="$2"; shift 2 ;;
        --line) line="$2"; shift 2 ;;
        --venv) venv="$2"; shift 2 ;;
        --system) venv=""; shift ;;
        --vllm-ascend) vllm_ascend="$2"; shift 2 ;;
        --no-doctor) doctor="no"; shift ;;
        *) echo "install.sh: unknown argument '$1'" >&2; exit 2 ;;
    esac
done
case "$chip" in
    a2) soc_version="ascend910b1"; : "${vllm_ascend:=wheel}" ;;
    a3) soc_version="ascend910_9391"; : "${vllm_ascend:=source}" ;;  # wheels hold kernels for A2 only
    *) echo "install.sh: --chip must be a2 or a3" >&2; exit 2 ;;
esac
constraints="$here/constraints-$line.txt"
if [[ ! -f "$constraints" ]]; then
    echo "install.sh: --line must be main or fallback, not '$line'" >&2
    exit 2
fi
pinned() { sed -n "s/^$1==//p" "$constraints"; }

# shellcheck source=/dev/null
source "$here/set_env.sh"
if [[ -n "$venv" ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    # shellcheck source=/dev/null
    source "$venv/bin/activate"
fi
python -m pip install -q --upgrade pip "setuptools<81" setuptools-scm wheel cmake ninja pybind11

triton_index="https://triton-ascend.osinfra.cn/pypi/simple/"
if [[ "$(uname -m)" == "x86_64" ]]; then
    python -m pip install "torch==$(pinned torch)+cpu" --index-url https://download.pytorch.org/whl/cpu
else
    python -m pip install "torch==$(pinned torch)"
fi
python -m pip install "torch_npu==$(pinned torch_npu)" -c "$constraints"

# vLLM without a device of its own; vllm-ascend plugs in. The wheel of vllm-ascend pins another transformers: no deps.
sources="${SOURCES:-${venv:-/opt/mindspeed-rl-sources}/src}"
mkdir -p "$sources"
checkout() {  # URL TAG FOLDER
    [[ -d "$sources/$3" ]] || git clone --depth 1 --branch "$2" "$1" "$sources/$3"
}
checkout https://github.com/vllm-project/vllm.git "v$(pinned vllm)" vllm
VLLM_TARGET_DEVICE=empty python -m pip install "$sources/vllm" --no-build-isolation -c "$constraints"
python -m pip uninstall -q -y triton  # CUDA's triton shadows triton-ascend
if [[ "$vllm_ascend" == "source" ]]; then
    checkout https://github.com/vllm-project/vllm-ascend.git "v$(pinned vllm-ascend)" vllm-ascend
    git -C "$sources/vllm-ascend" submodule update --init --recursive
    SOC_VERSION="$soc_version" COMPILE_CUSTOM_KERNELS=1 python -m pip install --no-build-isolation --no-deps "$sources/vllm-ascend"
else
    python -m pip install --no-deps "vllm-ascend==$(pinned vllm-ascend)"
fi
python -m pip install "triton-ascend==$(pinned triton-ascend)" --extra-index-url "$triton_index"

checkout https://gitcode.com/Ascend/MindSpeed.git core_r0.16.0 MindSpeed
python -m pip install --no-deps -e "$sources/MindSpeed"
python -m pip install -e "$root[npu]" -c "$constraints"

[[ "$doctor" == "no" ]] || mindspeed-rl doctor --platform npu --line "$line"
