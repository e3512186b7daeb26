"""Bodies of the tests of several features in one job: a small GPT with megatron-core's schedules, wrappers and
optimizers, trained natively and fused, evaluated between the steps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.exact import exact_sums
from tests.support.megatron_version import batch_on_this_cp_rank

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        features: As after ``--ditron``.
        sizes: Keywords of ``initialize_model_parallel``, without their ``_size``.
        layers: Transformer layers.
        dtype: Of parameters and activations.
        config: More of ``TransformerConfig``.
        fused: Of it, what only our run has.
        needed: Features that the native run cannot do without.
        tied: Embedding and output layer share their weight.
        mtp: With a layer that predicts one token more.
        variable: Microbatches of several lengths.
        sharded: The distributed optimizer, its communication overlapped.
        loss_scale: Of fp16 at first.
    """

    features: str
    sizes: dict[str, int]
    layers: int = 2
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    fused: dict[str, Any] = dataclasses.field(default_factory=dict)
    needed: str | None = None
    tied: bool = False
    mtp: bool = False
    variable: bool = False
    sharded: bool = False
    loss_scale: float = 1024.0

    def size(self, name: str) -> int:
        """Ranks of one kind of group."""
        return self.sizes.get(f"{name}_parallel", 1)


def _config(case: Case, fused: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    options = {
        **CPU_CONFIG,
        "num_layers": case.layers,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 8,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "params_dtype": case.dtype,
        "pipeline_dtype": case.dtype,
        "fp16": case.dtype == torch.float16,
        "bf16": case.dtype == torch.bfloat16,
        "sequence_parallel": case.size("tensor_model") > 1,
        "batch_p2p_comm": False,
        "cp_comm_type": "a2a" if case.size("context") > 1 else None,
        "moe_token_dispatcher_type": "alltoall",
        "mtp_num_layers": 1 if case.mtp else None,
        **{f"{name}_size": size for name, size in case.sizes.items()},
        **case.config,
        **(case.fused if fused else {}),
    }
    return TransformerConfig(**options)


def _models(case: Case, config: Any) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.module import Float16Module

    from ditron_train.cpu import megatron_shim as megatron_cpu

    megatron_cpu.seed(7)
    chunks = case.sizes.get("virtual_pipeline_model_parallel", 1)
    models = []
    for chunk in range(chunks):
        stage = {"vp_stage": chunk} if chunks > 1 else {}
        options = dict(stage, ignore_virtual=False) if stage else {}
        spec = get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)
        model: Any = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**options),
            post_process=parallel_state.is_pipeline_last_stage(**options),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=case.tied,
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **stage)
            if case.mtp
            else None,
            **stage,
        )
        if config.fp16 or config.bf16:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=case.sharded, overlap_grad_reduce=case.sharded,
            overlap_param_gather=case.sharded,
        )  # fmt: skip
        models.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    return models


def _optimizer(case: Case, config: Any, models: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    # SGD: Adam divides small gradients by their own size, and shows a rounding as a whole step.
    options = OptimizerConfig(
        optimizer="adam" if case.sharded else "sgd",
        lr=1e-3 if case.sharded else 0.1,
        clip_grad=1.0,
        fp16=config.fp16,
        bf16=config.bf16,
        params_dtype=case.dtype,
        use_distributed_optimizer=case.sharded,
        overlap_param_gather=case.sharded,
        initial_loss_scale=case.loss_scale,
        min_loss_scale=1.0,
        loss_scale_window=2,
        hysteresis=1,
    )
    return get_megatron_optimizer(options, models)


def _batches(case: Case, step: int, number: int) -> Iterator[dict[str, torch.Tensor]]:
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(100 + step + 1000 * parallel_state.get_data_parallel_rank())
    for index in range(number):
        length = SEQUENCE - 4 * (index % 3) if case.variable else SEQUENCE
        tokens = torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=generator)
        positions = torch.arange(length).expand(BATCH, length)
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "positions": positions,
            "loss_mask": torch.ones(BATCH, length),
        }
        mask = torch.ones(length, length).triu(1).bool()[None, None]
        yield {**batch_on_this_cp_rank({name: value.contiguous() for name, value in batch.items()}), "mask": mask}


def _forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(iterator)
    output = model(
        batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"], loss_mask=batch["loss_mask"]
    )

    def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return output, loss_function


def train(case: Case, fused: bool, steps: int = 2) -> dict[str, torch.Tensor]:
    """Losses, gradients and norms of every step, losses of evaluations before and between them, and the parameters at
    the end."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from ditron_train.cpu import megatron_shim as megatron_cpu

    config = _config(case, fused)
    models = _models(case, config)
    optimizer = _optimizer(case, config, models)
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    if case.sharded:
        config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
    run_schedule, microbatches = get_forward_backward_func(), 4 if len(models) > 1 else 3 if case.variable else 2
    megatron_cpu.seed(99)  # of dropout
    seen: dict[str, torch.Tensor] = {}

    def run(step: int, name: str, forward_only: bool) -> None:
        iterators = [_batches(case, step, microbatches) for _ in models]
        losses = run_schedule(
            forward_step_func=_forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        seen.update({f"{name} loss of microbatch {index}": entry["loss"] for index, entry in enumerate(losses)})

    def evaluate(step: int) -> None:
        for model in models:
            model.eval()
        # Native's tensors that are kept are of the mode that comes first, RoPE's tables among them, which
        # recomputation saves; the fused path must not be.
        with torch.inference_mode() if fused and config.recompute_granularity is None else torch.no_grad():
            run(1000 + step, f"evaluation {step}", forward_only=True)

    evaluate(0)
    for step in range(1, steps + 1):
        for model in models:
            model.train()
            model.zero_grad_buffer()
        optimizer.zero_grad()
        run(step, f"step {step}", forward_only=False)
        parameters = [
            (f"{chunk}.{name}", p) for chunk, model in enumerate(models) for name, p in model.named_parameters()
        ]
        seen.update({f"step {step} gradient of {name}": p.main_grad.clone() for name, p in parameters})
        stepped, norm, _ = optimizer.step()
        seen[f"step {step} norm"] = torch.tensor([float(stepped), float(norm or 0.0)])
        evaluate(step)
    if not case.sharded:
        seen.update({f"parameter {name}": p.detach().clone() for name, p in parameters})
    return seen


def differences(case: Case) -> tuple[list[str], list[str], bool]:
    """What differs between the native run and the fused one; what the fused run logged; whether a step was skipped, as
    after an overflow in fp16."""
    import ditron_train.megatron as plugin
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    with contextlib.ExitStack() as stack:
        stack.enter_context(exact_sums())
        stack.enter_context(model_parallel(**{f"{name}_size": size for name, size in case.sizes.items()}))
        if case.needed is not None:
            plugin.apply(features=case.needed)
        native = train(case, fused=False)
        plugin.restore()
        lines = stack.enter_context(_log_lines())
        logs._seen.clear()
        plugin.apply(features=case.features)
        fused = train(case, fused=True)
    assert native.keys() == fused.keys()
    differ = []
    for name, expected in native.items():
        if expected.isfinite().all():
            if not torch.equal(expected, fused[name]):
                differ.append(f"{name}: {expected.flatten()[:3]} and {fused[name].flatten()[:3]}")
        elif not torch.equal(expected.isfinite(), fused[name].isfinite()):
            differ.append(f"{name}: infinite elsewhere")
    return differ, lines, any(name.endswith("norm") and value[0] == 0 for name, value in fused.items())


@contextlib.contextmanager
def _log_lines() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ditron_train")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
