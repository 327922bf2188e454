# Source this on Atlas A2 (910B), eight dies a node.
export NPUS_PER_NODE="${NPUS_PER_NODE:-8}"
# shellcheck source=../npu_common/set_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../npu_common/set_env.sh"
