"""Transformer Engine's ``all_gather`` attention with fused exchanges (part of feature ``sp``).

The reference is Transformer Engine's own autograd function, which its attention calls by name: inside
``fused_exchanges`` the name stands for a function of this module, which computes by the same attention kernels, called
with the same arguments. Masks, windows and ranges of keys are computed by Transformer Engine.
Imported only where Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch.attention.dot_product_attention.backends as backends
import transformer_engine.pytorch.attention.dot_product_attention.context_parallel as te

from ditron_train.megatron.sp.spec import GatheredCall, route_all_gather
from ditron_train.policy import log_native
from ditron_train.runtime.versions import is_at_least
from ditron_train.schedule.keys import chunks_of
from ditron_train.sp.all_gather_attention import FusedMoves, GatheredAttention, StepKernels, all_gather_attention

_NAME = "AttnFuncWithCPAndKVAllGather"
#: What the function takes in Transformer Engine 2.10 to 2.14.
_PARAMETERS = (
    "is_training", "q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q_padded", "dropout_p",
    "softmax_scale", "qkv_format", "attn_mask_type", "attn_bias_type", "attn_bias", "deterministic",
    "use_fused_attention", "return_max_logit", "window_size", "cp_group", "cp_stream", "use_flash_attn_3",
)  # fmt: skip


class _Steps:
    """What the kernels of both steps are called with.

    Args:
        given: The arguments of Transformer Engine's function, by name.
    """

    def __init__(self, given: Any) -> None:
        self.given, self.causal = given, "causal" in given.attn_mask_type
        world, rank = dist.get_world_size(given.cp_group), dist.get_rank(given.cp_group)
        self.seq_dim = given.qkv_format.index("s")
        self.rows, self.num_ranks = given.max_seqlen_q // (2 * world), world
        self.softmax_scale = given.q.shape[-1] ** -0.5 if given.softmax_scale is None else given.softmax_scale
        found = [
            te.get_kv_seq_info_after_all_gather(chunk, world, self.rows, self.rows, given.window_size, self.causal)
            for chunk in range(2 * world)
        ]
        self.ranges = tuple(tuple(keys) for keys, _ in found)
        own = [found[chunk] for chunk in chunks_of(rank, world)]
        self.num_keys = [end - first for (first, end), _ in own]
        self.windows = [window for _, window in own]

    @property
    def options(self) -> tuple[Any, ...]:
        """What the kernels' results depend on besides the shapes, the same on all ranks."""
        given = self.given
        kernels = "cuDNN" if given.use_fused_attention else f"FlashAttention {3 if given.use_flash_attn_3 else 2}"
        order = "deterministic" if given.deterministic else "any order"
        window = f"window {given.window_size}" if given.window_size is not None else "no window"
        return given.qkv_format, given.attn_mask_type, window, kernels, order, self.softmax_scale, given.is_training


