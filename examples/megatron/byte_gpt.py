"""A byte-level GPT built and trained with megatron-core: groups, model, optimizer, step, a digest of every gradient.

Nothing here knows of ditron_train: `train` is a plain Megatron training loop, and is run natively and accelerated.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from corpus import Corpus
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_batch_on_this_cp_rank
from ulysses import UlyssesAttention

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.symm import close_all_arenas
from ditron_train.tools.fp8.recipes import fp8_options

__all__ = ["Job", "StepResult", "set_groups", "train"]

VOCABULARY = 256
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd and without pattern; as a signed 64-bit number


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        num_layers: Transformer layers.
        hidden_size: Width of the model.
        ffn_hidden_size: Width of the MLP.
        num_heads: Attention heads.
        sequence_length: Tokens (bytes) of a sample.
        batch_size: Samples of a microbatch on each data-parallel rank.
        num_steps: Optimizer steps.
        learning_rate: The optimizer's, reached linearly over the first `warmup_steps`.
        warmup_steps: Steps of rising learning rate; 0: none.
        dtype: Of parameters and activations.
        use_te: Transformer Engine's layers instead of megatron-core's own.
        tensor_parallel: Ranks that share every layer (with sequence parallelism if above 1).
        pipeline_parallel: Stages; above 1 a step has twice as many microbatches (1F1B).
        context_parallel: Ranks that share every sequence, exchanging heads for tokens around attention (a2a).
        expert_parallel: Ranks that share the experts.
        num_experts: Experts of every MLP, two of them a token; None: dense.
        distributed_optimizer: Adam's state sharded over the data-parallel ranks; gradients are reduced beside the
            backward pass and parameters gathered beside the forward pass.
        plain_ulysses: Context parallelism by plain all-to-alls around megatron-core's own attention (`ulysses`).
        seed: Of parameters and samples.
        fp8: Recipe in which Transformer Engine's linear layers and experts compute; None: in `dtype`.
        optimizer: ``adam``, or Megatron's ``muon`` or ``dist_muon`` (Adam for what is no matrix).
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    sequence_length: int
    batch_size: int
    num_steps: int
    learning_rate: float
    dtype: torch.dtype
    use_te: bool
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    num_experts: int | None = None
    optimizer: str = "adam"
    distributed_optimizer: bool = False
    plain_ulysses: bool = False
    seed: int = 1234
    warmup_steps: int = 0
    fp8: str | None = None

    @property
    def num_microbatches(self) -> int:
        """Of one step."""
        return 2 * self.pipeline_parallel if self.pipeline_parallel > 1 else 1

    @property
    def on_gpu(self) -> bool:
        """Whether this process trains on a GPU (the CPU shim is not installed)."""
        return not megatron_cpu.is_installed()


@dataclasses.dataclass(frozen=True)
class StepResult:
    """One step: mean loss over the data-parallel ranks, norm of all gradients, its duration, and 64 bits for each
    gradient of this rank."""

    loss: float
    gradient_norm: float
    time_ms: float
    gradients: dict[str, int]


_groups_of: list[tuple[int, ...]] = []


def set_groups(job: Job) -> None:
    """Makes megatron-core's process groups for `job`, unless those of the same sizes are there already
    (collective)."""
    sizes = (job.tensor_parallel, job.pipeline_parallel, job.context_parallel, job.expert_parallel)
    if _groups_of == [sizes]:
        return
    if _groups_of:
        close_all_arenas()
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.tensor_parallel,
        pipeline_model_parallel_size=job.pipeline_parallel,
        context_parallel_size=job.context_parallel,
        expert_model_parallel_size=job.expert_parallel,
        expert_tensor_parallel_size=1 if job.num_experts else None,
    )
    _groups_of[:] = [sizes]


def _config(job: Job) -> TransformerConfig:
    options: dict[str, Any] = dict(megatron_cpu.CPU_CONFIG)
    if job.on_gpu:
        options.update(use_cpu_initialization=False, deterministic_mode=True)
    if job.num_experts:
        options.update(
            num_moe_experts=job.num_experts,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_ffn_hidden_size=job.ffn_hidden_size // 2,
            moe_grouped_gemm=job.use_te,
            expert_model_parallel_size=job.expert_parallel,
            expert_tensor_parallel_size=1,
        )
    if job.fp8:
        options.update(fp8_options(job.fp8))
    return TransformerConfig(
        num_layers=job.num_layers,
        hidden_size=job.hidden_size,
        ffn_hidden_size=job.ffn_hidden_size,
        num_attention_heads=job.num_heads,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=job.dtype,
        pipeline_dtype=job.dtype,
        bf16=job.dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=job.tensor_parallel,
        sequence_parallel=job.tensor_parallel > 1,
        pipeline_model_parallel_size=job.pipeline_parallel,
        context_parallel_size=job.context_parallel,
        cp_comm_type="a2a" if job.context_parallel > 1 else None,
        **options,
    )


def _build_model(job: Job, config: TransformerConfig) -> Any:
    if job.use_te:
        spec = get_gpt_layer_with_transformer_engine_spec(job.num_experts, moe_grouped_gemm=bool(job.num_experts))
    else:
        spec = get_gpt_layer_local_spec(job.num_experts, moe_grouped_gemm=False, normalization=config.normalization)
        if job.plain_ulysses:
            spec.submodules.self_attention.submodules.core_attention = UlyssesAttention
    model: Any = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=job.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if job.on_gpu:
        model.cuda(torch.cuda.current_device())
    if config.bf16:
        model = Float16Module(config, model)
    sharded = job.distributed_optimizer
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=sharded,
        overlap_param_gather=sharded,
    )
    model = DistributedDataParallel(config, ddp_config, model)
    config.no_sync_func = model.no_sync if sharded else None
    return model


def _build_optimizer(job: Job, model: Any) -> Any:
    config = OptimizerConfig(
        optimizer=job.optimizer,
        lr=job.learning_rate,
        min_lr=job.learning_rate,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=job.dtype == torch.bfloat16,
        params_dtype=job.dtype,
        use_distributed_optimizer=job.distributed_optimizer,
        overlap_param_gather=job.distributed_optimizer,
        muon_fp32_matmul_prec="medium"
        if job.dtype == torch.bfloat16
        else "highest",  # bf16 products, or fp32 on a CPU
    )
    if job.optimizer == "adam":
        return get_megatron_optimizer(config, [model])
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(config, [model], layer_wise_distributed_optimizer=job.optimizer == "dist_muon")


# Newer versions of Megatron-core ask whether sequences are dealt out by their lengths.
_NO_HYBRID = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}


def _causal_mask(job: Job, device: torch.device) -> torch.Tensor | None:
    """True where attention is forbidden; Transformer Engine's attention and the fused softmax need none."""
    if job.use_te:
        return None
    return torch.ones(job.sequence_length, job.sequence_length, dtype=torch.bool, device=device).triu(1)[None, None]


