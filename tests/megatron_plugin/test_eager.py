"""Layers inside code that torch.compile has compiled: they are called as they are."""

from __future__ import annotations

import pytest
import torch

from ditron_train.testing.processes import run_workers_once

pytest.importorskip("megatron.core")


def _through_compiled_code(features: str) -> tuple[bool, bool, int]:
    """Whether results and gradients are those of code that is not compiled, and how often the graph ended."""
    import torch._dynamo as dynamo

    import ditron_train.megatron as plugin
    from ditron_train.testing.megatron_cpu import model_parallel

    sizes = {"tensor_model_parallel_size": 2} if features == "tp" else {"expert_model_parallel_size": 2}
    with model_parallel(**sizes):
        plugin.apply(features=features)
        layer = _column() if features == "tp" else _experts()

        def around(x: torch.Tensor) -> torch.Tensor:
            return (layer(x * 2)[0] + 1).relu().sum()

        found = []
        for function in (around, dynamo.optimize("eager")(around)):
            x = torch.arange(8 * 32, dtype=torch.float32).view(4, 2, 32).div(64).requires_grad_()
            out = function(x)
            out.backward()
            found.append((out.detach(), x.grad))
    (out, grad), (compiled_out, compiled_grad) = found
    return torch.equal(out, compiled_out), torch.equal(grad, compiled_grad), sum(dynamo.utils.counters["graph_break"].values())


def _column() -> torch.nn.Module:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    from ditron_train.testing.megatron_cpu import CPU_CONFIG

    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=2, sequence_parallel=True, **CPU_CONFIG
    )
    return ColumnParallelLinear(32, 16, config=config, init_method=torch.nn.init.ones_, bias=False, gather_output=False)


def _experts() -> torch.nn.Module:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "native"))
    from ep_workers import build

    return build({}, ours=True)


@pytest.mark.parametrize("features", ["tp", "ep"])
def test_compiled_code_calls_ours_as_they_are(features):
    outcomes = run_workers_once(2, _through_compiled_code, features, timeout_s=150)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
        same, same_gradient, num_breaks = outcome.value
        assert same and same_gradient and num_breaks > 0
