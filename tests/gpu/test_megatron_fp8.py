"""Stacks of Transformer Engine's layers in FP8 under Megatron's contexts: steps, microbatches, recomputation, and what
a checkpoint holds behind them. One layer at a time is in ``test_megatron_tp``."""

from __future__ import annotations

import contextlib
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_megatron_tp import (  # noqa: F401  (fixtures)
    _assert_same,
    _build,
    _config,
    _import_te,
    _normals,
    _num_ops,
    _wherever_bits_are_equal,
    tensor_parallel,
)

from ditron_train.stream.recorder import OpRecorder
from ditron_train.tp.reduce_scatter import ReduceScatter

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

HIDDEN, FFN, TOKENS = 512, 1024, 1024
STACK = (("te_norm_column", FFN, HIDDEN), ("te_row", HIDDEN, FFN), ("te_column", FFN, HIDDEN), ("te_row", HIDDEN, FFN))
RECIPES = ["tensorwise", "delayed", "blockwise"]


def _bytes_of(named):
    """So that NaN equals NaN of the same bits."""
    return {name: value.contiguous().cuda().view(torch.uint8) for name, value in named.items()}


def _saved(layer):
    """What a checkpoint holds of the state of FP8, as tensors."""
    saved = layer.get_extra_state().numpy().tobytes()
    state = pickle.loads(saved) if saved else {}  # of a layer in bf16 it is empty
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _parameter(layer):
    """A weight's values, or its bytes and scales where it is FP8."""
    fields = layer.weight.get_metadata() if hasattr(layer.weight, "get_metadata") else {"weight": layer.weight.data}
    return {name: value.clone() for name, value in fields.items() if isinstance(value, torch.Tensor)}


def _layers(index, config, how):
    from megatron.core.extensions.transformer_engine import set_save_original_input
    from megatron.core.fp8_utils import get_fp8_context

    with get_fp8_context(config, is_init=True):
        layers = [_build(kind, index, n, k, config, False, True) for kind, n, k in STACK]
    for (kind, _, _), layer in zip(STACK, layers):
        if how == "input saved" and kind != "te_norm_column":
            set_save_original_input(layer)
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")
        layer.weight.grad_added_to_main_grad = False
    return layers


