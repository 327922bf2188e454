#!/usr/bin/env bash
# Installs the suite for Ascend into a virtual environment. Called by the install.sh of envs/npu_a2, npu_a3 and npu_a5, and by
# tests/npu_sim/run.sh for a machine without NPU.
#   install.sh --chip a2|a3|a5|simulated [--line main|fallback|cann85] [--venv FOLDER | --system] [--vllm-ascend wheel|source]
#              [--megatron-lm] [--latest] [--no-doctor] [--download DIR | --offline DIR] [PACKAGE...]
# Needs: CANN toolkit, kernels and NNAL of the line, Python 3.10 to 3.12 (fallback and cann85: 3.10 or 3.11), g++, cmake, git.
# Versions: constraints-LINE.txt, and resolved-LINE.txt for what those leave open; --latest ignores the second.
# --megatron-lm also installs the source tree of Megatron-LM (core_v0.16.1), which nothing of the suite needs: programs of yours
# that import megatron.training do.
# MINDSPEED_SRC, MEGATRON_SRC, VLLM_ASCEND_SRC: folders with a checkout of each, in place of one that the script clones; the last
# may also be the sdist of the package index (vllm_ascend-*.tar.gz), which needs neither GitHub nor submodules.
# --download DIR: with a network and without an NPU, collects in DIR all that --offline DIR installs from on a machine without a
# network. Both machines need the same processor and the same Python. vllm-ascend from source is built on the second one.
# "simulated" is the line of a machine without NPU and without CANN: the same commands with another pair of torch and torch_npu.
# Not verified on NPU hardware.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"

chip="" line="" venv="$root/.venv" vllm_ascend="" doctor="yes" megatron_lm="" download="" offline="" recorded=() more=()
while (( $# )); do
    case "$1" in
        --chip) chip="$2"; shift 2 ;;
        --line) line="$2"; shift 2 ;;
        --venv) venv="$2"; shift 2 ;;
        --system) venv=""; shift ;;
        --vllm-ascend) vllm_ascend="$2"; shift 2 ;;
        --megatron-lm) megatron_lm="yes"; shift ;;
        --latest) recorded=(--latest); shift ;;
        --no-doctor) doctor="no"; shift ;;
        --download) download="${2:?--download needs a folder}"; doctor="no"; shift 2 ;;
        --offline) offline="${2:?--offline needs a folder}"; shift 2 ;;
        -*) echo "install.sh: unknown argument '$1'" >&2; exit 2 ;;
        *) more+=("$1"); shift ;;
    esac
done
case "$chip" in
    a2) soc_version="ascend910b1"; : "${vllm_ascend:=wheel}" ;;
    a3) soc_version="ascend910_9391"; : "${vllm_ascend:=source}" ;;  # wheels hold kernels for A2 only
    a5) soc_version="${SOC_VERSION:-ascend950dt_9582}" vllm_ascend="source" ;;  # 950DT; 950PR: SOC_VERSION=ascend950pr_9589
    simulated) line="simulated" vllm_ascend="wheel" doctor="no" ;;
    *) echo "install.sh: --chip must be a2, a3, a5 or simulated" >&2; exit 2 ;;
esac

fail() { echo "install.sh: $*" >&2; exit 1; }
say() { echo "[install] $*" >&2; }
[[ -z "$download" || -z "$offline" ]] || fail "--download and --offline are the two halves of one installation, on two machines."
at_least() { [[ "$(printf '%s\n' "$2" "$1" | sort -V | head -n 1)" == "$2" ]]; }

# ---------------------------------------------------------------- this machine
if [[ "$chip" != simulated && -n "$download" ]]; then
    : "${line:=main}"  # the CANN of the other machine decides: --line fallback for 9.0, cann85 for 8.5
