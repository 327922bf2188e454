#!/usr/bin/env bash
# Installs the suite on Ascend 950 (A5), eight devices a node. Arguments: envs/npu_common/install.sh.
# 950DT; for 950PR set SOC_VERSION=ascend950pr_9589. Not verified on NPU hardware: what is known is in docs/ascend.md.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../npu_common/install.sh" --chip a5 "$@"
