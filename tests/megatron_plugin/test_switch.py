"""Switching on and off, the optimizer hook, what is logged, and bad input."""

import dataclasses
import logging
import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from tests.support.decisions import swap_decisions
from tests.support.patience import HANG_S
from tests.support.processes import run_workers, run_workers_once

pytest.importorskip("megatron.core")


class _Lines(logging.Handler):
    """Collects the package's log lines."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logger = logging.getLogger("ditron_train")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *exc_info):
        logging.getLogger("ditron_train").removeHandler(self)


def _column(group=None):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        add_bias_linear=False,
        **CPU_CONFIG,
    )
    return ColumnParallelLinear(16, 32, config=config, init_method=torch.nn.init.normal_, bias=False, tp_group=group)


def _apply_and_restore():
    import ditron_train.megatron as plugin
    from ditron_train.megatron.tp.layers import DitronColumnParallelLinear
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=2):
        assert type(_column()) is not DitronColumnParallelLinear
        plugin.apply(features="tp", transport="shm", timeout_s=33)
        plugin.apply(features=("tp",))
        assert plugin.active_features() == ("tp",)
        assert os.environ["DITRON_TRANSPORT"] == "shm" and float(os.environ["DITRON_TIMEOUT_S"]) == 33
        layer = _column()
        assert type(layer) is DitronColumnParallelLinear
        native = type(layer).__mro__[1]
        assert (
            repr(layer).startswith("ColumnParallelLinear(in_features=16") and type(layer).__name__ == native.__name__
        )
        assert pickle.loads(pickle.dumps([type(layer), native])) == [DitronColumnParallelLinear, native]
        plugin.restore()
        plugin.restore()
        assert plugin.active_features() == ()
        assert "DITRON_TRANSPORT" not in os.environ and "DITRON_TIMEOUT_S" not in os.environ
        assert type(_column()) is not DitronColumnParallelLinear
        from torch.optim.optimizer import _global_optimizer_pre_hooks

        assert not _global_optimizer_pre_hooks
        layer(torch.ones(2, 1, 16))  # a module that exists already goes on working
        plugin.apply(features="tp", timeout_s=33)
        before = dict(os.environ)
        for refused in ({"policy": "bogus"}, {"plan": "/nonexistent/plan.json"}, {"timeout_s": -1}):
            with pytest.raises(SettingError):
                plugin.apply(features="tp", **refused)
            assert dict(os.environ) == before
        plugin.restore()
        assert "DITRON_TIMEOUT_S" not in os.environ


def test_apply_and_restore():
    run_workers(2, _apply_and_restore)


def _failed_op_never_reaches_the_weights():
    import ditron_train.megatron as plugin
    from ditron_train.runtime.errors import PeerTimeoutError
    from ditron_train.tp import get_tp_context
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=2):
        plugin.apply()
        from megatron.core import parallel_state

        context = get_tp_context(parallel_state.get_tensor_model_parallel_group(), torch.device("cpu"))
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.ones(3)
        optimizer.step()
        assert torch.equal(weight, torch.zeros(3))
        context.gather_channel.record_timeout(peer=1 - dist.get_rank(), chunk=0, expected_epoch=5, seen_epoch=4)
        with pytest.raises(PeerTimeoutError, match="expected epoch 5, saw 4"):
            optimizer.step()
        assert torch.equal(weight, torch.zeros(3))
        from ditron_train.stream import op_context as contexts

        contexts._contexts.clear()  # the failed channel must not outlive this test
        del context


def _lines_of_a_variable_that_nothing_reads():
    import ditron_train.megatron as plugin

    with _Lines() as lines:
        plugin.apply(features="tp")
        plugin.apply(features="sp")
        plugin.restore()
    return lines


def test_a_variable_that_nothing_reads_any_more_is_named_once():
    """``DITRON_SP_ORDER`` was one: a job that still sets it runs, in Megatron's order of sums."""
    (outcome,) = run_workers_once(1, _lines_of_a_variable_that_nothing_reads, env={"DITRON_SP_ORDER": "arrival"})
    assert outcome.ok, outcome.traceback
    named = [line for line in outcome.value if "DITRON_SP_ORDER" in line]
    assert named == ["nothing reads the environment variable DITRON_SP_ORDER"]