elif [[ "$chip" != simulated ]]; then
    # shellcheck source=/dev/null
    source "$here/set_env.sh"
    : "${ASCEND_HOME_PATH:?set_env.sh of the toolkit does not set it}"
    files=("$ASCEND_HOME_PATH"/{version.cfg,*-linux/ascend_toolkit_install.info,compiler/version.info,opp/version.info})
    cann="$(cat "${files[@]}" 2> /dev/null | sed -n -E 's/.*[Vv]ersion *= *\[?([A-Za-z0-9_.]*:)?([0-9]+\.[0-9]+).*/\2/p')" || true
    cann="${cann%%$'\n'*}"
    if [[ -n "$cann" ]] && at_least "$cann" 9.2; then
        say "CANN $cann belongs to vllm-ascend 0.30; the line main was released with CANN 9.1.0, and was not tried with $cann."
    fi
    if [[ -z "$line" ]]; then
        if [[ -z "$cann" ]] || at_least "$cann" 9.1; then line="main"
        elif at_least "$cann" 9.0; then line="fallback"
        elif at_least "$cann" 8.5; then line="cann85"
        else fail "CANN $cann is too old: nothing that this suite supports was published for it. Install CANN 9.1.0 with driver 26.0.rc1" \
            "(or CANN 8.5.1 with driver 25.5) as docs/ascend.md says, then start this script again."
        fi
    fi
fi
[[ "$chip" != a5 || "$line" == main ]] || fail "Ascend 950 needs the line main with CANN 9.1.0 or newer, not '$line'."
[[ -f "$here/constraints-$line.txt" && ( "$line" != simulated || "$chip" == simulated ) ]] \
    || { echo "install.sh: --line must be main, fallback or cann85, not '$line'" >&2; exit 2; }

glibc="$(getconf GNU_LIBC_VERSION 2> /dev/null | sed 's/.* //')"
needs=2.28
[[ "$line" != main && "$line" != simulated || "$vllm_ascend" == source ]] || needs=2.34
if [[ -n "$glibc" ]] && ! at_least "$glibc" "$needs"; then
    if [[ "$needs" == 2.34 ]] && at_least "$glibc" 2.28; then
        fail "this system has glibc $glibc, and the wheels of vllm-ascend in the line '$line' need $needs (Ubuntu 22.04, openEuler 22.03" \
            "and later have it; Kylin V10, openEuler 20.03 and Ubuntu 20.04 do not). Build vllm-ascend here with --vllm-ascend source, take" \
            "--line cann85 or --line fallback with their CANN, or use the container of envs/npu_a2/Dockerfile."
    fi
    fail "this system has glibc $glibc; torch_npu's wheels need $needs. Use the container of envs/npu_a2/Dockerfile."
fi

case "$line" in
    main) versions="3.12 3.11 3.10" ;;
    simulated) versions="3.11" ;;
    *) versions="3.11 3.10" ;;
esac
python=""
for candidate in "${PYTHON:-python3}" ${PYTHON:-$(printf 'python%s ' $versions)}; do
    if "$candidate" -c "import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] not in '$versions'.split())" 2> /dev/null; then
        python="$(command -v "$candidate")"
        break
    fi
done
[[ -n "$python" ]] || fail "the line '$line' needs Python ${versions// / or } with venv; set PYTHON=/path/to/python."

# ---------------------------------------------------------------- a machine without a network
wheels=""
made_for="line $line, chip $chip, $(uname -m), Python $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
if [[ -n "$download" ]]; then
    mkdir -p "$download"/{wheels,src}
    download="$(cd "$download" && pwd)" wheels="$download/wheels" venv="$download/.venv"
    rm -f "$download/made-for"
elif [[ -n "$offline" ]]; then
    [[ -f "$offline/made-for" ]] || fail "--offline: '$offline' is not a folder that install.sh --download has filled to its end."
    offline="$(cd "$offline" && pwd)" wheels="$offline/wheels"
    found="$(cat "$offline/made-for")"
    [[ "$found" == "$made_for" ]] || fail "--offline: '$offline' is made for $found; this machine has $made_for."
    : "${MINDSPEED_SRC:=$(ls -d "$offline"/src/MindSpeed 2> /dev/null || true)}"
    : "${MEGATRON_SRC:=$(ls -d "$offline"/src/Megatron-LM 2> /dev/null || true)}"
    : "${VLLM_ASCEND_SRC:=$(ls -d "$offline"/src/vllm_ascend-*.tar.gz "$offline"/src/vllm-ascend 2> /dev/null | head -n 1 || true)}"
