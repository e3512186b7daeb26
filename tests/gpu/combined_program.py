"""One rank of a job by Megatron's combined 1F1B schedule (`test_ep` starts it; its environment names the ranks, the
policy and ``DELAY``: whether weight gradients are delayed). The last line that it prints is what it found, as JSON:
which steps have other bits than natively, which were fused, the policy's log lines.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ditron_train.megatron as plugin
from ditron_train.tools.bench.megatron_ep import expert_parallel_world
from ditron_train.tools.cases.ep_moves import moe_config

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
from ep_workers import COMBINED, combined_steps, gpt, lines_logged  # noqa: E402

_STEPS, _MICROBATCHES = 19, 6


def _config() -> object:
    options = dict(COMBINED, num_attention_heads=8, delay_wgrad_compute=os.environ["DELAY"] == "on")
    sizes = dict(hidden=1024, ffn_hidden=512, num_experts=4 * dist.get_world_size(), topk=3)
    return moe_config(**sizes, dtype=torch.bfloat16, fused=True, **options)


def main() -> None:
    """Runs the steps."""
    logging.basicConfig(stream=sys.stderr)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    wrong, fused_steps = [], []
    with expert_parallel_world(), lines_logged() as lines:
        native = gpt(_config(), te=True, vocabulary=512, sequence=2048).cuda().bfloat16()
        plugin.apply(features="ep")
        fused = gpt(_config(), te=True, vocabulary=512, sequence=2048).cuda().bfloat16()
        plugin.restore()
        wanted, again = (combined_steps(native, _MICROBATCHES, device="cuda") for _ in range(2))
        assert all(map(torch.equal, wanted, again)), "native does not repeat itself"
        for step in range(_STEPS):
            results = combined_steps(fused, _MICROBATCHES, device="cuda")
            wrong += [step] * (not all(map(torch.equal, wanted, results)))
            dispatchers = [layer.mlp.token_dispatcher for layer in fused.decoder.layers[1:]]
            taken = {dispatcher.ep_context is not None for dispatcher in dispatchers}
            fused_steps.append(taken == {True})
            assert len(taken) == 1, "all layers of a kind take one path"
        torch.cuda.synchronize()
    print(json.dumps({"wrong": wrong, "fused": fused_steps, "lines": [one for one in lines if "in pieces" in one]}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
