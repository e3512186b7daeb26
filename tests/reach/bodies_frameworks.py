"""What workers do for `test_frameworks`: models, groups, lengths and steps as frameworks have them."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist

from tests.reach import models

#: Of each framework: alignment of a packed microbatch in tokens (times the tensor parallel ranks), groups, whether
#: log-probabilities precede training on the same microbatches, whether they run in inference mode.
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "Megatron-Bridge": dict(align=8, grid=True, log_probs=False),
    "NeMo-RL": dict(align=1, grid=False, log_probs=True),
    "verl": dict(align=1, grid=False, log_probs=True),
    "slime": dict(align=4, grid=False, log_probs=True),
    "ms-swift": dict(align=1, grid=False, log_probs=False),
}


def _lengths(align: int, step: int) -> list[int]:
    rng, unit = random.Random(step), align * dist.get_world_size()
    return [-(-rng.randint(10, 24) // unit) * unit for _ in range(2)]


def _losses(model: Any, framework: dict[str, Any], steps: int, first: int = 0) -> list[float]:
    """As trainers do it: by Megatron's schedule, gradients summed over microbatches, an optimizer step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses: list[float] = []

    def forward_step(microbatches, model):
        output = model(**next(microbatches))

        def loss_of(output):
            loss = output.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return output, loss_of

    for step in range(first, first + steps):
        lengths = _lengths(framework["align"], step)
        batches = [models.batch(length, 10 * step + number) for number, length in enumerate(lengths)]
        if framework["grid"]:  # 0.16's schedules ask parallel_state
            model.zero_grad()
            total = [model(**batch).float().mean() for batch in batches]
            sum(total).backward()
            losses += [float(one) for one in total]
        else:
            run = get_forward_backward_func()
            sizes = dict(num_microbatches=len(batches), seq_length=max(lengths), micro_batch_size=1)
            if framework["log_probs"]:
                model.eval()
                with torch.no_grad():
                    seen = run(forward_step_func=forward_step, data_iterator=iter(batches), model=[model],
                               forward_only=True, **sizes)  # fmt: skip
                losses += [float(one["loss"]) for one in seen]
                model.train()
            model.zero_grad()
            seen = run(forward_step_func=forward_step, data_iterator=iter(batches), model=[model],
                       forward_only=False, **sizes)  # fmt: skip
            losses += [float(one["loss"]) for one in seen]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is None:
                    continue
                if not getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "allreduce", True):
                    dist.all_reduce(parameter.grad)  # of parameters that all ranks have, as at the end of a step
                parameter -= 0.1 * parameter.grad
    return losses


def trained(name: str, options: dict[str, Any], features: str, steps: int = 2) -> dict[str, Any]:
    """Losses natively and with features on, and how often the fused path ran."""
    import ditron_train.megatron as ditron
    from ditron_train.megatron.plugin.fused_calls import FusedCalls
    from tests.support.model_parallel import model_parallel

    framework, sizes = FRAMEWORKS[name], dict(tensor_model_parallel_size=dist.get_world_size())
    if "experts" in options:
        sizes |= dict(expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1)
    with models.grid() if framework["grid"] else model_parallel(**sizes) as collection:
        native = _losses(models.gpt(collection, **options), framework, steps)
        ditron.apply(features=features)
        calls = FusedCalls()
        calls.install(features.split(","))
        fused = _losses(models.gpt(collection, **options), framework, steps)
        return dict(native=native, fused=fused, calls=calls.take())


def resumed(features: str, options: dict[str, Any], folder: str) -> dict[str, list[float]]:
    """Mid-training checkpoints: saved with features on and loaded with them off, and the other way round."""
    from megatron.core import dist_checkpointing

    import ditron_train.megatron as ditron
    from tests.support.model_parallel import model_parallel

    framework = FRAMEWORKS["verl"]
    sizes = dict(tensor_model_parallel_size=dist.get_world_size())
    if "experts" in options:
        sizes |= dict(expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1)
    found: dict[str, list[float]] = {}
    with model_parallel(**sizes):
        for saved_by in ("native", "fused"):
            if saved_by == "fused":
                ditron.apply(features=features)
            model = models.gpt(**options)
            before = _losses(model, framework, 1)
            path = f"{folder}/{saved_by}"
            os.makedirs(path, exist_ok=True)
            dist.barrier()
            dist_checkpointing.save(model.sharded_state_dict(), path)
            found[f"{saved_by} before"] = before
            found[f"{saved_by} on"] = _losses(model, framework, 1, first=1)
            ditron.restore()
            dist.barrier()
        for saved_by in ("native", "fused"):
            for loaded_by in ("native", "fused"):
                if loaded_by == "fused":
                    ditron.apply(features=features)
                model = models.gpt(**options)
                for parameter in model.parameters():
                    parameter.data.zero_()
                state = dist_checkpointing.load(model.sharded_state_dict(), f"{folder}/{saved_by}")
                model.load_state_dict(state)
                found[f"{saved_by} to {loaded_by}"] = _losses(model, framework, 1, first=1)
                ditron.restore()
                dist.barrier()
    return found
