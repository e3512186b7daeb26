"""Dispatch and combine as tools measure them: each by itself, against megatron-core's alltoall or flex dispatcher,
with Transformer Engine's fused permutation if that is installed; else in PyTorch's deterministic mode, whose bits
repeat. If DeepEP is missing, the native flex dispatcher runs by torch and NCCL, in DeepEP's order
(``deepep_by_torch``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import token_dispatcher as native_module
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher

from ditron_train.ep import EPContext, combine
from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher
from ditron_train.megatron.ep.flex_dispatcher import DitronMoEFlexTokenDispatcher, has_deepep
from ditron_train.policy import Function, Op
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.settings import under_policy
from ditron_train.tools.cases.case import BenchCase, Cost, RunEnvironment, Shape
from ditron_train.tools.cases.ep_layers import MoeCase, routing_of
from ditron_train.tools.layer_config import layer_config


def moe_config(
    *,
    hidden: int,
    ffn_hidden: int,
    num_experts: int,
    topk: int,
    dtype: torch.dtype,
    fused: bool | None = None,
    **others: Any,
) -> TransformerConfig:
    """A MoE layer as it is trained: SwiGLU, router in fp32; fused permutation if Transformer Engine is installed.

    ``others`` are fields of ``TransformerConfig`` that replace these.
    """
    sizes = dict(hidden_size=hidden, ffn_hidden_size=ffn_hidden, moe_ffn_hidden_size=ffn_hidden, num_attention_heads=1)
    router = dict(
        num_moe_experts=num_experts,
        moe_router_topk=topk,
        moe_router_dtype="fp32",
        moe_router_pre_softmax=topk == 1,  # megatron-core insists: the softmax of one score is 1
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
    )
    swiglu = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=HAVE_TE)
    fields = dict(
        moe_grouped_gemm=HAVE_TE,
        moe_permute_fusion=HAVE_TE if fused is None else fused,
        expert_model_parallel_size=dist.get_world_size(),
        bias_dropout_fusion=False,
        use_cpu_initialization=not torch.cuda.is_available(),
    )
    return layer_config(dtype, **{**sizes, **router, **swiglu, **fields, **others})


def config_of_layer(layer: Shape, dtype: torch.dtype, **others: Any) -> TransformerConfig:
    """``moe_config`` of a layer that tools measure."""
    sizes = {name: layer.sizes[name] for name in ("hidden", "ffn_hidden", "num_experts", "topk")}
    fused = False if layer.options["deterministic"] else None
    return moe_config(**sizes, dtype=dtype, fused=fused, **others)


class SentTokens(NamedTuple):
    """Which tokens went to which rank, the handle of ``dispatch_by_torch``.

    Attributes:
        tokens: int64 [rows sent], by destination rank, then token.
        sent, received: Rows to and from each rank.
        num_tokens: Tokens of this rank.
    """

    tokens: torch.Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int

    def send(self, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The rows of ``x``, one a token, that this rank receives, by source rank, then token."""
        received = x.new_empty(sum(self.received), *x.shape[1:])
        dist.all_to_all_single(received, x[self.tokens].contiguous(), self.received, self.sent, group=group)
        return received

    def sum_back(self, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Received rows back to their tokens, added up by ascending rank, from 0 in fp32 with one rounding."""
        returned = rows.new_empty(sum(self.sent), *rows.shape[1:])
        dist.all_to_all_single(returned, rows.contiguous(), self.sent, self.received, group=group)
        total = torch.zeros(self.num_tokens, *rows.shape[1:], device=rows.device)
        for tokens, of_rank in zip(self.tokens.split(self.sent), returned.split(self.sent)):
            total[tokens] += of_rank.float()
        return total.to(rows.dtype)


class _DispatchByTorch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor, num_experts: int, group: Any
    ) -> Any:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        local = num_experts // world
        is_sent = torch.zeros(len(x), world + 1, dtype=torch.bool, device=x.device)
        is_sent.scatter_(1, torch.where(indices < 0, world, indices // local), True)
        by_rank = is_sent[:, :world].T.contiguous()
        sent, received = by_rank.sum(1), x.new_empty(world, dtype=torch.int64)
        dist.all_to_all_single(received, sent, group=group)
        handle = SentTokens(by_rank.nonzero()[:, 1], sent.tolist(), received.tolist(), len(x))
        got, weights = handle.send(indices, group), handle.send(probs, group)
        is_here = (got >= 0) & (got // local == rank)
        got = torch.where(is_here, got - rank * local, -1)
        counts = torch.bincount(got[is_here], minlength=local).cpu()
        ctx.group, ctx.handle = group, handle
        return handle.send(x, group), got, torch.where(is_here, weights, 0.0), counts, handle

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any, grad_probs: torch.Tensor, *__: Any) -> Any:
        refuse_second_derivatives("dispatch_by_torch")
        grad_x, grad_weights = (ctx.handle.sum_back(one, ctx.group) for one in (grad, grad_probs.float()))
        return grad_x, None, grad_weights, None, None


class _CombineByTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, handle: SentTokens) -> torch.Tensor:
        ctx.group, ctx.handle = group, handle
        return handle.sum_back(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_second_derivatives("combine_by_torch")
        return ctx.handle.send(grad, ctx.group), None, None


def dispatch_by_torch(
    x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor, num_experts: int, group: Any, **_: Any
) -> Any:
    """What ``fused_dispatch`` of megatron-core returns with DeepEP, on any device."""
    return _DispatchByTorch.apply(x, indices, probs, num_experts, group)


def combine_by_torch(x: torch.Tensor, group: Any, handle: SentTokens, **_: Any) -> tuple[torch.Tensor, None]:
    """What ``fused_combine`` of megatron-core returns with DeepEP, on any device."""
    return _CombineByTorch.apply(x, group, handle), None


@contextlib.contextmanager
def deepep_by_torch() -> Iterator[None]:
    """If DeepEP is missing, megatron-core's flex dispatcher runs by torch and torch.distributed, in DeepEP's order."""
    if has_deepep():
        yield
        return
    functions: dict[str, Any] = dict(
        fused_dispatch=dispatch_by_torch, fused_combine=combine_by_torch, set_deepep_num_sms=lambda num_sms: None
    )
    with mock.patch.multiple(native_module, **functions):
        yield


class DispatcherPair:
    """A native and one of our dispatchers for the same configuration, driven method by method as ``MoELayer`` does."""

    def __init__(self, config: TransformerConfig) -> None:
        local = config.num_moe_experts // dist.get_world_size()
        first = dist.get_rank() * local
        arguments = (local, list(range(first, first + local)))
        keywords: dict[str, Any] = dict(config=config, pg_collection=get_default_pg_collection())
        self.is_flex = config.moe_token_dispatcher_type == "flex"
        native, fused = (
            (MoEFlexTokenDispatcher, DitronMoEFlexTokenDispatcher)
            if self.is_flex
            else (MoEAlltoAllTokenDispatcher, DitronMoEAlltoAllTokenDispatcher)
        )
        self.fused = fused(*arguments, **keywords)
        with self.running("native"):
            self.native = native(*arguments, **keywords)

    def __getitem__(self, name: str) -> Any:
        return {"native": self.native, "fused": self.fused}[name]

    def running(self, name: str) -> contextlib.AbstractContextManager[None]:
        """In which a path runs."""
        return deepep_by_torch() if self.is_flex and name == "native" else contextlib.nullcontext()

    def dispatch(
        self, name: str, x: torch.Tensor, routed: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens to the experts' rows: rows, tokens per expert, probabilities."""
        dispatcher = self[name]
        with self.running(name):
            return dispatcher.dispatch_postprocess(
                *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routed, probs))
            )

    def combine(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The experts' rows back to tokens."""
        dispatcher = self[name]
        manager: Any = getattr(dispatcher, "_comm_manager", None)
        kept = getattr(manager, "handle", None)  # of flex, whose combine releases it; it is measured several times
        with self.running(name):
            out = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
        if kept is not None:
            manager.handle = kept
        return out


def busiest_link(amounts: torch.Tensor) -> float:
    """What the rank that sends or receives most has on its links, of ``[source, destination]`` amounts; its own do not
    count."""
    others = amounts * (1 - torch.eye(len(amounts), dtype=amounts.dtype, device=amounts.device))
    return float(torch.maximum(others.sum(0).max(), others.sum(1).max()))


@contextlib.contextmanager
def repeating(layer: Shape) -> Iterator[None]:
    """PyTorch's deterministic mode if a layer is measured in it: natively only fused permutation repeats itself
    without. The mode and the filling of new memory are restored as they were before."""
    is_on = bool(layer.options["deterministic"]) or not HAVE_TE
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled_before = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(is_on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = not is_on  # type: ignore[attr-defined]  # it would fill buffers that are being written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled_before  # type: ignore[attr-defined]


class TokensCall(NamedTuple):
    """Tokens of this rank, or the rows of its experts.

    Attributes:
        pair: Dispatchers of both paths.
        tokens: [tokens, hidden]; of a combine the experts' rows.
        routed: bool [tokens, experts].
        probs: fp32 [tokens, experts].
        dispatched: Of a combine: tokens that both dispatchers have seen before.
        group: The expert-parallel group.
    """

    pair: DispatcherPair
    tokens: torch.Tensor
    routed: torch.Tensor
    probs: torch.Tensor
    dispatched: torch.Tensor | None
    group: dist.ProcessGroup


class _MoveOp(Op[TokensCall, EPContext]):
    kind: str

    def __init__(self, *, is_flex: bool = False) -> None:
        self.is_flex = is_flex
        self.name = f"ep flex_{self.kind}" if is_flex else f"ep {self.kind}"

    def make_context(self, call: TokensCall) -> EPContext:
        """The dispatcher's own, which it has from its first call."""
        tokens = call.tokens if call.dispatched is None else call.dispatched
        call.pair.dispatch("fused", tokens, call.routed, call.probs)
        context = call.pair.fused.ep_context
        assert isinstance(context, EPContext), "of a group that spans no nodes"
        return context


class DispatchOp(_MoveOp):
    """Tokens to the experts' rows: rows, tokens per expert, probabilities."""

    kind = "dispatch"

    def inputs(self, call: TokensCall) -> Sequence[torch.Tensor]:
        return call.tokens, call.routed, call.probs

    def native(self, call: TokensCall) -> Function:
        return lambda *inputs: call.pair.dispatch("native", *inputs)

    def fused(self, call: TokensCall, context: EPContext) -> Function:
        return lambda *inputs: call.pair.dispatch("fused", *inputs)


class CombineOp(_MoveOp):
    """The experts' rows back to tokens."""

    kind = "combine"

    def inputs(self, call: TokensCall) -> Sequence[torch.Tensor]:
        return (call.tokens,)

    def native(self, call: TokensCall) -> Function:
        return lambda rows: [call.pair.combine("native", rows)]

    def fused(self, call: TokensCall, context: EPContext) -> Function:
        dispatched: Any = call.pair.fused.dispatched
        layout, order = dispatched
        return lambda rows: [combine(rows, layout, context, order=order)[0]]


class MoveCase(MoeCase[TokensCall, EPContext]):
    """Against megatron-core's alltoall or flex dispatcher."""

    op: DispatchOp | CombineOp
    groups = "expert"

    def __init__(self, op: DispatchOp | CombineOp) -> None:
        super().__init__(op)
        self.row = op.name.removeprefix("ep ")

    @contextlib.contextmanager
    def surroundings(self, shape: Shape) -> Iterator[None]:
        """No gradients, and the fused path wherever it can run, as the policy would measure it."""
        with repeating(shape), torch.no_grad(), under_policy("force"):
            yield

    def sample(self, shape: Shape, environment: RunEnvironment, seed: int) -> TokensCall:
        """Tokens, or the rows that Megatron's dispatcher makes of them."""
        dispatcher = "flex" if self.op.is_flex else "alltoall"
        config = config_of_layer(shape, environment.dtype, moe_token_dispatcher_type=dispatcher)
        routed, probs = routing_of(shape, environment, seed)
        generator = torch.Generator(environment.device).manual_seed(1000 * seed + environment.rank)
        size = shape.sizes["tokens_per_rank"], shape.sizes["hidden"]
        tokens = torch.empty(size, device=environment.device, dtype=environment.dtype).normal_(generator=generator)
        pair = DispatcherPair(config)
        if isinstance(self.op, DispatchOp):
            return TokensCall(pair, tokens, routed, probs, None, environment.group)
        rows = pair.dispatch("native", tokens, routed, probs)[0].clone()
        return TokensCall(pair, rows, routed, probs, tokens, environment.group)

    def comm_sms(self, call: TokensCall, context: EPContext) -> int:
        return 0 if context.target == "interpreter" else context.senders(self.op.kind, call.tokens.shape[1])

    def cost(self, call: TokensCall, context: EPContext) -> Cost:
        link, most, copies = _moved_bytes(call, call.tokens.shape[1])
        if isinstance(self.op, DispatchOp):
            return Cost(link, 0.0, most)
        return Cost(link if self.op.is_flex else copies, 0.0)


def _moved_bytes(call: TokensCall, hidden: int) -> tuple[float, float, float]:
    """Bytes of distinct (token, rank) rows on the busiest link; the most that one rank has of them, its own
    included; bytes of (token, expert) copies on the busiest link (collective)."""
    world_size = dist.get_world_size(call.group)
    per_rank = call.routed.view(len(call.routed), world_size, -1).sum(2)
    mine = torch.stack([(per_rank > 0).sum(0), per_rank.sum(0)])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine, group=call.group)
    distinct, copies = torch.stack(everyone, 1).double()
    rows = busiest_link(distinct), float(distinct.sum(1).max()), busiest_link(copies)
    link, most, copied = (number * hidden * call.tokens.element_size() for number in rows)
    return link, most, copied


DISPATCH, COMBINE = MoveCase(DispatchOp()), MoveCase(CombineOp())
FLEX_DISPATCH, FLEX_COMBINE = MoveCase(DispatchOp(is_flex=True)), MoveCase(CombineOp(is_flex=True))
CASES: Sequence[BenchCase[Any, Any]] = (DISPATCH, COMBINE, FLEX_DISPATCH, FLEX_COMBINE)
