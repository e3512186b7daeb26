"""Models inside code that is compiled: the fused ones are called as they are, and what is between them is compiled."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import pytest
import torch

from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")
sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent.parent / "runtime")]
import ep_workers  # noqa: E402
import sp_workers  # noqa: E402
import test_layers  # noqa: E402
from counting_backend import CountingBackend  # noqa: E402

CALLS = 2  # a second one finds what the first one compiled


def _compile(module: torch.nn.Module, backend: CountingBackend) -> None:
    """As ``module.compile()``."""
    module._compiled_call_impl = backend.compile(module._call_impl)


def _linear_layers(backend: CountingBackend) -> None:
    """Forward and backward in one piece of code, against native layers uncompiled: sums of integers, exact in any
    order."""
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=2):
        config = test_layers._config()
        native = test_layers._run(*test_layers._layers(False, config, bias=True))
        fused = test_layers._layers(True, config, bias=True)
        run = backend.compile(test_layers._run)
        for _ in range(CALLS):
            for layer in fused:
                layer.zero_grad()
            test_layers._assert_equal(native, run(*fused))
        test_layers._assert_ran_as_ops()


NORMS = dict(qk_layernorm=True, normalization="LayerNorm")
OWN_NORMS = dict(NORMS, own_norms=True)


def _context_parallel_gpts(backend: CountingBackend) -> None:
    with sp_workers.groups(2):
        for kind, options in (("projections", {}), ("output", OWN_NORMS), ("projections", NORMS)):
            model = sp_workers.build(2, num_layers=1, **options)
            expected = sp_workers.run(model, 2, 16)
            assert sp_workers.num_fused_shapes(kind) >= 1
            _compile(model, backend)
            for _ in range(CALLS):
                sp_workers.assert_same_bits(sp_workers.run(model, 2, 16), expected)


def _experts(backend: CountingBackend) -> None:
    with ep_workers.groups(expert_model_parallel_size=2):
        layer = ep_workers.build({}, fused=True)
        x, grad = torch.randn(8, 2, 32), torch.randn(8, 2, 32)
        expected = ep_workers.run_layer(layer, x, grad)
        assert layer.token_dispatcher.ep_context is not None
        _compile(layer, backend)
        for _ in range(CALLS):
            ep_workers.assert_equal(ep_workers.run_layer(layer, x, grad), expected)


def _compiled(*bodies: Callable[[CountingBackend], None]) -> dict[str, tuple[int, set[str]]]:
    outcomes = {}
    for body in bodies:
        backend = CountingBackend("aot_eager")
        body(backend)
        outcomes[body.__name__] = backend.num_graphs, backend.traced
    return outcomes


def test_bits_of_uncompiled_code():
    for outcome in run_workers_once(2, _compiled, _linear_layers, _context_parallel_gpts, _experts):
        assert outcome.ok, outcome.traceback
        assert len(outcome.value) == 3 and all(
            num_graphs > 0 and not traced for num_graphs, traced in outcome.value.values()
        )


def _what_experts_get() -> int:
    """Calls with new routings, whose tables pass from the dispatcher to the experts through compiled code; graphs
    made."""
    import torch.distributed as dist

    from ditron_train.ep import ExpertCall, begin_layout, get_ep_context
    from ditron_train.megatron.ep.experts import TEGemm
    from ditron_train.runtime.outside_compile import outside_compile

    context, backend, given = get_ep_context(dist.group.WORLD, torch.device("cpu"), 4, 2), CountingBackend(), []

    @outside_compile
    def postprocess(x):
        probs = torch.rand(8, 4, generator=torch.Generator().manual_seed(len(given)))
        routing_map = torch.zeros(8, 4, dtype=torch.bool).scatter_(1, probs.topk(2).indices, True)
        layout = begin_layout(routing_map, probs * routing_map, 32, torch.float32, context).finish()
        return x, ExpertCall(layout, context, "descending", frozenset(), TEGemm(layout.tokens_per_expert.tolist()))

    @outside_compile
    def experts(x, call):
        given.append(call)
        return x.clone()

    def layer(x):
        rows, call = postprocess(x * 2)
        return experts(rows + 1, call) - 1

    compiled = backend.compile(layer)
    for _ in range(12):  # more than the compiler makes of one piece of code
        assert torch.equal(compiled(torch.ones(8, 32)), layer(torch.ones(8, 32)))
    assert len(given) == len(set(map(id, given))) == 24 and all(type(call) is ExpertCall for call in given)
    return backend.num_graphs


def test_nothing_is_compiled_again_for_another_routing():
    for outcome in run_workers_once(2, _what_experts_get):
        assert outcome.ok, outcome.traceback
        assert outcome.value == 3
