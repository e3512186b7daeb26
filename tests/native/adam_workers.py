"""Bodies of the tests of feature ``adam``: small GPTs with the distributed optimizer and a stand-in of Transformer
Engine's FusedAdam, trained natively and with ``adam``."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
import combination_workers as jobs

from tests.support.exact import exact_sums
from tests.support.fused_adam import FusedAdam

BF16 = jobs.Case("adam", {}, dtype=torch.bfloat16, sharded=True)


@contextlib.contextmanager
def _with_fused_adam(options: dict[str, Any], overlaps: bool, built: list[Any]) -> Iterator[None]:
    """Megatron finds the stand-in installed. ``options``: of ``OptimizerConfig``; ``built``: gets the optimizers."""
    from megatron.core import distributed, optimizer
    from megatron.core.optimizer import distrib_optimizer

    native_config = distributed.DistributedDataParallelConfig

    def ddp_config(**given: Any) -> Any:
        return native_config(**{**given, "overlap_grad_reduce": overlaps, "overlap_param_gather": overlaps})

    def build(case: jobs.Case, config: Any, models: list[Any]) -> Any:
        given = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.1, **options}
        found = optimizer.get_megatron_optimizer(
            optimizer.OptimizerConfig(
                optimizer="adam", bf16=config.bf16, params_dtype=case.dtype, use_distributed_optimizer=case.sharded,
                overlap_param_gather=overlaps, **given,
            ),
            models,
        )  # fmt: skip

        def step() -> Any:
            for group in found.param_groups:
                group["lr"] *= 1.25
            return type(found).step(found)

        found.step = step
        built.append(found)
        return found

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (optimizer, "Adam", FusedAdam),
            (optimizer, "USING_PYTORCH_OPTIMIZER", False),
            (distrib_optimizer, "Adam", FusedAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_TE_OPTIMIZER", True),
            (distributed, "DistributedDataParallelConfig", ddp_config),
            (jobs, "_optimizer", build),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _state(optimizer: Any) -> dict[str, Any]:
    """Everything that a checkpoint would hold, and the model's parameters."""
    seen: dict[str, Any] = {}
    for number, one in enumerate(optimizer.chained_optimizers):
        seen[f"{number} groups"] = [
            {key: value for key, value in group.items() if key != "params"} for group in one.param_groups
        ]
        for place, param in enumerate(one.get_parameters()):
            states = {"main": param.detach(), **one.optimizer.state[param]}
            seen.update({f"{number} {place} {name}": value.clone() for name, value in states.items()})
        for buffer in getattr(one, "buffers", ()):
            seen[f"{number} buffer {len(seen)}"] = buffer.param_data.clone()
    return seen


def _differ(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name, value in one.items()
        if not (torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name])
    ]


def _train(case: jobs.Case, options: dict[str, Any], overlaps: bool, steps: int, fused: bool) -> dict[str, Any]:
    built: list[Any] = []
    with _with_fused_adam(options, overlaps, built):
        seen = jobs.train(case, fused=fused, steps=steps)
        return {**seen, **_state(built[0])}


def compared(
    case: jobs.Case = BF16, options: dict[str, Any] | None = None, overlaps: bool = True, steps: int = 3
) -> tuple[list[str], list[str], int]:
    """What differs between native training and training with ``adam``, what it logs, how many steps were fused."""
    import ditron_train.megatron as plugin
    from ditron_train.megatron.adam import optimizer as own
    from ditron_train.policy import gate
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    with exact_sums(), model_parallel(**{f"{name}_size": size for name, size in case.sizes.items()}):
        native = _train(case, options or {}, overlaps, steps, fused=False)
        logs._seen.clear()
        step = mock.Mock(side_effect=own._step_fused)
        with jobs._log_lines() as lines, mock.patch.object(own, "_step_fused", step):
            plugin.apply(features=case.features)
            try:
                fused = _train(case, options or {}, overlaps, steps, fused=True)
            finally:
                plugin.restore()
                gate.forget("adam")
    assert own.native_module.clip_grad_by_total_norm_fp32 is own._native_clip
    return _differ(native, fused), [line for line in lines if line.startswith("adam")], step.call_count


def loaded(folder: Path) -> list[str]:
    """What differs after two steps with ``adam``, a checkpoint, and two native ones; from four native ones."""
    import ditron_train.megatron as plugin
    from ditron_train.policy import gate
    from tests.support.model_parallel import model_parallel

    def run(features: str | None, steps: int, checkpoint: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        built: list[Any] = []
        with _with_fused_adam({}, False, built):
            build = jobs._optimizer

            def load(case: Any, config: Any, models: list[Any]) -> Any:
                found = build(case, config, models)
                if checkpoint is not None:
                    for model, values in zip(models, checkpoint["model"]):
                        model.load_state_dict(values)
                    found.load_state_dict(checkpoint["optimizer"])
                    found.load_parameter_state(str(folder / "state.pt"))
                    for group, lr in zip(found.param_groups, checkpoint["lr"]):
                        group["lr"] = lr
                built.append(models)
                return found

            with mock.patch.object(jobs, "_optimizer", load):
                if features:
                    plugin.apply(features=features)
                try:
                    jobs.train(BF16, fused=False, steps=steps)
                finally:
                    plugin.restore()
                    gate.forget("adam")
            saved = {
                "model": [copy.deepcopy(model.state_dict()) for model in built[1]],
                "optimizer": copy.deepcopy(built[0].state_dict()),
                "lr": [group["lr"] for group in built[0].param_groups],
            }
            return (built[0], saved) if checkpoint is None else (built[0], _state(built[0]))

    with exact_sums(), model_parallel():
        native, saved_natively = run(None, 2)
        native.save_parameter_state(str(folder / "state.pt"))
        expected = run(None, 2, saved_natively)[1]
        fused, saved = run("adam", 2)
        fused.save_parameter_state(str(folder / "state.pt"))
        return _differ(expected, run(None, 2, saved)[1])


def with_muon(layer_wise: bool, clip_grad: float, features: str) -> tuple[list[str], int, list[str]]:
    """Weights that differ after four steps of Muon, whose AdamW part is a FusedAdam; its fused steps; what is
    logged."""
    import muon_workers

    import ditron_train.megatron as plugin
    from ditron_train.cpu import emerging_optimizers, megatron_shim
    from ditron_train.policy import gate
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    assert emerging_optimizers.install()
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer as Native

    from ditron_train.megatron.adam import optimizer as own

    evenly = mock.patch.object(Native, "allgather_params", Native.broadcast_params)  # gloo has no uneven all-gather

    def train() -> tuple[dict[str, torch.Tensor], list[float]]:
        with _with_fused_adam({}, False, []), evenly:
            return muon_workers._train(layer_wise, bf16=True, clip_grad=clip_grad)[:2]

    with megatron_shim.megatron_on_cpu(), exact_sums(), model_parallel():
        native, losses = train()
        logs._seen.clear()
        step = mock.Mock(side_effect=own._step_fused)
        with jobs._log_lines() as lines, mock.patch.object(own, "_step_fused", step):
            plugin.apply(features=features)
            try:
                fused, losses_fused = train()
            finally:
                plugin.restore()
                gate.forget("adam")
    differ = [name for name, value in native.items() if not torch.equal(value, fused[name])]
    return differ + ["losses"] * (losses != losses_fused), step.call_count, [one for one in lines if "adam" in one]