fi

# ---------------------------------------------------------------- packages
if [[ -n "$venv" ]]; then
    [[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
    venv="$(cd "$venv" && pwd)"
    # shellcheck source=/dev/null
    source "$venv/bin/activate"
    python="$venv/bin/python"
fi
packages() { "$python" "$here/packages.py" "$@"; }
pinned() { packages pinned "$line" "$1"; }
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
constraints="$scratch/constraints.txt"
packages constraints "$line" ${recorded[@]+"${recorded[@]}"} | grep -v -E '^vllm==|^vllm-ascend==' > "$constraints"
sources="${SOURCES:-${venv:-/opt/mindspeed-rl-sources}/src}"
mkdir -p "$sources"
pip_quietly() {
    "$python" -m pip "$@" --no-input --disable-pip-version-check \
        2> >(grep -v -E "WARNING: (Location|Url) .* is ignored|Looking in (links|indexes)" >&2)
}
pip_install() {
    if [[ -z "$wheels" ]]; then pip_quietly install "$@"; return; fi
    local word named=()
    for word in "$@"; do [[ "$word" == --upgrade || "$word" == -e ]] || named+=("$word"); done  # which belong only to install
    if [[ -n "$download" ]]; then pip_quietly wheel --find-links "$wheels" -w "$wheels" "${named[@]}"; fi
    # what is built here on a machine with a network is a wheel by now
    pip_quietly install "${@/#--no-binary=*/--prefer-binary}" --no-index --find-links "$wheels"
}
checkout() {  # FOLDER URL TAG [COPY OF IT]
    if [[ "${4:-}" == *.tar.gz ]]; then
        rm -rf "${sources:?}/$1" && mkdir -p "$sources/$1" && tar -xzf "$4" -C "$sources/$1" --strip-components 1
    elif [[ -n "${4:-}" ]]; then
        rm -rf "${sources:?}/$1" && mkdir -p "$sources/$1" && cp -R "$4/." "$sources/$1" && chmod -R u+w "$sources/$1"
    elif [[ ! -d "$sources/$1" ]]; then
        git clone --depth 1 --branch "$3" "$2" "$sources/$1"
    fi
    if [[ -n "$download" ]]; then rm -rf "${download:?}/src/$1" && cp -R "$sources/$1" "$download/src/$1"; fi
}

say "1/6 what builds: vLLM's setup.py imports torch and setuptools_rust, and pip does not isolate it"
pip_install --upgrade pip setuptools setuptools-scm setuptools-rust wheel cmake ninja pybind11 jinja2 packaging -c "$constraints"

# torch_npu needs the CPU build: aarch64 has no other, on x86_64 it has the name +cpu and an index of its own
torch="$(pinned torch)"
say "2/6 torch $torch, torch_npu $(pinned torch-npu)"
export TORCH_DEVICE_BACKEND_AUTOLOAD=0  # `import torch` would load torch_npu
if [[ "$(uname -m)" == x86_64 ]]; then
    pip_install "torch==$torch+cpu" "torchvision==$(pinned torchvision)" -c "$constraints" 2> "$scratch/torch.log" \
        || pip_install "torch==$torch+cpu" "torchvision==$(pinned torchvision)" -c "$constraints" \
            --index-url https://download.pytorch.org/whl/cpu \
        || { cat "$scratch/torch.log" >&2; fail "torch==$torch+cpu is neither in pip's indices nor at download.pytorch.org."; }
else
    pip_install "torch==$torch" "torchvision==$(pinned torchvision)" -c "$constraints"
fi
pip_install "torch_npu==$(pinned torch-npu)" -c "$constraints"

# vLLM without a device of its own, from its sdist; vllm-ascend plugs in. Both come without their requirements, which name other
# builds of torch and another transformers; step 5 installs them.
vllm="$(pinned vllm)"
say "3/6 vllm $vllm without a device"
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE="$vllm" \
    pip_install --no-deps --no-build-isolation --no-binary=vllm "vllm==$vllm"

ascend="$(pinned vllm-ascend)"
say "4/6 vllm-ascend $ascend ($vllm_ascend)"
if [[ "$vllm_ascend" == source ]]; then
    [[ "$ascend" != 0.23.0 ]] || ascend="0.23.0.post1"  # has no wheels
    checkout vllm-ascend https://github.com/vllm-project/vllm-ascend.git "v$ascend" "${VLLM_ASCEND_SRC:-}"
    if [[ -z "${VLLM_ASCEND_SRC:-}" ]]; then
        git -C "$sources/vllm-ascend" submodule update --init --recursive
        [[ -z "$download" ]] || cp -R "$sources/vllm-ascend/." "$download/src/vllm-ascend"
    fi
    [[ -n "$download" ]] || SOC_VERSION="$soc_version" COMPILE_CUSTOM_KERNELS=1 pip_install --no-build-isolation --no-deps "$sources/vllm-ascend"
else
    pip_install --no-deps --only-binary vllm-ascend "vllm-ascend==$ascend"
fi

say "5/6 everything else, in one step (at its end pip names requirements of vllm-ascend that are left out on purpose)"
packages requirements "$line" > "$scratch/requirements.txt"
pip_install -e "$root[npu]" -r "$scratch/requirements.txt" ${more[@]+"${more[@]}"} -c "$constraints"
"$python" -m pip uninstall -q -y triton 2> /dev/null  # CUDA's triton shadows triton-ascend
if [[ "$chip" == simulated ]]; then
    pip_install --no-deps "triton==$(pinned triton)"
else
    pip_install --no-deps "triton-ascend==$(pinned triton-ascend)" --extra-index-url https://triton-ascend.osinfra.cn/pypi/simple/ \
        --extra-index-url https://mirrors.huaweicloud.com/ascend/repos/pypi
fi

# Sources that no index has. Where there is neither a network nor a folder, a simulated NPU goes without them.
say "6/6 MindSpeed core_r0.16.0${megatron_lm:+, Megatron-LM core_v0.16.1}"
if [[ "$chip" != simulated || -n "${MINDSPEED_SRC:-}" ]]; then
    checkout MindSpeed https://gitcode.com/Ascend/MindSpeed.git core_r0.16.0 "${MINDSPEED_SRC:-}"
    [[ -n "$download" ]] || pip_install --no-deps --no-build-isolation -e "$sources/MindSpeed"
fi
if [[ -n "$megatron_lm" ]]; then
    # megatron.training and megatron.legacy; megatron.core stays the package's, which is earlier on the path. The tree keeps its
    # LICENSE; nothing but the folder megatron can be imported from it.
    checkout Megatron-LM https://github.com/NVIDIA/Megatron-LM.git core_v0.16.1 "${MEGATRON_SRC:-}"
    mkdir -p "$sources/megatron-path"
    ln -sfn ../Megatron-LM/megatron "$sources/megatron-path/megatron"
    echo "$sources/megatron-path" > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron_lm.pth"
fi

if [[ -n "$download" ]]; then
    rm -rf "${download:?}/.venv"
    echo "$made_for" > "$download/made-for"
    say "$download has all of it ($(du -sh "$download" | cut -f 1)): copy it and this folder to the other machine, and start"
    say "install.sh --chip $chip --line $line --offline FOLDER there."
fi
unset TORCH_DEVICE_BACKEND_AUTOLOAD
[[ "$doctor" == no ]] || mindspeed-rl doctor --platform npu --line "$line"
