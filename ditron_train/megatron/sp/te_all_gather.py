"""Transformer Engine's ``all_gather`` attention with fused exchanges (part of feature ``sp``).

The reference is Transformer Engine's own autograd function, which its attention calls by name: inside
``fused_exchanges`` the name means a function of this module, which computes by the same attention kernels, called
with the same arguments. Masks, windows and ranges of keys are computed by Transformer Engine.

Packed sequences (since 2.18): Transformer Engine's kernels read whole keys and values in the order of the sequences,
so its own code runs around them, in which a gather and a reorder are one exchange, and likewise a reorder and a
reduce-scatter. How long sequences are only the GPU knows: kernels, not copy engines, put rows into that order.
Imported only if Transformer Engine is installed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch.attention.dot_product_attention.backends as backends
import transformer_engine.pytorch.attention.dot_product_attention.context_parallel as te

from ditron_train.megatron.shared.devices import unsupported_reason_on_device
from ditron_train.megatron.shared.other_names import called, rebind_globals
from ditron_train.megatron.sp.packed import table_of
from ditron_train.policy import gate, log_native
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.runtime.versions import is_at_least
from ditron_train.schedule.keys import chunks_of
from ditron_train.sp import HeadsLayout, sum_to_sequence, to_all
from ditron_train.sp.all_gather_attention import (
    ALL_GATHER_ATTENTION,
    Attended,
    GatheredAttention,
    GatheredCall,
    all_gather_attention,
)
from ditron_train.sp.keys_values import FusedMoves
from ditron_train.stream.op_context import OpContext

_NAME = "AttnFuncWithCPAndKVAllGather"
#: What the function takes in Transformer Engine 2.10 to 2.14, and what it takes besides since 2.15 or 2.18, at other
#: places among these: for FP8, and for packed sequences.
_PARAMETERS = (
    "is_training", "q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q_padded", "dropout_p",
    "softmax_scale", "qkv_format", "attn_mask_type", "attn_bias_type", "attn_bias", "deterministic",
    "use_fused_attention", "return_max_logit", "window_size", "cp_group", "cp_stream", "use_flash_attn_3",
)  # fmt: skip
_NEWER = {"fp8", "fp8_meta", "quantizers", "fp8_output", "cu_seqlens_kv", "cu_seqlens_kv_padded", "pad_between_seqs"}


class _Steps:
    """What the kernels of both steps are called with.

    Args:
        given: The arguments of Transformer Engine's function, by name.

    Attributes:
        takes_fp8: Whether that function covers FP8, too: its kernels are told more formats.
    """

    def __init__(self, given: Any) -> None:
        self.given, self.causal = given, "causal" in given.attn_mask_type
        self.takes_fp8 = is_at_least("transformer-engine", "2.15")
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


class _FusedAttention(_Steps):
    """cuDNN's kernels."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        is_named = not self.causal or "bottom_right" in given.attn_mask_type
        self._mask = given.attn_mask_type + ("" if is_named else "_bottom_right")
        self._query_starts = given.cu_seqlens_q // (2 * self.num_ranks)
        self._key_starts: dict[int, torch.Tensor] = {}

        self._layout = "_".join([given.qkv_format] * 3)

    def _options(self, step: int) -> dict[str, Any]:
        given, starts = self.given, self._key_starts[step]
        options = dict(
            attn_scale=self.softmax_scale, dropout=given.dropout_p, qkv_layout=self._layout,
            attn_mask_type=self._mask, attn_bias_type=given.attn_bias_type, cu_seqlens_q_padded=None,
            cu_seqlens_kv_padded=starts, window_size=self.windows[step], cuda_graph=te.is_graph_capturing(),
        )  # fmt: skip
        return options | (dict(o_format=given.qkv_format, qkv_scale_inv_format=None) if self.takes_fp8 else {})

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

    def backward(self, step: int, grad: torch.Tensor, attended: Attended) -> Sequence[torch.Tensor]:
        q, k, v, out, saved = attended
        formats = dict(do_format=self.given.qkv_format, dqkv_layout=self._layout, do_scale_inv_format=None)
        types, formats = ([], formats) if self.takes_fp8 else ([te.TE_DType[grad.dtype]], {})
        grads = te.fused_attn_bwd(
            self.rows, self.num_keys[step], self._query_starts, self._key_starts[step], q, k, v, out, grad, q.dtype,
            *types, list(saved), te.tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen,
            deterministic=self.given.deterministic, **self._options(step), **formats,
        )  # fmt: skip
        return list(grads[:3])


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
        given, lengths = self.given, dict(max_seqlen_q=self.rows, max_seqlen_kv=self.num_keys[step])
        return list(te.get_fa_args(forward, given.use_flash_attn_3, given.qkv_format, **lengths, **grads))

    def forward(self, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Any]:
        is_third, options = self.given.use_flash_attn_3, self._options(step)
        function = backends._flash_attn_fwd_v3 if is_third else backends._flash_attn_fwd
        options |= {} if is_third else {"return_softmax": False}
        outputs = function(q, k, v, *self._arguments(True, step), causal=self.causal, **options)
        return outputs[0], (outputs[1], None if is_third else outputs[3])

    def backward(self, step: int, grad: torch.Tensor, attended: Attended) -> Sequence[torch.Tensor]:
        q, k, v, out, saved = attended
        is_third, options = self.given.use_flash_attn_3, self._options(step)
        function = backends._flash_attn_bwd_v3 if is_third else backends._flash_attn_bwd
        lse, rng_state = saved
        options |= {"deterministic": self.given.deterministic} | ({} if is_third else {"rng_state": rng_state})
        causal = "is_causal" if is_third and is_at_least("transformer-engine", "2.14") else "causal"
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        arguments = self._arguments(False, step, dq=dq, dk=dk, dv=dv)
        function(grad, q, k, v, out, lse, *arguments, **{causal: self.causal}, **options)
        return dq, dk, dv


