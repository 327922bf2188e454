#!/usr/bin/env bash
# Optional packages over the CPU environment: bash envs/cpu/extras.sh [VENV_DIR [EXTRAS_DIR]]   (default: .venv .venv-extras)
#
# EXTRAS_DIR/bin/python has all of VENV_DIR and, before it, what extras.lock pins: SwanLab, MLflow, lm-eval, msprobe, reasoning-gym and
# the site of the documents. Some of it wants other versions than the CPU environment has, which stays as it is. EXTRAS_DIR/verifiers/bin/python
# has the verifiers library (verifiers.lock) and nothing else: it cannot be in one environment with vLLM. EXTRAS_DIR/verifiers4 has
# its release 0.4, whose environments are others, and uv, with which it starts agents. So have EXTRAS_DIR/agents
# (mini-swe-agent, a public agent program), EXTRAS_DIR/openenv (openenv-core) and EXTRAS_DIR/sandboxes (clients of E2B, Daytona and
# SandboxFusion) theirs.
# `tests/run.sh --all` uses both. Runs once: the second start sees the stamp and ends at once.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
lock_file="$root/envs/cpu/extras.lock"
others=(verifiers verifiers4 agents openenv sandboxes)
venv="${1:-$root/.venv}"
extras="${2:-$root/.venv-extras}"

bash "$root/envs/cpu/install.sh" "$venv"
venv="$(cd "$venv" && pwd)"
mkdir -p "$extras"
extras="$(cd "$extras" && pwd)"

exec 9> "$extras/.install.lock"
flock 9
stamp="$extras/.installed"
state="$({
    cat "$lock_file" "$root"/envs/cpu/{verifiers,verifiers4,agents,openenv,sandboxes}.lock "$root/envs/cpu/extras.sh" "$venv/.installed"
    echo "$root $venv $extras"
} | sha256sum | cut -d ' ' -f 1)"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$state" ]]; then
    exit 0
fi
rm -f "$stamp"

echo "[extras] $(grep -c == "$lock_file") packages over $venv" >&2
"$venv/bin/python" -m venv --clear --without-pip "$extras"
packages="$("$extras/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
base="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "import site; site.addsitedir('$base')" > "$packages/cpu_environment.pth"
# Full lists: nothing to resolve, and nothing is taken from the CPU environment.
install_into() { # an interpreter and its list
    "$venv/bin/python" -m pip --python "$1" install --quiet --disable-pip-version-check --no-input --no-deps --ignore-installed \
        -r "$2" 2> >(grep -v -E "WARNING: (Location|Url) .* is ignored|Looking in (links|indexes)" >&2)
}
install_into "$extras/bin/python" "$lock_file"

for name in "${others[@]}"; do
    echo "[extras] $(grep -c == "$root/envs/cpu/$name.lock") packages of their own for $name" >&2
    "$venv/bin/python" -m venv --clear --without-pip "$extras/$name"
    install_into "$extras/$name/bin/python" "$root/envs/cpu/$name.lock"
done

echo "$state" > "$stamp"
echo "[extras] done: $extras" >&2
