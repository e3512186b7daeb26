"""What is marked is called as it is by compiled code, and costs nothing elsewhere; so are the ops of every
subpackage."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.outside_compile import outside_compile
from tests.support.patience import HANG_S
from tests.support.processes import run_workers_once

sys.path.insert(0, str(Path(__file__).parent))
from counting_backend import CountingBackend  # noqa: E402


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


@outside_compile
def _marked(x: torch.Tensor) -> torch.Tensor:
    return _inner(x) * 2


def _around(x: torch.Tensor) -> torch.Tensor:
    return _marked(x + 1) - 3


@outside_compile
class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _inner(x)

    @staticmethod
    def backward(ctx, grad):
        return _inner(grad)


@outside_compile
class _Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Marked.apply(x)


@pytest.fixture
def compiler():
    yield CountingBackend()
    torch._dynamo.reset()


def test_neither_it_nor_what_it_calls_is_traced(compiler):
    x = torch.randn(4)
    compiled = compiler.compile(_around)
    assert all(torch.equal(compiled(x), _around(x)) for _ in range(3))
    assert compiler.num_graphs == 2 and compiler.targets == {"add", "sub"}
    torch._dynamo.reset()
    assert torch.equal(compiler.compile(_around)(x), _around(x))
    assert torch.equal(compiler.compile(_marked)(x), _marked(x))  # nothing to compile
    assert compiler.num_graphs == 4 and compiler.targets == {"add", "sub"}


def test_a_layer_and_its_gradient_in_compiled_code(compiler):
    layer = _Layer()

    def step(x):
        (layer(x * 2) + 1).sum().backward()  # on the CPU backward runs in this thread
        return x.grad

    x, expected = (torch.ones(3).requires_grad_() for _ in range(2))
    assert torch.equal(compiler.compile(step)(x), step(expected))
    assert compiler.num_graphs > 0 and compiler.targets == {"mul", "add", "sum"}


def test_what_is_compiled_inside_of_it_stays_so(compiler):
    compiled = compiler.compile(_inner)
    function = outside_compile(lambda x: compiled(x).mul(2))
    x = torch.randn(4)
    assert torch.equal(compiler.compile(lambda x: function(x + 1) - 3)(x), _around(x))
    assert compiler.targets == {"add", "sub", "sin"}


def test_one_whole_graph_is_refused_with_the_reason():
    compiled = torch.compile(_around, backend="eager", fullgraph=True)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="ditron_train keeps memory, streams and counts of its own"
    ):
        compiled(torch.randn(4))


def test_nothing_is_wrapped_and_wrappers_are_left_alone(compiler):
    def plain() -> None:
        """As it was."""

    assert outside_compile(plain) is plain
    with pytest.raises(AssertionError, match="is a wrapper"):
        outside_compile(functools.wraps(plain)(lambda: None))

    @outside_compile
    class WithWrapper:
        @torch.no_grad()
        def step(self, x):
            return x + 1

    other = torch.no_grad()(_inner)  # has the code of the wrapper of ``step``
    x = torch.randn(4)
    assert torch.equal(compiler.compile(lambda x: other(x) * 2)(x), x.sin() * 2) and "sin" in compiler.targets
    assert torch.equal(WithWrapper().step(x), x + 1)


def test_importing_the_ops_loads_no_compiler():
    rooms = ", ".join(f"ditron_train.{room}" for room in ("tp", "sp", "ep", "pp", "optim", "megatron"))
    script = f"import sys\nimport {rooms}\nassert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG_S)


CPU = torch.device("cpu")


def _tp(x: torch.Tensor) -> torch.Tensor:
    from ditron_train.tp import ag_gemm, column_linear, get_tp_context, row_linear

    context = get_tp_context(dist.group.WORLD, CPU)
    weight = torch.ones(8, 16, requires_grad=True)
    y = column_linear(x * 2, weight, context=context)
    z = (
        row_linear(y + 1, torch.ones(16, 8), context=context)
        - ag_gemm(x.detach(), weight.detach(), context=context).sum()
    )
    return z * z


def _sp(x: torch.Tensor) -> torch.Tensor:
    from ditron_train.sp import get_sp_context, heads_exchange, output_layout, qkv_layout, sequence_exchange

    context = get_sp_context(dist.group.WORLD, CPU)
    q, k, v = heads_exchange((x.view(4, 1, 4, 4) * 2,) * 3, context=context, layout=qkv_layout(4, 4, 4, 2))
    return sequence_exchange(((q + k) * v,), context=context, layout=output_layout(4, 4, 2))[0] + 1


def _ep(x: torch.Tensor) -> torch.Tensor:
    from ditron_train.ep import begin_layout, combine_rows, dispatch_tokens, get_ep_context

    context = get_ep_context(dist.group.WORLD, CPU, 4, 2)
    probs = torch.arange(16.0).view(4, 4).cos()
    routing_map = torch.zeros(4, 4, dtype=torch.bool).scatter(1, probs.topk(2).indices, True)
    layout = begin_layout(routing_map, probs, 16, x.dtype, context).finish()
    rows, row_probs = dispatch_tokens(x * 2, probs, layout, context, "descending")
    return combine_rows(rows * row_probs[:, None] + 1, layout, context, "descending") * 3


def _pp(x: torch.Tensor) -> torch.Tensor:
    from ditron_train.pp import exchange, get_pipeline_context
    from ditron_train.pp.messages import Header

    context = get_pipeline_context(dist.group.WORLD, CPU)
    context.reserve(256)
    handles = exchange(context, send_next=x.detach() * 2, recv_prev=Header((4, 16), torch.float32))
    for handle in handles.values():
        handle.wait()
    return handles["recv_prev"].tensor * x


def _optim(x: torch.Tensor) -> torch.Tensor:
    from ditron_train.optim import Muon, newton_schulz

    parameter = torch.nn.Parameter(x.detach() * 2)
    optimizer = Muon([parameter], lr=0.1)
    parameter.grad = newton_schulz(x.detach() + 1).float()
    optimizer.step()
    return parameter.detach() * x


def _in_compiled_code(*bodies: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, tuple[int, set[str]]]:
    """Forward and backward through each of ``bodies`` in compiled code, against the same uncompiled."""
    outcomes = {}
    for body in bodies:
        compiler = CountingBackend("eager" if body in (_pp, _optim) else "aot_eager")

        def step(
            x: torch.Tensor, body: Callable[[torch.Tensor], torch.Tensor] = body
        ) -> tuple[torch.Tensor, torch.Tensor]:
            out = body(x).sum()
            out.backward()
            return out.detach(), x.grad

        compiled, start = compiler.compile(step), torch.arange(64.0).view(4, 16) / 8
        for index in range(2):
            expected, found = (function((start + index).requires_grad_()) for function in (step, compiled))
            assert all(torch.equal(a, b) for a, b in zip(expected, found)), body.__name__
        outcomes[body.__name__] = compiler.num_graphs, compiler.traced
    return outcomes


def test_ops_of_every_room():
    for outcome in run_workers_once(2, _in_compiled_code, _tp, _sp, _ep, _pp, _optim):
        assert outcome.ok, outcome.traceback
        assert len(outcome.value) == 5 and all(
            num_graphs > 0 and not traced for num_graphs, traced in outcome.value.values()
        )