_Pair = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], torch.Tensor]]


def _together(exchange: Callable[..., Sequence[torch.Tensor]], **options: Any) -> _Pair:
    """An exchange of k and v, or of their gradients, in place of two functions that Transformer Engine calls one after
    the other, each first for k, then for v: the first takes what is exchanged, the second gives what has arrived."""
    given, arrived = list[torch.Tensor](), list[torch.Tensor]()

    def take(rows: torch.Tensor) -> torch.Tensor:
        given.append(rows)
        return rows

    def give() -> torch.Tensor:
        if not arrived:
            arrived.extend(exchange(given, **options))
            given.clear()
        return arrived.pop(0)

    return take, give


#: The exchanges of the pass that runs, of rows and of gradients.
_exchanges: ContextVar[tuple[_Pair, _Pair]] = ContextVar("ditron_packed_exchanges")
#: What Transformer Engine's function calls for packed sequences.
_EXCHANGES = {
    "gather_along_first_dim": lambda rows, *_: (_exchanges.get()[0][0](rows), None),
    "thd_cp_rank_order_to_sequence_order": lambda *_: _exchanges.get()[0][1](),
    "thd_sequence_order_to_cp_rank_order": lambda rows, *_: _exchanges.get()[1][0](rows),
    "reduce_scatter_along_first_dim": lambda *_: (_exchanges.get()[1][1](), None),
}


