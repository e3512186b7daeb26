"""Feature ``wgrad``: who finds a module in the place of apex's, and when; the launcher's job with fusion."""

import logging
import sys
import types

import pytest
import torch

from tests.support.processes import run_workers_once

pytest.importorskip("megatron.core")

MODULE = "fused_weight_gradient_mlp_cuda"


def _once(body, *args, ranks=1, env=None):
    outcomes = run_workers_once(ranks, body, *args, **({} if env is None else {"env": env}))
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
    return [outcome.value for outcome in outcomes]


def _layer(fused=True):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, add_bias_linear=False,
        **{**CPU_CONFIG, "gradient_accumulation_fusion": fused},
    )  # fmt: skip
    return ColumnParallelLinear(16, 32, config=config, init_method=torch.nn.init.normal_, bias=False)


def _train(layer):
    """What a backward pass leaves in main_grad."""
    layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)
    layer(torch.arange(64.0).reshape(4, 1, 16))[0].sum().backward()
    return layer.weight.main_grad


def _lines():
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ditron_train")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def _asked_for(features):
    import ditron_train.megatron as plugin
    from tests.support.model_parallel import model_parallel

    lines = _lines()
    with model_parallel():
        with pytest.raises(RuntimeError, match="APEX|apex"):
            _layer()
        plugin.apply(features=features)
        assert not [line for line in lines if line.startswith("wgrad")] and MODULE not in sys.modules
        _layer(fused=False)
        assert MODULE not in sys.modules  # nobody asked
        layer = _layer()
        assert MODULE in sys.modules
        _layer()
        assert len([line for line in lines if line.startswith("wgrad: torch's addmm adds")]) == 1
        expected = 1 + torch.arange(64.0).reshape(4, 16).sum(0).expand(32, 16)
        assert torch.equal(_train(layer), expected)
        plugin.restore()
        with pytest.raises(RuntimeError, match="APEX|apex"):
            _layer()
        assert torch.equal(_train(layer), expected)  # a layer that exists goes on


@pytest.mark.parametrize("features", ["wgrad", "tp", "tp,wgrad"])
def test_it_is_there_once_fusion_is_asked_for(features):
    _once(_asked_for, features)


def _nobody_asked():
    from megatron.core.tensor_parallel import layers

    import ditron_train.megatron as plugin

    before = dict(vars(layers))
    plugin.apply(features="wgrad")
    plugin.restore()
    assert dict(vars(layers)) == before and MODULE not in sys.modules


def test_nothing_is_left_where_nobody_asked():
    _once(_nobody_asked)


def _switched_off():
    import ditron_train.megatron as plugin
    from tests.support.model_parallel import model_parallel

    lines = _lines()
    with model_parallel():
        plugin.apply(features="tp,wgrad")
        with pytest.raises(RuntimeError, match="APEX|apex"):
            _layer()
    assert "wgrad: off by DITRON_WGRAD" in lines


def test_the_variable_switches_it_off():
    _once(_switched_off, env={"DITRON_WGRAD": "off"})


def _apex_is_there():
    import megatron.core.tensor_parallel  # noqa: F401  (imported without it)

    import ditron_train.megatron as plugin
    from tests.support.model_parallel import model_parallel

    lines, calls = _lines(), []
    apex = types.ModuleType(MODULE)
    apex.wgrad_gemm_accum_fp32 = lambda x, grad, main_grad: calls.append(main_grad.add_(grad.t() @ x))
    from megatron.core.tensor_parallel import layers

    sys.modules[MODULE] = layers.fused_weight_gradient_mlp_cuda = apex
    layers._grad_accum_fusion_available = True
    with model_parallel():
        plugin.apply(features="wgrad")
        _train(_layer())
        assert len(calls) == 1
        plugin.restore()
        assert sys.modules[MODULE] is layers.fused_weight_gradient_mlp_cuda is apex
        assert layers._grad_accum_fusion_available is True
    assert [line for line in lines if line.startswith("wgrad")] == [
        "wgrad: nothing to provide, fused_weight_gradient_mlp_cuda is installed"
    ]


def test_apex_is_never_replaced():
    _once(_apex_is_there)


ARGUMENTS = """
import argparse

def add_megatron_arguments(parser):
    group = parser.add_argument_group(title="model")
    group.add_argument("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion")
    return parser

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""
# Integers in fp32: every product and every sum is exact, so that bits are equal whatever computes them.
SCRIPT = """
import torch
import torch.distributed as dist
from megatron.training.arguments import parse_args

