# Source this on Ascend 950 (A5), eight devices a node. Not verified on NPU hardware.
export NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
# shellcheck source=../npu_common/set_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../npu_common/set_env.sh"
