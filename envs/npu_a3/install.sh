#!/usr/bin/env bash
# Installs the suite on Atlas A3 (910C), sixteen dies a node: one card is two dies. Arguments: envs/npu_common/install.sh.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../npu_common/install.sh" --chip a3 "$@"