if __name__ == "__main__":
    args = parse_args()
    from ditron_train.cpu.megatron_shim import CPU_CONFIG
    from tests.support.model_parallel import model_parallel
    from ditron_train.megatron.wgrad import stand_in
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    def integers(*shape, seed):
        return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()

    def init(weight):
        weight.data.copy_(integers(*weight.shape, seed=weight.shape[0]))

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        config = TransformerConfig(
            num_layers=1, hidden_size=48, num_attention_heads=4, add_bias_linear=False, sequence_parallel=True,
            tensor_model_parallel_size=dist.get_world_size(), params_dtype=torch.float32,
            **{**CPU_CONFIG, "gradient_accumulation_fusion": args.gradient_accumulation_fusion},
        )
        column = ColumnParallelLinear(48, 96, config=config, init_method=init, bias=False)
        row = RowParallelLinear(
            96, 48, config=config, init_method=init, bias=False, input_is_parallel=True, skip_bias_add=False
        )
        calls = []
        for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
            def count(*tensors, name=name, function=getattr(stand_in._stand_in, name)):
                calls.append(name)
                function(*tensors)
            setattr(stand_in._stand_in, name, count)
        for layer in (column, row):
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer.weight.grad_added_to_main_grad = False
        for microbatch in range(3):
            x = integers(12, 2, 48, seed=microbatch + 10 * dist.get_rank()).requires_grad_()
            y, _ = row(column(x)[0])
            (y * integers(*y.shape, seed=50 + microbatch)).sum().backward()
        torch.save([x.grad, column.weight.main_grad, row.weight.main_grad], f"{OUT}{dist.get_rank()}.pt")
        print("CALLS", type(column).__qualname__, calls.count("wgrad_gemm_accum_fp32"), len(calls))
"""


def _launch(words):
    from ditron_train.megatron.run import main

    main(words)


@pytest.mark.parametrize("native", [[], ["--ditron", "wgrad"]], ids=["by-default", "wgrad-alone"])
def test_the_launchers_job_with_fusion(megatron_training, tmp_path, capsys, native):
    """Natively and with every feature: three microbatches, equal bits, the fused path in each backward."""
    found = {}
    script = None
    for kind, words in {"native": native, "fused": ["--ditron", "tp,sp,ep,pp,muon"]}.items():
        source = SCRIPT.replace("{OUT}", f"{tmp_path}/{kind}")
        if script is None:
            script = megatron_training(source, arguments=ARGUMENTS)
        script.write_text(source)
        outcomes = run_workers_once(2, _launch, [str(script), *words])
        assert not any(outcome.error for outcome in outcomes), [outcome.traceback for outcome in outcomes]
        name = {"native": "ColumnParallelLinear", "fused": "DitronColumnParallelLinear"}[kind]
        assert capsys.readouterr().out.count(f"CALLS {name} 6 6") == 2
        found[kind] = [torch.load(f"{tmp_path}/{kind}{rank}.pt") for rank in range(2)]
    for one, other in zip(found["native"], found["fused"]):
        assert all(torch.equal(a, b) and a.any() for a, b in zip(one, other))


def test_without_fusion_the_launcher_changes_nothing(megatron_training):
    script = megatron_training(
        "import sys\nfrom megatron.training.arguments import parse_args\nparse_args()\n"
        "from megatron.core.tensor_parallel import layers\n"
        "assert layers._grad_accum_fusion_available is False, layers._grad_accum_fusion_available\n"
        f"assert {MODULE!r} not in sys.modules\n", arguments=ARGUMENTS,
    )  # fmt: skip
    outcomes = run_workers_once(1, _launch, [str(script), "--no-gradient-accumulation-fusion"])
    assert not any(outcome.error for outcome in outcomes), [outcome.traceback for outcome in outcomes]


def test_kernels_that_know_no_strides_get_whole_rows(monkeypatch):
    """As apex's, which read and write from an address on."""
    from megatron.core.tensor_parallel import layers

    from ditron_train.megatron.shared.wgrad import NativeWgrad

    def add(rows, grads, main_grad):
        rows, grads = (torch.as_strided(one, one.shape, (one.shape[1], 1)) for one in (rows, grads))
        main_grad += grads.t().float() @ rows.float()

    kernels = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    weight.main_grad = torch.zeros(3, 4)
    grads, rows = torch.arange(30.0).view(6, 5)[:, :3], torch.arange(42.0).view(6, 7)[:, 1:5]
    wgrad = NativeWgrad(weight, fused=True)
    assert wgrad(grads, rows) is None and torch.equal(wgrad.bias_gradient(grads), grads.sum(0))
    assert torch.equal(weight.main_grad, grads.t() @ rows)
