# Source this on Atlas A3 (910C), sixteen dies a node: one card is two dies.
export NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
# shellcheck source=../npu_common/set_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/../npu_common/set_env.sh"