def _forward_step(mask: torch.Tensor | None, batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = get_batch_on_this_cp_rank(
        next(batches), cp_group=parallel_state.get_context_parallel_group(), **_NO_HYBRID
    )
    losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])

    def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = (output.float() * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        reported = mean.detach().clone() / group.size()
        dist.all_reduce(reported, group=group)
        # The schedule multiplies by the context parallel size, for losses that are divided by all tokens of a
        # sequence.
        return mean / parallel_state.get_context_parallel_world_size(), {"loss": reported}

    return losses, mean_loss


def _loss_of_step(losses: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Mean over the microbatches, known to the last stage, given to all of them."""
    loss = torch.zeros(1, device=device)
    if losses:
        loss += torch.stack([entry["loss"] for entry in losses]).mean()
    dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
    return loss.item()


def _digest(gradient: torch.Tensor) -> int:
    """64 bits of a tensor's bits: any single changed element changes them, others all but certainly.

    Each 32-bit pattern is multiplied by an odd pseudo-random number made from its index, and all are added modulo
    2**64.
    """
    total = 0
    for part_index, part in enumerate(gradient.detach().reshape(-1).split(1 << 24)):
        bits = part.float().view(torch.int32).long()
        index = torch.arange(part.numel(), device=part.device, dtype=torch.int64) + (part_index << 24)
        weights = (index * _GOLDEN) | 1
        total += int((bits * weights).sum().item())
    return total % 2**64


def _gradients(model: Any) -> dict[str, int]:
    return {name: _digest(p.main_grad) for name, p in model.named_parameters() if p.requires_grad}


def train(job: Job, corpus: Corpus, on_step: Callable[[StepResult], None]) -> list[StepResult]:
    """Builds the model from `job.seed`, trains it, and returns what every step gave on this rank."""
    set_groups(job)
    megatron_cpu.seed(job.seed)
    device = torch.device("cuda", torch.cuda.current_device()) if job.on_gpu else torch.device("cpu")
    config = _config(job)
    model = _build_model(job, config)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = _build_optimizer(job, model)
    forward_step = partial(_forward_step, _causal_mask(job, device))
    data_rank = parallel_state.get_data_parallel_rank()
    results = []
    model.train()
    for step in range(job.num_steps):
        batches = [corpus.batch(step * job.num_microbatches + i, job.batch_size, data_rank, device)
                   for i in range(job.num_microbatches)]  # fmt: skip
        model.zero_grad_buffer()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=job.num_microbatches,
            seq_length=job.sequence_length,
            micro_batch_size=job.batch_size,
            forward_only=False,
        )
        torch.cuda.synchronize()
        elapsed_ms = (time.perf_counter() - start) * 1e3
        gradients = _gradients(model)
        if job.warmup_steps:
            for group in optimizer.param_groups:
                group["lr"] = job.learning_rate * min(1.0, (step + 1) / job.warmup_steps)
        start = time.perf_counter()
        _, gradient_norm, _ = optimizer.step()
        torch.cuda.synchronize()
        elapsed_ms += (time.perf_counter() - start) * 1e3
        results.append(StepResult(_loss_of_step(losses, device), float(gradient_norm), elapsed_ms, gradients))
        on_step(results[-1])
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return results
