#!/usr/bin/env bash
# A Ray cluster by hand, for those who want to see it: run this on every node with the same variables, then train on the
# head with RAY_ADDRESS set. `mindspeed-rl launch` does the same with checks, deadlines and a clean end.
#   MASTER_ADDR=10.0.0.4 SOCKET_IFNAME=enp189s0f0 NPUS_PER_NODE=16 bash examples/mcore/ray_cluster.sh
# The node stays in the cluster until this script is stopped (Ctrl-C); nothing else on the machine is touched.
set -euo pipefail

MASTER_ADDR="${MASTER_ADDR:?address of the head node}"
MASTER_PORT="${MASTER_PORT:-6766}"
NPUS_PER_NODE="${NPUS_PER_NODE:-16}"
SOCKET_IFNAME="${SOCKET_IFNAME:-}"

if [[ -n "$SOCKET_IFNAME" ]]; then
    export HCCL_SOCKET_IFNAME="$SOCKET_IFNAME" GLOO_SOCKET_IFNAME="$SOCKET_IFNAME" TP_SOCKET_IFNAME="$SOCKET_IFNAME"
fi
ulimit -n 32768 2>/dev/null || true

COMMON_ARGS=(--block --disable-usage-stats --resources "{\"NPU\": $NPUS_PER_NODE}")
if hostname -I | tr ' ' '\n' | grep -qxF "$MASTER_ADDR" || [[ "$MASTER_ADDR" == "$(hostname)" || "$MASTER_ADDR" == 127.0.0.1 ]]; then
    COMMAND=(ray start --head --node-ip-address "$MASTER_ADDR" --port "$MASTER_PORT" --include-dashboard false "${COMMON_ARGS[@]}")
else
    COMMAND=(ray start --address "$MASTER_ADDR:$MASTER_PORT" "${COMMON_ARGS[@]}")
fi

printf '%q ' "${COMMAND[@]}"
printf '\n'
[[ -n "${DRY_RUN:-}" ]] || exec "${COMMAND[@]}"