def _lines_of_groups_of_one_rank():
    import ditron_train.megatron as plugin
    from ditron_train.megatron.plugin.arguments import Options
    from ditron_train.megatron.plugin.switch import apply_options
    from ditron_train.runtime import logs

    logs._seen.clear()
    with _Lines() as lines:
        apply_options(Options(("sp",), sizes={"tp": 4, "sp": 1}))
        plugin.restore()
    return lines


def test_a_feature_whose_groups_have_one_rank_is_said_to_do_nothing():
    assert (
        run_workers(1, _lines_of_groups_of_one_rank)[0][0]
        == "sp: nothing to accelerate where --context-parallel-size is 1"
    )


def _lines_of_specs(spec):
    import ditron_train.megatron as plugin
    from ditron_train.runtime import logs

    logs._seen.clear()
    with _Lines() as lines:
        plugin.apply(spec, features="tp")
        plugin.restore()
    return lines


def test_names_in_the_place_of_a_spec_are_refused_and_a_spec_without_a_layer_of_fused_is_told():
    assert run_workers(1, _lines_of_specs, [dict, dict])[0] == ["tp: 0 modules of the layer spec replaced"]
    with pytest.raises(SettingError, match=re.escape("'tp' is no layer spec: apply(features='tp')")):
        run_workers(1, _lines_of_specs, "tp")
    with pytest.raises(SettingError, match="5 is no layer spec: a ModuleSpec or TransformerBlockSubmodules"):
        run_workers(1, _lines_of_specs, 5)


def test_failed_op_never_reaches_the_weights():
    run_workers(2, _failed_op_never_reaches_the_weights)


def _one_log_line_a_reason():
    import ditron_train.megatron as plugin
    from ditron_train.runtime import logs
    from tests.support.model_parallel import model_parallel

    logs._seen.clear()
    with model_parallel(tensor_model_parallel_size=2), _Lines() as lines:
        plugin.apply()
        layer = _column()
        for tokens in (2, 2, 3):
            layer(torch.ones(tokens, 1, 16, dtype=torch.float32))
        assert not [line for line in lines if "native" in line]
        layer.double()
        for tokens in (2, 2, 3):
            layer(torch.ones(tokens, 1, 16, dtype=torch.float64))
        layer.sequence_parallel, layer.allreduce_dgrad = False, True
        for _ in range(2):
            layer(torch.ones(4, 1, 16, dtype=torch.float64))
        layer.float()(torch.ones(4, 1, 16))
        native = [line for line in lines if "native" in line]
        expected = [
            "tp column: native, torch.float64 is not covered",
            "tp column: native, without sequence parallelism Megatron itself overlaps the all-reduce with the weight "
            "gradient",
        ]
        assert native == (expected if dist.get_rank() == 0 else [])


def test_one_log_line_for_each_reason_on_rank_0():
    run_workers(2, _one_log_line_a_reason)


def _across_nodes():
    import ditron_train.megatron as plugin
    from ditron_train.runtime import logs
    from ditron_train.symm.shm_transport import ShmTransport
    from tests.support.model_parallel import model_parallel

    logs._seen.clear()
    allocate = ShmTransport.allocate

    def allocate_without_peers(self, group, device, num_bytes):  # what a transport gives for ranks of other nodes
        segment = allocate(self, group, device, num_bytes)
        rank = dist.get_rank(group)
        addresses = [own if peer == rank else 0 for peer, own in enumerate(segment.addresses)]
        peers = [own if peer == rank else None for peer, own in enumerate(segment.peers)]
        return dataclasses.replace(segment, addresses=addresses, peers=peers)

    ShmTransport.allocate = allocate_without_peers
    try:
        with model_parallel(tensor_model_parallel_size=2), _Lines() as lines:
            plugin.apply()
            layer = _column()
            y, _ = layer(torch.ones(2, 1, 16))
            assert torch.equal(y, torch.ones(4, 1, 16) @ layer.weight.t())
            native = [line for line in lines if "other nodes" in line]
            assert len(native) == (dist.get_rank() == 0)
    finally:
        ShmTransport.allocate = allocate


def test_a_group_across_nodes_without_peer_memory_runs_natively():
    run_workers(2, _across_nodes)


