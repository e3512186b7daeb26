"""Dispatch and combine declared for the tools: each by itself, against megatron-core's alltoall dispatcher, with
Transformer Engine's fused permutation where that is installed; else in PyTorch's deterministic mode, whose bits
repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from ditron_train.ep import EPContext, combine
from ditron_train.ep.context import move_class, usual_senders
from ditron_train.ep.spec import MoeSpec, routing_of
from ditron_train.megatron.ep.dispatcher import DitronMoEAlltoAllTokenDispatcher
from ditron_train.policy import Cost, Function, OpSpec, Place, Shape
from ditron_train.runtime.settings import under_policy


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
    """A MoE layer as it is trained: SwiGLU, router in fp32; fused permutation where Transformer Engine is installed.

    ``others`` are fields of ``TransformerConfig`` that replace these.
    """
    on_cpu = not torch.cuda.is_available()
    fields = dict(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=ffn_hidden,
        moe_ffn_hidden_size=ffn_hidden,
        num_attention_heads=1,
        num_moe_experts=num_experts,
        moe_router_topk=topk,
        moe_router_dtype="fp32",
        moe_router_pre_softmax=topk == 1,  # megatron-core insists: the softmax of one score is 1
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=HAVE_TE,
        moe_permute_fusion=HAVE_TE if fused is None else fused,
        expert_model_parallel_size=dist.get_world_size(),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=HAVE_TE,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=on_cpu,
    )
    return TransformerConfig(**{**fields, **others})


class DispatcherPair:
    """A native and one of our dispatchers for the same configuration, driven method by method as ``MoELayer`` does."""

    def __init__(self, config: TransformerConfig) -> None:
        local = config.num_moe_experts // dist.get_world_size()
        first = dist.get_rank() * local
        arguments = (local, list(range(first, first + local)))
        keywords = dict(config=config, pg_collection=get_default_pg_collection())
        self.native = MoEAlltoAllTokenDispatcher(*arguments, **keywords)
        self.ditron = DitronMoEAlltoAllTokenDispatcher(*arguments, **keywords)

    def __getitem__(self, name: str) -> MoEAlltoAllTokenDispatcher:
        return {"native": self.native, "ditron": self.ditron}[name]

    def dispatch(
        self, name: str, x: torch.Tensor, routed: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens to the experts' rows: rows, tokens per expert, probabilities."""
        dispatcher = self[name]
        return dispatcher.dispatch_postprocess(
            *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, routed, probs))
        )

    def combine(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The experts' rows back to tokens."""
        dispatcher = self[name]
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))


def busiest_link(amounts: torch.Tensor) -> float:
    """What the rank that sends or receives most has on its links, of ``[source, destination]`` amounts; its own do not
    count."""
    others = amounts * (1 - torch.eye(len(amounts), dtype=amounts.dtype, device=amounts.device))
    return float(torch.maximum(others.sum(0).max(), others.sum(1).max()))


