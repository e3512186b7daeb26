#!/usr/bin/env bash
# Megatron-LM's own unit tests, natively and with every feature on, under each policy: what passes natively and not with the fused path.
#   MEGATRON_LM=<checkout at tag core_v0.16.1> bash scripts/test_megatron.sh [--folder moe] [--seconds 480] [--help]
# Nothing is fetched. On GPUs with NCCL, without any on 2 CPU processes over gloo.
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
cd "$ROOT"
PYTHONPATH="$ROOT/tests/harness:$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$PY" -m megatron_tests "$@"