def _too_many_shapes():
    import ditron_train.megatron as plugin
    from ditron_train.policy import Gate, gate
    from tests.support.model_parallel import model_parallel

    fresh = Gate(most_shapes=2)
    saved, gate.most_shapes = gate.most_shapes, 2
    try:
        with model_parallel(tensor_model_parallel_size=2):
            native = _column()
            plugin.apply()
            fused = _column()
            fused.load_state_dict(native.state_dict())
            for tokens in (2, 3, 4, 5):
                x = torch.arange(tokens * 16.0).view(tokens, 1, 16)
                equal = torch.equal(native(x)[0], fused(x)[0])
                assert equal or tokens < 4  # beyond the limit it is the native path itself
            assert sum(answer.is_fused for answer in gate.answers("tp")) == 2
            # A rank that is in another group, too, counts as those do that are not: what one group decides its ranks
            # know alike.
            fresh._counts["tp column", None, False] = 2
            swap_decisions(fresh)
            fused(torch.ones(6, 1, 16))
            swap_decisions(fresh)
            assert [answer.context is None for answer in fresh.answers()] == [False]
    finally:
        gate.most_shapes = saved


def test_ever_new_shapes_run_natively_after_a_while():
    run_workers(2, _too_many_shapes)


def test_decisions_are_of_one_batch_invariant_mode(monkeypatch):
    """It swaps the kernels that native multiplies by, on and off in one process: what is decided with one holds for it
    alone."""
    from megatron.core.transformer.custom_layers import batch_invariant_kernels

    import ditron_train.megatron as plugin
    from ditron_train.megatron.sp.exchange import AttentionShape
    from ditron_train.megatron.sp.spec import ExchangeOp, route_exchange
    from ditron_train.megatron.tp.routing import route
    from ditron_train.megatron.tp.spec import LinearOp
    from ditron_train.policy import Gate, switches

    plugin.apply(features="tp")
    plugin.restore()
    x, weight, asked = torch.zeros(2, 1, 16), torch.zeros(32, 16), []
    monkeypatch.setattr(ExchangeOp, "unsupported_reason", lambda self, call: asked.append("sp") or "of this test")
    monkeypatch.setattr(LinearOp, "unsupported_reason", lambda self, call: asked.append("tp") or "of this test")
    fresh, query = Gate(), torch.zeros(2, 1, 4, 8)
    swap_decisions(fresh)
    try:
        for is_on in (False, True, False, True):
            monkeypatch.setattr(batch_invariant_kernels, "_batch_invariant_MODE", is_on)
            assert ("batch invariant" in switches()) == is_on
            route("row", x, weight, group=None, sequence_parallel=True)
            route_exchange(None, AttentionShape(4, 4, 8, 8), query)
    finally:
        swap_decisions(fresh)
    assert asked == ["tp", "sp"] * 2


def _bad_input():
    import ditron_train.megatron as plugin

    with pytest.raises(SettingError, match="does not know 'warp'; it takes a comma-separated list of: tp"):
        plugin.apply(features="tp,warp")
    with pytest.raises(SettingError, match="DITRON_TIMEOUT_S"):
        plugin.apply(timeout_s=-1)
    plugin.restore()
    with pytest.raises(SettingError, match="DITRON_TRANSPORT"):
        plugin.apply(transport="pigeon")
    plugin.restore()
    assert plugin.active_features() == () and "DITRON_TRANSPORT" not in os.environ


def test_bad_input_is_the_same_error_on_every_rank_and_changes_nothing():
    run_workers(2, _bad_input)


def _two_groups():
    """Two tensor parallel groups in one job: each has a context and memory of its own."""
    import ditron_train.megatron as plugin
    from ditron_train.policy import gate
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=2):
        plugin.apply()
        layer = _column()
        layer.weight.data.fill_(1.0 + dist.get_rank() // 2)
        x = torch.full((2, 1, 16), float(1 + dist.get_rank()))
        y, _ = layer(x)
        first = dist.get_rank() // 2 * 2
        rows = torch.cat([torch.full((2,), float(1 + first)), torch.full((2,), float(2 + first))])
        assert torch.equal(y[:, 0, 0], rows * 16 * (1 + first // 2))
        assert [answer.context is not None for answer in gate.answers("tp")] == [True]


def test_two_tensor_parallel_groups():
    run_workers(4, _two_groups)


def test_importing_the_plugin_imports_no_megatron():
    import subprocess
    import sys

    code = "import sys, ditron_train.megatron; sys.exit(any(n.split('.')[0] == 'megatron' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S).returncode == 0
