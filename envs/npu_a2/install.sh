#!/usr/bin/env bash
# Installs the suite on Atlas A2 (910B), eight dies a node. Arguments: envs/npu_common/install.sh.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../npu_common/install.sh" --chip a2 "$@"
