"""The rows ``pipeline_step`` of ``bench pp``: steps of Megatron's schedules, natively and with our communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.megatron import apply, restore
from ditron_train.tools.layer_config import layer_config
from ditron_train.tools.results import Row
from ditron_train.tools.session import BenchSession

_GPU_SIZES = dict(hidden_size=4096, num_attention_heads=32, ffn_hidden_size=11008)
_CPU_SIZES = dict(hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
_VOCABULARY = 1024
_LAYERS_A_STAGE = 2


@contextmanager
def _world(session: BenchSession, chunks: int | None) -> Iterator[None]:
    if session.device.type == "cpu":
        megatron_cpu.install()
    megatron_cpu.allow_torch_norm_with_sequence_parallel()  # torch's norm in the parameters' type
    sizes = dict(pipeline_model_parallel_size=session.world_size, virtual_pipeline_model_parallel_size=chunks)
    with megatron_cpu.parallel_groups(**sizes):
        yield


class _Step:
    """One training step of a GPT whose stages are alike, without the optimizer."""

    def __init__(self, session: BenchSession, chunks: int | None, overlap: bool) -> None:
        on_gpu = session.device.type == "cuda"
        world = session.world_size
        self.sequence = 2048 if on_gpu else 16
        self.microbatches = 2 * world
        self._chunks = chunks
        sizes = dict(num_layers=_LAYERS_A_STAGE * world, **(_GPU_SIZES if on_gpu else _CPU_SIZES))
        stages = dict(pipeline_model_parallel_size=world, virtual_pipeline_model_parallel_size=chunks)
        messages = dict(
            microbatch_group_size_per_vp_stage=world if chunks else None,
            batch_p2p_comm=not overlap and (chunks is None or world > 2),
            overlap_p2p_comm=overlap,
            deallocate_pipeline_outputs=not overlap,  # native would free what it has not sent yet
        )
        options = {**sizes, **stages, **messages, **megatron_cpu.CPU_CONFIG, "use_cpu_initialization": not on_gpu}
        config = layer_config(session.dtype, **options)
        megatron_cpu.seed(5)
        self._models = [self._model(config, chunk).to(session.device) for chunk in range(chunks or 1)]
        generator = torch.Generator().manual_seed(9)
        tokens = torch.randint(0, _VOCABULARY, (1, self.sequence + 1), device="cpu", generator=generator).to(
            session.device
        )
        positions = torch.arange(self.sequence, device=session.device)[None]
        mask = torch.ones(self.sequence, self.sequence, device=session.device).triu(1).bool()[None, None]
        self._batch = (tokens[:, :-1], positions, mask, tokens[:, 1:])

    def _model(self, config: TransformerConfig, chunk: int) -> GPTModel:
        stage: dict[str, Any] = {} if self._chunks is None else {"ignore_virtual": False, "vp_stage": chunk}
        return GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=_VOCABULARY,
            max_sequence_length=self.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **({} if self._chunks is None else {"vp_stage": chunk}),
        )

    def _forward_step(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens, positions, mask, labels = self._batch

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return model(tokens, positions, mask, labels=labels), loss_function

    def __call__(self, index: int) -> list[torch.Tensor]:
        """Runs one step; returns the losses of its microbatches (last stage)."""
        for model in self._models:
            for parameter in model.parameters():
                parameter.grad = None
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[None] * len(self._models) if self._chunks else None,
            model=self._models if self._chunks else self._models[0],
            num_microbatches=self.microbatches,
            seq_length=self.sequence,
            micro_batch_size=1,
            forward_only=False,
        )
        return [entry["loss"] for entry in losses]

    def gradients(self) -> list[torch.Tensor]:
        """Gradients of this rank's parameters after the last step."""
        return [parameter.grad.clone() for model in self._models for parameter in model.parameters()]


class _Switch:
    """One step by both paths; the features change between series of calls, not in each."""

    def __init__(self, step: _Step) -> None:
        self._step = step
        self._is_fused = False

    def run(self, is_fused: bool, index: int) -> list[torch.Tensor]:
        """One step, with megatron-core's communicator or with the fused path."""
        if is_fused != self._is_fused:
            apply(features="pp") if is_fused else restore()
            self._is_fused = is_fused
        return self._step(index)


def step_rows(session: BenchSession) -> Iterator[Row]:
    """1F1B, and interleaved with two chunks without and with ``overlap_p2p_comm``."""
    for name, chunks, overlap in (("1f1b", None, False), ("interleaved", 2, False), ("interleaved, overlap", 2, True)):
        with _world(session, chunks):
            step = _Step(session, chunks, overlap)
            switch = _Switch(step)
            contenders = {"native": partial(switch.run, False), "fused": partial(switch.run, True)}
            native = [*contenders["native"](0), *step.gradients()]
            run = lambda index: [*contenders["fused"](index), *step.gradients()]  # noqa: B023, E731
            equal = session.equal_layer("pp", run, lambda _: native)  # noqa: B023
            timings = session.measure(contenders, interleaved=False)
            shape = {"tokens": step.sequence, "microbatches": step.microbatches, "layers_per_stage": _LAYERS_A_STAGE}
            yield session.row("pipeline_step", "forward_backward", name, shape, timings, equal)
