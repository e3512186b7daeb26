"""The native side of ``bench tp`` if it needs megatron-core: the linear layers' backward and a whole layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module

from ditron_train.cpu import megatron_shim as megatron_cpu
from ditron_train.megatron import apply
from ditron_train.megatron.tp.spec import native_column, native_row
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.tools.bench.layer_passes import LayerPasses, contenders
from ditron_train.tools.fp8.recipes import fp8_options
from ditron_train.tools.layer_config import layer_config
from ditron_train.tools.results import FP8_PREFIX, Row
from ditron_train.tools.session import BenchSession

_LLAMA_70B = dict(hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8)
_TOKENS = 8192
LAYER_SHAPE = {
    "tokens": _TOKENS if HAVE_TE else _TOKENS // 4,  # the local attention stores every score
    "hidden": _LLAMA_70B["hidden_size"],
    "ffn_hidden": _LLAMA_70B["ffn_hidden_size"],
}


@contextmanager
def megatron_world(session: BenchSession) -> Iterator[None]:
    """Megatron's groups with all ranks in one tensor-parallel group; without a GPU megatron-core is made to run
    there."""
    if session.device.type == "cpu":
        megatron_cpu.install()
    elif not HAVE_TE:
        megatron_cpu.allow_torch_norm_with_sequence_parallel()
    with megatron_cpu.parallel_groups(tensor_model_parallel_size=session.world_size):
        yield


def native_linear(op: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Megatron's column-parallel (``ag_gemm``) or row-parallel (``gemm_rs``) linear under sequence parallelism."""
    native = native_column if op == "ag_gemm" else native_row
    return partial(native, group=parallel_state.get_tensor_model_parallel_group())


def _layer_config(world_size: int, fp8: str | None, is_split: bool, **options: Any) -> TransformerConfig:
    parallel = dict(tensor_model_parallel_size=world_size, sequence_parallel=world_size > 1 and is_split)
    swiglu = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=True)
    others = dict(normalization="RMSNorm", masked_softmax_fusion=False, bias_dropout_fusion=False, **fp8_options(fp8))
    return layer_config(torch.bfloat16, **_LLAMA_70B, **parallel, **swiglu, **others, **options)


def _build_layer(spec: Any, session: BenchSession, config: TransformerConfig) -> torch.nn.Module:
    megatron_cpu.seed(1234)
    layer = build_module(spec, config=config, layer_number=1).cuda(session.device)
    return layer.to(torch.bfloat16)


class _LayerPair:
    """The same LLaMA-70B layer natively and fused, TE's spec if TE is installed, and its inputs; ``is_split``:
    whether the ranks share tokens (sequence parallelism), or each has all of them."""

    def __init__(self, session: BenchSession, fp8: str | None = None, *, is_split: bool = True) -> None:
        self._session, self._fp8 = session, fp8
        self._config = _layer_config(session.world_size, fp8, is_split)
        if HAVE_TE:
            spec = get_gpt_layer_with_transformer_engine_spec()
        else:
            spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        specs = {"native": spec, "fused": apply(spec, ("tp",))}
        self.layers = {name: _build_layer(one, session, self._config) for name, one in specs.items()}
        self._copy_parameters("fused")
        self.tokens = LAYER_SHAPE["tokens"]
        shape = (self.tokens // (session.world_size if is_split else 1), 1, _LLAMA_70B["hidden_size"])
        x, grad = session.values(shape, torch.bfloat16, 1), session.values(shape, torch.bfloat16, 2)
        if not is_split:
            for one in (x, grad):
                dist.broadcast(one, 0)
        mask = None
        if not HAVE_TE:
            mask = torch.ones(1, 1, self.tokens, self.tokens, dtype=torch.bool, device=session.device).triu_(1)
        self.passes = LayerPasses(self._config, x, grad, attention_mask=mask)

    def _copy_parameters(self, name: str) -> None:
        with torch.no_grad():
            for own, native in zip(self.layers[name].parameters(), self.layers["native"].parameters(), strict=True):
                own.copy_(native)

    def add_userbuffers(self) -> None:
        """The layer with ``--tp-comm-overlap``, without multicast.

        Raises:
            NotSupportedError, ImportError, RuntimeError: It cannot be had here.
        """
        if self._fp8 == "blockwise":
            raise NotSupportedError("userbuffers know no blocks of scales")
        from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

        os.environ["UB_SKIPMC"] = "1"
        modes = [UserBufferQuantizationMode.FP8 if self._fp8 else UserBufferQuantizationMode.NONE]
        sizes, world_size = [self.tokens, _LLAMA_70B["hidden_size"]], self._session.world_size
        options = dict(dtype=torch.bfloat16, ub_cfgs={}, bootstrap_backend="nccl")
        initialize_ub(sizes, world_size, quantization_modes=modes, **options)
        config = _layer_config(world_size, self._fp8, True, tp_comm_overlap=True)
        spec = get_gpt_layer_with_transformer_engine_spec()
        self.layers["userbuffers"] = _build_layer(spec, self._session, config)
        self._copy_parameters("userbuffers")


def layer_contenders(
    session: BenchSession, fp8: str | None = None, *, is_split: bool = True
) -> dict[str, Callable[[int], list[torch.Tensor]]]:
    """Forward and backward of one LLaMA-70B layer, ``native`` and ``fused``, on the same values; ``is_split``: with
    sequence parallelism."""
    pair = _LayerPair(session, fp8, is_split=is_split)
    return contenders(pair.passes.forward_backward, pair.layers)


def layer_rows(session: BenchSession, fp8: str | None = None, *, is_split: bool = True) -> Iterator[Row]:
    """One LLaMA-70B transformer layer, forward, then forward and backward: ``transformer_layer`` with sequence
    parallelism, in a recipe beside userbuffers; ``transformer_layer_ar`` without (``is_split``)."""
    pair = _LayerPair(session, fp8, is_split=is_split)
    if fp8 is not None and not session.attempt("userbuffers' layer", lambda index: pair.add_userbuffers()):
        pair.layers.pop("userbuffers", None)
    op = "transformer_layer" if is_split else "transformer_layer_ar"
    dtype = FP8_PREFIX + fp8 if fp8 else torch.bfloat16
    for direction, run in pair.passes.both():
        timed = contenders(run, pair.layers)
        equal = session.equal_layer("tp", timed["fused"], timed["native"])
        peer = timed.get("userbuffers")
        if peer is not None and not session.attempt(f"userbuffers' layer, {direction}", peer):
            del timed["userbuffers"], pair.layers["userbuffers"]
        timings = session.measure(timed)
        others: dict[str, Any] = {}
        if "userbuffers" in timings:
            others = dict(peer="userbuffers", peer_us=timings["userbuffers"].median_us)
        options = dict(dtype=dtype, **others)
        yield session.row(op, direction, "LLaMA3.1-70B", LAYER_SHAPE, timings, equal, **options)