@functools.cache
def _packed_function(native: Any) -> Any:
    """Transformer Engine's function of packed sequences, a subclass whose first argument are the exchanges; None if
    this version does not call what they replace."""
    if not _EXCHANGES.keys() <= called(native.backward):
        return None
    passes = [rebind_globals(code, _EXCHANGES) for code in (native.forward, native.backward)]

    def run(code: Any, ctx: Any, *args: Any) -> Any:
        token = _exchanges.set(ctx.ditron_exchanges)
        try:
            return code(ctx, *args)
        finally:
            _exchanges.reset(token)

    class Packed(native):
        """Forward and backward are the code of the native one."""

        @staticmethod
        def forward(ctx: Any, exchanges: tuple[_Pair, _Pair], *args: Any) -> Any:
            ctx.ditron_exchanges = exchanges
            return run(passes[0], ctx, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            refuse_second_derivatives("the attention that gathers keys and values")
            return None, *run(passes[1], ctx, *grads)

    return outside_compile(Packed)


def _attention_of_packed(packed: Any, given: Any, args: Sequence[Any]) -> Callable[[Any], Callable[..., torch.Tensor]]:
    """From a context to the attention of packed sequences, of q, k and v; ``args``: what the native one takes."""
    num_rows, num_heads, head_dim = given.k.shape
    layout = HeadsLayout(1, (num_heads * head_dim,) * 2, (head_dim,) * 2)

    def attention(context: Any) -> Callable[..., torch.Tensor]:
        table = table_of(given, context.world_size, num_rows, of_keys=True)
        options = dict(context=context, layout=layout, row_table=table)
        exchanges = _together(to_all, **options), _together(sum_to_sequence, **options)
        return lambda *values: packed.apply(exchanges, args[0], *values, *args[4:])

    return attention


def _options_of(given: Any) -> tuple[Any, ...]:
    """What the kernels' results depend on besides the shapes, the same on all ranks."""
    names = "qkv_format", "attn_mask_type", "window_size", "use_fused_attention", "use_flash_attn_3"
    return tuple(getattr(given, name) for name in (*names, "deterministic", "is_training", "softmax_scale"))


def _unsupported_reason(given: Any, packed: Any) -> str | None:
    """Why Transformer Engine's own function runs a call, or None; ``packed``: its function of packed sequences."""
    q, k, v, world = given.q, given.k, given.v, dist.get_world_size(given.cp_group)
    is_packed, longest = given.qkv_format == "thd", {given.max_seqlen_q, given.max_seqlen_kv}
    lengths = {one.shape[given.qkv_format == "bshd"] for one in (q, k)}
    if not is_packed:
        lengths |= {length // world for length in longest}
    are_uneven = lengths.pop() % 2 or lengths or k.shape != v.shape or q.shape[-1] != k.shape[-1]
    reasons = {
        f"the layout of the attention is {given.qkv_format}": is_packed and packed is None,
        f"max_seqlen of packed sequences does not divide by {2 * world}": is_packed
        and any(length % (2 * world) for length in longest),
        "attention dropout is on": given.dropout_p,
        "the attention itself computes in FP8": getattr(given, "fp8", False),
        "the largest attention logits are collected": given.return_max_logit,
        f"q is {q.dtype}": q.dtype not in (torch.bfloat16, torch.float16),
        f"the mask is {given.attn_mask_type}": ("padding" in given.attn_mask_type) is not is_packed,
        "the attention has a bias": given.attn_bias_type != "no_bias",
        "FlashAttention is older than 2.7": not (given.use_fused_attention or te.fa_utils.v2_7_0_plus),
        f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}": are_uneven,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), unsupported_reason_on_device(q.device))


def _attention_of_steps(given: Any) -> Callable[[Any], Callable[..., torch.Tensor]]:
    """From a context to the attention of a sequence that is not packed, step by step."""
    steps = (_FusedAttention if given.use_fused_attention else _FlashAttention)(given)
    # FlashAttention 3's steps share a workspace, so since 2.18 Transformer Engine runs one after the other.
    stream = None if given.use_flash_attn_3 and is_at_least("transformer-engine", "2.18") else given.cp_stream
    given.q = given.k = given.v = None  # what backward wants of them is saved for it
    return lambda context: functools.partial(
        all_gather_attention, call=GatheredAttention(FusedMoves(context, steps.ranges), steps, steps.seq_dim, stream)
    )


class _FusedAllGather:
    """Stands for Transformer Engine's autograd function, which ``native`` is and which takes ``names``."""

    def __init__(self, native: Any, names: Sequence[str]) -> None:
        self._native, self._names = native, names

    def apply(self, *args: Any) -> torch.Tensor:
        """As the function's own."""
        given = SimpleNamespace(**dict(zip(self._names, args, strict=True)))
        values, is_packed = (given.q, given.k, given.v), given.qkv_format == "thd"
        packed = _packed_function(self._native) if is_packed else None
        reason = _unsupported_reason(given, packed)
        if reason is not None:
            log_native("sp attention", reason)
            return self._native.apply(*args)
        call = GatheredCall(
            given.cp_group,
            values,
            _options_of(given),
            lambda *values: self._native.apply(args[0], *values, *args[4:]).view(values[0].shape),
            _attention_of_packed(packed, given, args) if is_packed else _attention_of_steps(given),
        )
        context = route_all_gather(call)
        if context is None:
            return self._native.apply(*args)
        out = call.attention(context)(*values)
        has_shape = given.use_fused_attention or is_at_least("transformer-engine", "2.15")
        return out if has_shape else out.view(-1, *out.shape[-2:])


def route_all_gather(call: GatheredCall) -> OpContext | None:
    """The context to run an attention with fused gathers of keys and values, or None."""
    return gate.context_for(ALL_GATHER_ATTENTION, call)


@contextlib.contextmanager
def fused_exchanges() -> Iterator[None]:
    """Inside, Transformer Engine's attention gathers keys and values by the fused path if that covers a call."""
    native = getattr(te, _NAME)
    names = tuple(inspect.signature(native.forward).parameters)[1:]
    is_known = tuple(name for name in names if name not in _NEWER) == _PARAMETERS
    if not is_known:
        log_native("sp attention", "Transformer Engine gathers keys and values otherwise (2.10 to 2.18 are covered)")
    setattr(te, _NAME, _FusedAllGather(native, names) if is_known else native)
    try:
        yield
    finally:
        setattr(te, _NAME, native)
