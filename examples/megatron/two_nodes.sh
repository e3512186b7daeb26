#!/usr/bin/env bash
# Two nodes that one machine simulates: two torchrun agents with half of the GPUs each (one CPU process each if there are none).
# NCCL_HOSTID makes NCCL treat them as different hosts, so that what crosses the border really takes the network path.
#   bash examples/megatron/two_nodes.sh [arguments of examples/megatron/quickstart.py]
# On two real machines run one of the two commands on each, with --node-rank, and the first one's address.
set -euo pipefail
unset CDPATH
root=$(cd "$(dirname "$0")/../.." && pwd) # the current folder stays: files of the command line are the caller's
python=${PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
half=$((gpus / 2))
if [ "$half" = 0 ]; then
  half=1
  export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
fi
all=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus > 0 ? gpus - 1 : 0)))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo

agent() { # node rank, then the arguments of the job
  local node=$1
  shift
  local visible=
  if [ "$gpus" -gt 1 ]; then
    visible=$(cut -d, -f "$((node * half + 1))-$((node * half + half))" <<<"$all")
  fi
  CUDA_VISIBLE_DEVICES=$visible NCCL_HOSTID="node$node" "$python" -m torch.distributed.run \
    --nnodes 2 --node-rank "$node" --nproc-per-node "$half" \
    --rdzv-backend static --master-addr 127.0.0.1 --master-port "${MASTER_PORT:-29517}" \
    "$root/examples/megatron/quickstart.py" "$@"
}

agent 1 "$@" &
second=$!
trap 'kill "$second" 2>/dev/null || true' EXIT
agent 0 "$@"
wait "$second"