@contextlib.contextmanager
def repeating(layer: Shape) -> Iterator[None]:
    """PyTorch's deterministic mode where a layer is measured in it: natively only fused permutation repeats itself
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


class _MoveSpec(MoeSpec[TokensCall, EPContext]):
    groups = "expert"

    @contextlib.contextmanager
    def surroundings(self, shape: Shape) -> Iterator[None]:
        """See `OpSpec`: no gradients, and the fused path wherever it can run, as the policy would measure it."""
        with repeating(shape), torch.no_grad(), under_policy("force"):
            yield

    def context(self, call: TokensCall) -> EPContext:
        """See `OpSpec`: the dispatcher's own, which it has from its first call."""
        tokens = call.tokens if call.dispatched is None else call.dispatched
        call.pair.dispatch("ditron", tokens, call.routed, call.probs)
        context = call.pair.ditron.ep_context
        assert isinstance(context, EPContext), "of a group that spans no nodes"
        return context

    def _tokens(self, shape: Shape, place: Place, seed: int) -> TokensCall:
        sizes, is_deterministic = shape.sizes, shape.options["deterministic"]
        names = ("hidden", "ffn_hidden", "num_experts", "topk")
        config = moe_config(
            **{name: sizes[name] for name in names}, dtype=place.dtype, fused=False if is_deterministic else None
        )
        routed, probs = routing_of(shape, place, seed)
        generator = torch.Generator(place.device).manual_seed(1000 * seed + place.rank)
        tokens = torch.empty(
            sizes["tokens_per_rank"], sizes["hidden"], device=place.device, dtype=place.dtype
        ).normal_(generator=generator)
        return TokensCall(DispatcherPair(config), tokens, routed, probs, None, place.group)

    def comm_sms(self, call: TokensCall, context: EPContext) -> int:
        return 0 if context.target == "interpreter" else context.senders(self.row, call.tokens.shape[1])

    def tuned_shapes(self, world_size: int, on_gpu: bool) -> Sequence[Shape]:
        """See `OpSpec`: one layer; more would fill the memory."""
        return self.shapes(world_size, on_gpu)[:1]

    def shape_class(self, call: TokensCall) -> str:
        config = call.pair.ditron.config
        return move_class(config.num_moe_experts, config.moe_router_topk, call.tokens.shape[1])

    def candidates(self, call: TokensCall, context: EPContext, ranked: Sequence[Any]) -> Sequence[int]:
        """See `OpSpec`: how many programs push; in the interpreter there is one."""
        if ranked:
            return []
        counts = () if context.target == "interpreter" else (4, 8, 12, 16, 24, 32)
        usual = usual_senders(self.row, context.move.num_senders, context.world_size)
        return list(dict.fromkeys([usual, *counts]))

    def fused_as(self, call: TokensCall, context: EPContext, candidate: int) -> Function:

        def function(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
            context.tried_senders = candidate
            try:
                return self.fused(call, context)(*inputs)
            finally:
                context.tried_senders = None

        return function

    def entry(self, call: TokensCall, candidate: int, *, is_native: bool) -> dict[str, Any]:
        return {"senders": candidate, "native": is_native}

    def _moved_bytes(self, call: TokensCall, hidden: int) -> tuple[float, float, float]:
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


class DispatchSpec(_MoveSpec):
    """Tokens to the experts' rows: rows, tokens per expert, probabilities."""

    name, row, table_op = "ep dispatch", "dispatch", "dispatch"

    def sample(self, shape: Shape, place: Place, seed: int) -> TokensCall:
        return self._tokens(shape, place, seed)

    def inputs(self, call: TokensCall) -> Sequence[torch.Tensor]:
        return call.tokens, call.routed, call.probs

    def megatron(self, call: TokensCall) -> Function:
        return lambda *inputs: call.pair.dispatch("native", *inputs)

    def fused(self, call: TokensCall, context: EPContext) -> Function:
        return lambda *inputs: call.pair.dispatch("ditron", *inputs)

    def cost(self, call: TokensCall, context: EPContext) -> Cost:
        link, most, _ = self._moved_bytes(call, call.tokens.shape[1])
        return Cost(link, 0.0, most)


class CombineSpec(_MoveSpec):
    """The experts' rows back to tokens."""

    name, row, table_op = "ep combine", "combine", "combine"

    def sample(self, shape: Shape, place: Place, seed: int) -> TokensCall:
        """See `OpSpec`: the rows that Megatron's dispatcher gives."""
        call = self._tokens(shape, place, seed)
        rows = call.pair.dispatch("native", call.tokens, call.routed, call.probs)[0].clone()
        return call._replace(tokens=rows, dispatched=call.tokens)

    def inputs(self, call: TokensCall) -> Sequence[torch.Tensor]:
        return (call.tokens,)

    def megatron(self, call: TokensCall) -> Function:
        return lambda rows: [call.pair.combine("native", rows)]

    def fused(self, call: TokensCall, context: EPContext) -> Function:
        dispatched: Any = call.pair.ditron.dispatched
        layout, order = dispatched
        return lambda rows: [combine(rows, layout, context, order=order)[0]]

    def cost(self, call: TokensCall, context: EPContext) -> Cost:
        return Cost(self._moved_bytes(call, call.tokens.shape[1])[2], 0.0)


SPECS: Sequence[OpSpec[Any, Any]] = (DispatchSpec(), CombineSpec())
