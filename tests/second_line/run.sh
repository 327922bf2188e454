#!/usr/bin/env bash
# Runs what a release of megatron-core can change on another one: MEGATRON=0.19.2 tests/second_line/run.sh [pytest arguments]
# The list comes from tests/parts.py.
#
# The environment is .venv-megatron-RELEASE (0.17.1 without MEGATRON=). The release of envs/cpu/requirements-py312.lock has the CPU
# environment of Python 3.12, made by envs/cpu/install.sh with python3.12 (SECOND_LINE_PYTHON=... names another). Other releases, and
# that one where there is no Python 3.12 or its packages cannot be had, are laid before the packages of the CPU environment: they ask
# for 3.12, but their Python files run on 3.11. Their one compiled file, of the index of data sets, comes from the CPU environment's
# Megatron, whose source of it is the same.
# `run.sh --set-up` only makes the environment.
# Paths among the arguments replace the default ones; without arguments the tests marked slow are left out.
# VENV_DIR=... is the CPU environment, SECOND_LINE_VENV=... the one to make.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
cd "$root"
release="${MEGATRON:-0.17.1}"
venv="${VENV_DIR:-$root/.venv}"
environment="${SECOND_LINE_VENV:-$root/.venv-megatron-$release}"

# makes the environment over the CPU environment
lay_before() {
    local base packages wanted datasets
    if [[ ! -x "$venv/bin/python" ]]; then
        bash envs/cpu/install.sh "$venv"
    fi
    base="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    wanted="megatron-core==$release before $base for $root"
    if [[ "$(cat "$stamp" 2> /dev/null || true)" != "$wanted" ]]; then
        echo "[second line] megatron-core $release before $venv" >&2
        "$venv/bin/python" -m venv --clear --without-pip "$environment"
        packages="$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        # a wheel for another Python goes into a folder that is named, and comes without what it asks for
        "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-input --no-compile --ignore-requires-python --no-deps \
            --python-version 3.12 --only-binary=:all: --target "$packages" "megatron-core==$release" \
            2> >(grep -v -E "WARNING: (Location|Url) .* is ignored|Looking in (links|indexes)" >&2)
        datasets=megatron/core/datasets
        if ! cmp -s "$base/$datasets/helpers.cpp" "$packages/$datasets/helpers.cpp"; then
            echo "tests/second_line/run.sh: helpers.cpp of megatron-core $release is another one; it must be compiled for this Python." >&2
            exit 1
        fi
        rm -f "$packages/$datasets"/helpers_cpp.*.so
        cp "$base/$datasets"/helpers_cpp.*.so "$packages/$datasets/"
        echo "import site; site.addsitedir('$base')" > "$packages/cpu_environment.pth"
        # in the environment that it is beside, the package may come from another folder
        echo "$root" > "$packages/mindspeed_rl.pth"
        "$environment/bin/python" -m compileall -q -j 0 "$packages/megatron" > /dev/null 2>&1 || true
        echo "$wanted" > "$stamp"
    fi
}

stamp="$environment/installed"
python="${SECOND_LINE_PYTHON:-python3.12}" reason=""
if ! grep -q -x "megatron-core==$release" envs/cpu/requirements-py312.lock; then
    reason="as the Python files of this release run there"
elif [[ -f "$stamp" ]]; then
    reason="as before; remove $environment to try Python 3.12 again"
elif [[ -x "$environment/bin/python" ]]; then
    PYTHON="$environment/bin/python" bash envs/cpu/install.sh "$environment"
elif [[ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 12))' 2> /dev/null)" != True ]]; then
    reason="as there is no $python"
elif ! PYTHON="$python" bash envs/cpu/install.sh "$environment"; then
    reason="as the packages for Python 3.12 could not be installed (see above)"
    rm -rf "$environment"
fi
if [[ -n "$reason" ]]; then
    echo "[second line] megatron-core $release runs with the packages of $venv, $reason" >&2
    lay_before
fi
if [[ "${1:-}" == --set-up ]]; then exit 0; fi

found="$("$environment/bin/python" -c 'import importlib.metadata as m; print(m.version("megatron-core"))')"
if [[ "$found" != "$release" ]]; then
    echo "tests/second_line/run.sh: $environment has megatron-core $found, not $release." >&2
    exit 1
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$environment/bin:$PATH"

[[ "$release" == 0.17.1 ]] && list=(megatron-0.17.1 --extra) || list=(megatron-0.19.2 --all)  # another release runs what the newest does
files="$("$environment/bin/python" tests/parts.py "${list[@]}")"
mapfile -t paths <<< "$files"
select=(-m "not slow")
for argument in "$@"; do
    if [[ "$argument" != -* && -e "${argument%%::*}" ]]; then paths=(); fi
done
exec "$environment/bin/python" -m pytest -p no:cacheprovider "${select[@]}" ${paths[@]+"${paths[@]}"} "$@"
