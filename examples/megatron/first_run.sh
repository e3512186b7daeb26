#!/usr/bin/env bash
# The first thing to run on two real machines: verifies the ops, measures groups that span nodes, and packs a report for an issue.
# Start it on every node with the same variables:
#   export NNODES=2 MASTER_ADDR=node0
#   NODE_RANK=0 bash examples/megatron/first_run.sh
#   NODE_RANK=1 bash examples/megatron/first_run.sh
# It leaves first_run-<rank of the node>.zip in the current folder. Results and logs are in first_run-<rank of the node>/.
set -euo pipefail
: "${NNODES:?how many nodes}" "${NODE_RANK:?which of them, from 0}" "${MASTER_ADDR:?address of node 0}"
unset CDPATH
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export NCCL_ALGO=${NCCL_ALGO:-Ring} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} DITRON_TIMEOUT_S=${DITRON_TIMEOUT_S:-100}
python=${PYTHON:-python3}
out=$PWD/first_run-$NODE_RANK
mkdir -p "$out"
status=0
run() { # name, nodes, then the module and its arguments
  local name=$1 nodes=$2
  shift 2
  local rank=$NODE_RANK master=$MASTER_ADDR
  if [ "$nodes" = 1 ]; then
    rank=0 master=127.0.0.1
  fi
  echo "[first_run] $name"
  "$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$rank" --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --rdzv-backend static --master-addr "$master" --master-port "${MASTER_PORT:-29523}" \
    -m "$@" 2>&1 | tee "$out/$name.log" || {
    status=$?
    echo "[first_run] $name ended with status $status"
  }
}
run verify 1 ditron_train verify --output "$out" ${VERIFY:-} # the ops inside this node
run nodes "$NNODES" tests.nodes.bench_nodes --output "$out" ${BENCH:-} # the groups that span nodes
"$python" -m ditron_train report "$out" --output "$PWD/first_run-$NODE_RANK.zip"
exit "$status"