def _steps(index, config, world_size, how):
    """Results, gradients and state of five steps of two microbatches, whose inputs grow and shrink."""
    from megatron.core.extensions.transformer_engine import te_checkpoint
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    layers, found = _layers(index, config, how), {}
    masters = [_normals(*layer.weight.shape, seed=50 + place) * 0.05 for place, layer in enumerate(layers)]

    def run(x):
        for place, layer in enumerate(layers):
            # With the ends in bf16 each layer has a context, as in Megatron's blocks.
            with get_fp8_context(config, place) if how == "ends in bf16" else contextlib.nullcontext():
                x, _ = layer(x)
        return x

    for step in range(5):
        for layer, master in zip(layers, masters):
            layer.is_first_microbatch = True
            with torch.no_grad():
                layer.weight.copy_(master)
        for microbatch in range(2):
            seed = 10 * step + microbatch
            x = (_normals(TOKENS // world_size, 1, HIDDEN, seed=seed) * (1 + 3 * (step % 3))).requires_grad_()
            if how == "NaN and inf" and step == 2:
                x.data[7 + dist.get_rank(), 0, 3 + microbatch] = (float("nan"), float("inf"))[microbatch]
            with contextlib.nullcontext() if how == "ends in bf16" else get_fp8_context(config, 0):
                if how == "recomputed":
                    y = te_checkpoint(run, False, get_cuda_rng_tracker, get_tensor_model_parallel_group(), x)
                else:
                    y = run(x)
            y.backward(_normals(*y.shape, seed=seed + 5))
            # On the CPU, so that each step allocates alike: what comes again at the same addresses is recorded.
            found.update({f"y {seed}": y.detach().cpu(), f"dx {seed}": x.grad.cpu()})
        for place, (layer, master) in enumerate(zip(layers, masters)):
            kept = {"main_grad": layer.weight.main_grad.clone(), **_saved(layer), **_parameter(layer)}
            found.update({f"{name} {step} {place}": value.cpu() for name, value in kept.items()})
            if how != "NaN and inf":
                master -= 0.01 * torch.nn.functional.normalize(layer.weight.main_grad, dim=None).to(master.dtype)
            layer.weight.main_grad.zero_()
    return found


@pytest.mark.parametrize(
    "how", ["input quantized", "input saved", "recomputed", "FP8 parameters", "ends in bf16", "NaN and inf"]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_stacks_leave_the_state_of_the_native_path(tensor_parallel, all_equal, monkeypatch, recipe, how):  # noqa: F811
    if recipe == "delayed" and how in ("input saved", "ends in bf16"):
        pytest.skip("Megatron refuses it")
    if recipe == "delayed" and how == "FP8 parameters":
        pytest.skip("native: scales of delayed scaling were seen to differ")
    _import_te()
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    from ditron_train.megatron.tp import te_passes
    from ditron_train.policy import gate

    reduced = mock.Mock(side_effect=te_passes.largest_of_ranks)
    monkeypatch.setattr(te_passes, "largest_of_ranks", reduced)
    repeat_op, repeated = OpRecorder.repeat, []

    def repeat(*args, **kwargs):
        is_repeated = repeat_op(*args, **kwargs)
        repeated.append(is_repeated and isinstance(args[1][0], ReduceScatter))
        return is_repeated

    monkeypatch.setattr(OpRecorder, "repeat", repeat)
    gate.forget()
    options = {"fp8_param": True} if how == "FP8 parameters" else {}
    if how == "ends in bf16":
        options = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    config = _config(
        HIDDEN, fp8="hybrid", fp8_recipe=recipe, fp8_amax_history_len=3, fp8_amax_compute_algo="max",
        gradient_accumulation_fusion=True, **{"num_layers": 4, **options},
    )  # fmt: skip
    found = []
    for index in (0, 1):
        FP8GlobalStateManager.reset()  # the other stack is not part of this one's reductions
        found.append(_bytes_of(_steps(index, config, tensor_parallel, how)))
    _assert_same(all_equal, *found, (recipe, how))
    assert any("amax_history" in name for name in found[0]) == (recipe == "delayed")
    if recipe == "blockwise":  # whose rows are multiplied where they always are
        assert sum(repeated) >= 6, f"{sum(repeated)} products of rows, of {len(repeated)} ops, were repeated"
    is_fp8 = len({(kind != "te_row", n, k) for kind, n, k in STACK})
    num_decisions = 2 if how == "recomputed" else 1  # the first forward of what is recomputed has no backward
    assert _num_ops() == num_decisions * is_fp8 + (2 if how == "ends in bf16" else 0)
    assert (reduced.call_count > 0) == (recipe == "tensorwise"), "amaxes of all ranks are asked for by the passes"


def test_the_largest_amax_of_all_ranks(device, all_equal):
    """Against NCCL's, called and replayed from a graph in turn; with gloo in its place numbers alone."""
    from ditron_train.tp import get_tp_context
    from ditron_train.tp.all_reduce import largest_of_ranks

    rank, world_size, nan, inf = dist.get_rank(), dist.get_world_size(), float("nan"), float("inf")
    context, value = get_tp_context(None, device), torch.zeros(1, device=device)
    largest_of_ranks(value, context=context)
    context.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        largest_of_ranks(value, context=context)
    for repeat in range(24):
        others = [1.0 + (7 * peer + repeat) % 5 for peer in range(world_size)]
        others[repeat % world_size] = (0.0, inf, nan, 2.0**-130)[repeat % 4]
        values = [nan] * world_size if repeat % 6 == 5 and dist.get_backend() == "nccl" else others
        value.fill_(values[rank])
        expected = value.clone()
        dist.all_reduce(expected, op=dist.ReduceOp.MAX)
        graph.replay() if repeat % 3 == 0 else largest_of_ranks(value, context=context)
        if dist.get_backend() == "nccl":
            assert all_equal(value.view(torch.int32), expected.view(torch.int32)), (repeat, values)
        else:
            assert value.item() == max(one for one in values if one == one), (repeat, values)
    context.synchronize()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_graph_replay(tensor_parallel, all_equal, recipe):  # noqa: F811
    """Forward and backward of a column and a row layer captured once, behind overlapped warm-ups, replayed on new
    data."""
    _import_te()
    from megatron.core.fp8_utils import get_fp8_context

    if recipe == "tensorwise" and dist.get_backend() != "nccl":
        pytest.skip("its amax is reduced by gloo, which no graph holds")
    config = _config(HIDDEN, fp8="hybrid", fp8_recipe=recipe)
    pairs = [[_build(kind, index, n, k, config, False, True) for kind, n, k in STACK[:2]] for index in (0, 1)]
    x = torch.empty(TOKENS // tensor_parallel, 1, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    grad = torch.empty_like(x)

    def run(column, row, x):
        for tensor in (x, column.weight, row.weight):
            tensor.grad = None
        with get_fp8_context(config, 0):
            y, _ = row(column(x)[0])
        y.backward(grad)
        return {"y": y.detach(), "dx": x.grad, "column": column.weight.grad, "row": row.weight.grad}

    x.data.normal_()
    grad.normal_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(*pairs[1], x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    for layer in pairs[1]:
        layer.is_first_microbatch = True  # weights are quantized in the graph
    before, graph = _num_ops(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run(*pairs[1], x)
    assert _num_ops() == before
    for repeat in range(4):
        x.data.copy_(_normals(*x.shape, seed=repeat))
        grad.copy_(_normals(*x.shape, seed=10 + repeat))
        graph.replay()
        torch.cuda.synchronize()
        _assert_same(all_equal, run(*pairs[0], x.detach().clone().requires_grad_()), results, (recipe, repeat))


def test_rows_on_two_streams(tensor_parallel, all_equal):  # noqa: F811
    """Two row layers whose products work in the same memory, each on a stream of its own, one of which is late."""
    _import_te()
    from megatron.core.fp8_utils import get_fp8_context

    from ditron_train.policy import gate

    gate.forget()
    config = _config(HIDDEN, fp8="hybrid", fp8_recipe="blockwise")
    layers = [[_build("te_row", index, HIDDEN, FFN, config, False, True) for _ in range(2)] for index in (0, 1)]
    for pair in layers:
        pair[1].weight.data.neg_()
    inputs = [_normals(TOKENS, 1, FFN // tensor_parallel, seed=seed) for seed in range(16)]
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    for pair in layers:
        torch.cuda.synchronize()
        results: list[torch.Tensor] = []
        for place, x in enumerate(inputs):
            with torch.cuda.stream(streams[place % 2]), torch.no_grad(), get_fp8_context(config, 0):
                if place % 4 == 0:  # the other stream's call comes sooner to the device, were it not ordered
                    torch.cuda._sleep(20_000_000)
                results.append(pair[place % 2](x)[0])
        torch.cuda.synchronize()
        found.append({str(place): value for place, value in enumerate(results)})
    _assert_same(all_equal, *found, "two streams")
    assert _num_ops() == 1