class _FusedAttention(_Steps):
    """cuDNN's kernels."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        mask = given.attn_mask_type
        self._mask = f"{mask}_bottom_right" if self.causal and "bottom_right" not in mask else mask
        self._query_starts = given.cu_seqlens_q // (2 * self.num_ranks)
        self._key_starts: dict[int, torch.Tensor] = {}

    def _options(self, step: int) -> dict[str, Any]:
        given, starts = self.given, self._key_starts[step]
        return dict(
            attn_scale=self.softmax_scale,
            dropout=given.dropout_p,
            qkv_layout="_".join([given.qkv_format] * 3),
            attn_mask_type=self._mask,
            attn_bias_type=given.attn_bias_type,
            cu_seqlens_q_padded=None,
            cu_seqlens_kv_padded=starts,
            window_size=self.windows[step],
            cuda_graph=te.is_graph_capturing(),
        )

    def forward(self, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
        given, num_keys = self.given, self.num_keys[step]
        starts = te.dpa_utils.get_full_cu_seqlens(k.shape[1 - self.seq_dim], num_keys, k.device)
        self._key_starts[step] = starts
        out, saved, *_ = te.fused_attn_fwd(
            given.is_training, self.rows, num_keys, self._query_starts, starts, q, k, v, q.dtype,
            te.tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, attn_bias=given.attn_bias,
            return_max_logit=False, **self._options(step),
        )  # fmt: skip
        return out, tuple(saved)

    def backward(
        self,
        step: int,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        saved: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv, *_ = te.fused_attn_bwd(
            self.rows, self.num_keys[step], self._query_starts, self._key_starts[step], q, k, v, out, grad, q.dtype,
            te.TE_DType[grad.dtype], list(saved), te.tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
            deterministic=self.given.deterministic, **self._options(step),
        )  # fmt: skip
        return dq, dk, dv


class _FlashAttention(_Steps):
    """FlashAttention 2 (from 2.7 on) or 3."""

    def _options(self, step: int) -> dict[str, Any]:
        is_third, window = self.given.use_flash_attn_3, self.windows[step]
        options: dict[str, Any] = {"softmax_scale": self.softmax_scale}
        if not is_third:
            options |= {"dropout_p": self.given.dropout_p, "alibi_slopes": None, "softcap": 0.0}
        if is_third and not is_at_least("transformer-engine", "2.14"):
            return {**options, "window_size": window}
        return {**options, "window_size_left": window[0], "window_size_right": window[1]}

    def _arguments(self, forward: bool, step: int, **grads: torch.Tensor) -> list[Any]:
        given = self.given
        lengths: dict[str, Any] = dict(max_seqlen_q=self.rows, max_seqlen_kv=self.num_keys[step])
        starts = dict(cu_seqlens_q=given.cu_seqlens_q, cu_seqlens_kv=None)
        return list(te.get_fa_args(forward, given.use_flash_attn_3, given.qkv_format, **starts, **lengths, **grads))

    def forward(self, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
        is_third, options = self.given.use_flash_attn_3, self._options(step)
        function = backends._flash_attn_fwd_v3 if is_third else backends._flash_attn_fwd
        if not is_third:
            options["return_softmax"] = False
        outputs = function(q, k, v, *self._arguments(True, step), causal=self.causal, **options)
        return outputs[0], (outputs[1], None if is_third else outputs[3])

    def backward(
        self,
        step: int,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        saved: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        is_third, options = self.given.use_flash_attn_3, self._options(step)
        function = backends._flash_attn_bwd_v3 if is_third else backends._flash_attn_bwd
        lse, rng_state = saved
        options["deterministic"] = self.given.deterministic
        if not is_third:
            options["rng_state"] = rng_state
        causal = "is_causal" if is_third and is_at_least("transformer-engine", "2.14") else "causal"
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        arguments = self._arguments(False, step, dq=dq, dk=dk, dv=dv)
        function(grad, q, k, v, out, lse, *arguments, **{causal: self.causal}, **options)
        return dq, dk, dv


def _unsupported_reason(given: Any) -> str | None:
    """Why Transformer Engine's own function runs a call, or None."""
    q, k, v, world = given.q, given.k, given.v, dist.get_world_size(given.cp_group)
    if given.qkv_format not in ("sbhd", "bshd"):
        return f"the layout of the attention is {given.qkv_format}"
    if given.dropout_p:
        return "attention dropout is on"
    if given.return_max_logit:
        return "the largest attention logits are collected"
    if q.dtype not in (torch.bfloat16, torch.float16) or "padding" in given.attn_mask_type:
        return f"q is {q.dtype}, the mask {given.attn_mask_type}"
    if given.attn_bias_type != "no_bias":
        return "the attention has a bias"
    if not (given.use_fused_attention or te.fa_utils.v2_7_0_plus):
        return "FlashAttention is older than 2.7"
    length = q.shape[given.qkv_format.index("s")]
    lengths = {length, k.shape[given.qkv_format.index("s")], given.max_seqlen_q // world, given.max_seqlen_kv // world}
    if length % 2 or len(lengths) > 1 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        return f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    return None


class _FusedAllGather:
    """Stands for Transformer Engine's autograd function, which ``native`` is."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def apply(self, *args: Any) -> torch.Tensor:
        """As the function's own."""
        given = SimpleNamespace(**dict(zip(_PARAMETERS, args, strict=True)))
        values, reason = (given.q, given.k, given.v), _unsupported_reason(given)
        if reason is not None:
            log_native("sp attention", reason)
            return self._native.apply(*args)
        steps: Any = (_FusedAttention if given.use_fused_attention else _FlashAttention)(given)
        kernels: StepKernels = steps
        given.q = given.k = given.v = None  # what backward wants of them is saved for it
        second_stream = given.cp_stream if values[0].is_cuda else None
        call = GatheredCall(
            given.cp_group,
            values,
            steps.options,
            lambda *values: self._native.apply(args[0], *values, *args[4:]).view(values[0].shape),
            lambda context: GatheredAttention(
                FusedMoves(context, steps.ranges), kernels, steps.seq_dim, second_stream
            ),
        )
        context = route_all_gather(call)
        if context is None:
            return self._native.apply(*args)
        out = all_gather_attention(*values, call.attention(context))
        return out if given.use_fused_attention else out.view(-1, *out.shape[-2:])


@contextlib.contextmanager
def fused_exchanges() -> Iterator[None]:
    """Inside, Transformer Engine's attention gathers keys and values by the fused path where that covers a call."""
    native = getattr(te, _NAME)
    names = tuple(inspect.signature(native.forward).parameters)[1:]
    if names != _PARAMETERS:
        log_native("sp attention", "Transformer Engine gathers keys and values otherwise (2.10 to 2.14 are covered)")
        yield
        return
    setattr(te, _NAME, _FusedAllGather(native))
    try:
        yield
    finally:
        setattr(te, _NAME, native)
