"""What ``bench tp`` compares at a shape, all on the same inputs: native, its parts, the peer and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ditron_train.tools.arguments import check_divides
from ditron_train.tools.session import BenchSession
from ditron_train.tools.timing import Contender
from ditron_train.tp import TPContext, ag_gemm, column_linear, gemm_rs, row_linear
from ditron_train.tp.choices import Problem

__all__ = ["Case", "Linear", "backward_contenders", "op_contenders"]

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A shape of ``workloads.json``: global sizes."""

    op: str
    model: str
    m: int
    n: int
    k: int

    @property
    def shape(self) -> dict[str, int]:
        """As it stands in a row."""
        return {"m": self.m, "n": self.n, "k": self.k}

    def check(self, world_size: int) -> None:
        """Raises SettingError for sizes that ``world_size`` ranks cannot share out."""
        check_divides(self.op, (self.m, self.n, self.k), "N" if self.op == "ag_gemm" else "K", world_size)

    def problem(self, dtype: torch.dtype, world_size: int) -> Problem:
        """Its forward as one rank sees it."""
        n, k = (self.n // world_size, self.k) if self.op == "ag_gemm" else (self.n, self.k // world_size)
        return Problem(self.op, self.m, n, k, "nt", dtype, world_size)


def _inputs(session: BenchSession, case: Case, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sets of this rank's (x, weight), used in turn."""
    w = session.world_size
    if case.op == "ag_gemm":
        x_shape, weight_shape = (case.m // w, case.k), (case.n // w, case.k)
    else:
        x_shape, weight_shape = (case.m, case.k // w), (case.n, case.k // w)
    count = session.num_input_sets((x_shape[0] * x_shape[1] + weight_shape[0] * weight_shape[1]) * dtype.itemsize)
    return [
        (session.values(x_shape, dtype, 2 * i), session.values(weight_shape, dtype, 2 * i + 1)) for i in range(count)
    ]


def op_contenders(
    session: BenchSession, case: Case, context: TPContext, dtype: torch.dtype
) -> dict[str, Callable[[int], torch.Tensor]]:
    """Returns ``native``, ``gemm`` alone, ``comm`` alone, ``peer`` and ``ditron`` for a shape, all on the same
    inputs."""
    build = _ag_gemm_contenders if case.op == "ag_gemm" else _gemm_rs_contenders
    return build(case, context, _inputs(session, case, dtype))


def _ag_gemm_contenders(
    case: Case, context: TPContext, inputs: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Callable[[int], torch.Tensor]]:
    gathered = inputs[0][0].new_empty(case.m, case.k)

    def pick(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[index % len(inputs)]

    def gather(index: int) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, pick(index)[0], group=context.group)
        return gathered

    def peer(index: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        x, weight = pick(index)
        name = context.group.group_name
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, name, return_A=False)[1][0]

    return {
        "native": lambda index: torch.matmul(gather(index), pick(index)[1].t()),
        "gemm": lambda index: torch.matmul(gathered, pick(index)[1].t()),
        "comm": gather,
        "peer": peer,
        "ditron": lambda index: ag_gemm(*pick(index), context=context),
    }


def _gemm_rs_contenders(
    case: Case, context: TPContext, inputs: list[tuple[torch.Tensor, torch.Tensor]]
) -> dict[str, Callable[[int], torch.Tensor]]:
    partial = inputs[0][0].new_zeros(case.m, case.n)

    def pick(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[index % len(inputs)]

    def multiply(index: int) -> torch.Tensor:
        x, weight = pick(index)
        return torch.matmul(x, weight.t())

    def scatter(source: torch.Tensor) -> torch.Tensor:
        out = source.new_empty(case.m // context.world_size, case.n)
        dist.reduce_scatter_tensor(out, source, group=context.group)
        return out

    def peer(index: int) -> torch.Tensor:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        x, weight = pick(index)
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, context.group.group_name)

    return {
        "native": lambda index: scatter(multiply(index)),
        "gemm": multiply,
        "comm": lambda index: scatter(partial),
        "peer": peer,
        "ditron": lambda index: gemm_rs(*pick(index), context=context),
    }


def backward_contenders(
    session: BenchSession, case: Case, context: TPContext, dtype: torch.dtype, native: Linear
) -> tuple[dict[str, Contender], dict[str, list[torch.Tensor]]]:
    """The backward of the layer whose forward is ``case.op``: contenders, and outputs and gradients to compare.

    ``native`` and ``ditron`` by autograd; ``gemm`` is dgrad and wgrad alone, ``comm`` all that is communicated,
    ``peer`` the same with PyTorch's async-TP products in place of the communicating ones.
    """
    layer = column_linear if case.op == "ag_gemm" else row_linear
    inputs = [tuple(t.requires_grad_() for t in pair) for pair in _inputs(session, case, dtype)]
    contenders: dict[str, Contender] = {}
    results: dict[str, list[torch.Tensor]] = {}
    for name, forward in (("native", native), ("ditron", lambda x, weight: layer(x, weight, context=context))):
        outputs = [forward(*pair) for pair in inputs]
        grad = session.values(tuple(outputs[0].shape), dtype, 77)

        def backward(
            index: int, outputs: list[torch.Tensor] = outputs, grad: torch.Tensor = grad
        ) -> list[torch.Tensor]:
            chosen = index % len(inputs)
            return list(torch.autograd.grad(outputs[chosen], inputs[chosen], grad, retain_graph=True))

        contenders[name] = backward
        results[name] = [outputs[0].detach(), *backward(0)]
    plain = [tuple(t.detach() for t in pair) for pair in inputs]
    parts = _column_parts if case.op == "ag_gemm" else _row_parts
    return {**contenders, **parts(case, context, plain, grad)}, results


def _column_parts(
    case: Case, context: TPContext, inputs: list[tuple[torch.Tensor, torch.Tensor]], grad: torch.Tensor
) -> dict[str, Contender]:
    total_x = grad.new_zeros(case.m, case.k)
    own = grad.new_empty(case.m // context.world_size, case.k)

    def gather(index: int) -> None:
        dist.all_gather_into_tensor(total_x, inputs[index % len(inputs)][0], group=context.group)

    def gemm(index: int) -> list[torch.Tensor]:
        return [grad.matmul(inputs[index % len(inputs)][1]), grad.t().matmul(total_x)]

    def comm(index: int) -> torch.Tensor:
        gather(index)
        dist.reduce_scatter_tensor(own, total_x, group=context.group)
        return own

    def peer(index: int) -> list[torch.Tensor]:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        gather(index)
        weight, name = inputs[index % len(inputs)][1], context.group.group_name
        return [torch.ops.symm_mem.fused_matmul_reduce_scatter(grad, weight, "sum", 0, name), grad.t().matmul(total_x)]

    return {"gemm": gemm, "comm": comm, "peer": peer}


def _row_parts(
    case: Case, context: TPContext, inputs: list[tuple[torch.Tensor, torch.Tensor]], grad: torch.Tensor
) -> dict[str, Contender]:
    total_grad = grad.new_zeros(case.m, case.n)

    def gemm(index: int) -> list[torch.Tensor]:
        x, weight = inputs[index % len(inputs)]
        return [total_grad.matmul(weight), total_grad.t().matmul(x)]

    def comm(index: int) -> torch.Tensor:
        dist.all_gather_into_tensor(total_grad, grad, group=context.group)
        return total_grad

    def peer(index: int) -> list[torch.Tensor]:
        import torch.distributed._symmetric_memory  # noqa: F401  (registers the ops)

        x, weight = inputs[index % len(inputs)]
        gathered, (grad_x,) = torch.ops.symm_mem.fused_all_gather_matmul(grad, [weight], 0, context.group.group_name)
        return [grad_x, gathered.t().matmul(x)]

    return {"gemm": gemm, "comm": comm, "peer": peer}
