#!/usr/bin/env bash
# One node's torchrun agent, whose ranks run a Megatron script under the launcher; start it on every node with the same arguments:
#   export PYTHONPATH=/path/to/Megatron-LM NNODES=2 MASTER_ADDR=node0 SHARED=/shared/job1
#   NODE_RANK=0 bash examples/megatron/node.sh /path/to/Megatron-LM/pretrain_gpt.py --ditron tp,ep [its arguments]
#   NODE_RANK=1 bash examples/megatron/node.sh /path/to/Megatron-LM/pretrain_gpt.py --ditron tp,ep [its arguments]
# SHARED is a folder that all nodes see: decisions of one run are the next one's there, and every rank leaves its last calls.
set -euo pipefail
: "${NNODES:?how many nodes}" "${NODE_RANK:?which of them, from 0}" "${MASTER_ADDR:?address of node 0}"
: "${SHARED:?a folder that all nodes share}"
unset CDPATH
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$SHARED/postmortem"
# All that ranks have to be told alike stands here: they compare it when the job starts.
export DITRON_PLAN=${DITRON_PLAN:-$SHARED/plan.json} DITRON_POSTMORTEM=${DITRON_POSTMORTEM:-$SHARED/postmortem}
export DITRON_POLICY=${DITRON_POLICY:-strict} DITRON_TIMEOUT_S=${DITRON_TIMEOUT_S:-100}
export NCCL_ALGO=${NCCL_ALGO:-Ring} # sums in an order that can be proven
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${PYTHON:-python3}" -m torch.distributed.run \
  --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "${GPUS_PER_NODE:-8}" \
  --rdzv-backend static --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29519}" \
  -m ditron_train.megatron.run "$@"
