"""Our column and row linear layers against megatron-core's own, on gloo: outputs and every gradient.

The data are small integers in fp32, so every GEMM and every sum is exact in any order: equality is bitwise.
"""

import sys

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_workers

pytest.importorskip("megatron.core")

TOKENS, BATCH, HIDDEN, FFN = 24, 2, 48, 96


def _integers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def _config(**options):
    from megatron.core.transformer import TransformerConfig

    from ditron_train.cpu.megatron_shim import CPU_CONFIG

    settings = {"add_bias_linear": False, **CPU_CONFIG, **options}
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        params_dtype=torch.float32,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=options.pop("sequence_parallel", True),
        **{key: value for key, value in settings.items() if key != "sequence_parallel"},
    )


def _integer_init(weight):
    with torch.no_grad():
        weight.copy_(_integers(*weight.shape, seed=weight.shape[0]))


def _layers(fused, config, *, bias=False, skip_bias_add=False, ffn=FFN, **column_options):
    """One column and one row layer; rank-dependent integer weights and biases, the same for native and fused."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from ditron_train.megatron.tp.layers import DitronColumnParallelLinear, DitronRowParallelLinear

    column_class, row_class = ColumnParallelLinear, RowParallelLinear
    if fused:
        column_class, row_class = DitronColumnParallelLinear, DitronRowParallelLinear
    column = column_class(
        HIDDEN, ffn, config=config, init_method=_integer_init, bias=bias, skip_bias_add=skip_bias_add, **column_options
    )
    row = row_class(
        ffn,
        HIDDEN,
        config=config,
        init_method=_integer_init,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=skip_bias_add,
    )
    for index, parameter in enumerate((*column.parameters(), *row.parameters())):
        parameter.data.copy_(_integers(*parameter.shape, seed=100 * dist.get_rank() + index))
    return column, row


def _run(column, row, tokens=TOKENS, batch=BATCH):
    """Forward and backward through both; returns everything that came out, by name."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    shape = (tokens // world_size, batch, HIDDEN) if batch else (tokens // world_size, HIDDEN)
    x = _integers(*shape, seed=7 + rank).requires_grad_()
    hidden, column_bias = column(x)
    y, row_bias = row(hidden)
    (y * _integers(*y.shape, seed=50 + rank)).sum().backward()
    found = {"hidden": hidden, "y": y, "column_bias": column_bias, "row_bias": row_bias, "dx": x.grad}
    for name, layer in (("column", column), ("row", row)):
        found.update({f"d{name}.{key}": p.grad for key, p in layer.named_parameters()})
        found.update({f"main.{name}.{key}": getattr(p, "main_grad", None) for key, p in layer.named_parameters()})
    return {key: value.detach().clone() if torch.is_tensor(value) else value for key, value in found.items()}


def _assert_equal(native, fused):
    assert native.keys() == fused.keys()
    for key, expected in native.items():
        if expected is None:
            assert fused[key] is None, key
        else:
            assert torch.equal(fused[key], expected), key


def _assert_ran_as_ops():
    from ditron_train.policy import gate

    answers = gate.answers("tp")
    assert answers and all(answer.context is not None for answer in answers)


def _compare(options, sizes):
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        config = _config()
        ffn = sizes.pop("ffn", FFN)
        native = _run(*_layers(False, config, ffn=ffn, **options), **sizes)
        fused = _run(*_layers(True, config, ffn=ffn, **options), **sizes)
        _assert_equal(native, fused)
        _assert_ran_as_ops()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"bias": True, "skip_bias_add": True}], ids=["no-bias", "bias", "bias-returned"]
)
def test_layers_equal_native(world_size, options):
    run_workers(world_size, _compare, options, {})


@pytest.mark.parametrize(
    "sizes", [{"tokens": 2, "batch": 1}, {"tokens": 150, "batch": 3}, {"tokens": 36, "batch": None}, {"ffn": 100}],
    ids=["one-token", "uneven-tiles", "two-dimensions", "unaligned"],
)  # fmt: skip
def test_sizes(sizes):
    run_workers(2, _compare, {"bias": True}, dict(sizes))


def _frozen():
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        found = []
        for fused in (False, True):
            column, row = _layers(fused, _config(), bias=True)
            column.weight.requires_grad_(False)
            row.weight.requires_grad_(False)
            found.append(_run(column, row))
        assert found[0]["dcolumn.weight"] is None and found[0]["drow.weight"] is None
        _assert_equal(*found)
        _assert_ran_as_ops()


def test_frozen_weights():
    run_workers(2, _frozen)


def _what_runs(frozen):
    """What of native's layers and of our dgrads the policy had compared, and what training then ran, of a column layer
    whose weight is frozen or deferred."""
    from ditron_train.megatron.tp import spec
    from ditron_train.tp import linear
    from tests.support.model_parallel import model_parallel

    ran, found = [], []
    names = {linear: ("_column_gradients", "gemm_rs"), spec: ("linear_with_frozen_weight",)}
    before = {(module, name): getattr(module, name) for module in names for name in names[module]}
    for (module, name), function in before.items():
        setattr(module, name, lambda *a, name=name, function=function, **k: (ran.append(name), function(*a, **k))[1])
    probe = sys.modules["ditron_train.policy.decide"].probe

    def comparing(native, fused, **options):  # as on a GPU
        native()
        return probe(native, fused, **options)

    sys.modules["ditron_train.policy.decide"].probe = comparing
    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        config = _config()
        config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = not frozen, 0
        column, _ = _layers(
            True, config, **({} if frozen else {"embedding_activation_buffer": [], "grad_output_buffer": []})
        )
        column.weight.requires_grad_(not frozen)
        for _ in range(2):
            x = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
            y, _ = column(x)
            compared, ran[:] = list(ran), []
            y.backward(torch.ones_like(y))  # that of a sum has strides of 0
            found.append((compared, list(ran)))
            ran.clear()
    sys.modules["ditron_train.policy.decide"].probe = probe
    for (module, name), function in before.items():
        setattr(module, name, function)
    return found


@pytest.mark.parametrize("frozen, native", [(True, ["linear_with_frozen_weight"]), (False, [])])
def test_what_runs_without_a_weight_gradient_was_compared(frozen, native):
    dgrad = "gemm_rs" if frozen else "_column_gradients"
    for first, second in run_workers(2, _what_runs, frozen):
        assert first == ([*native, dgrad], [dgrad]) and second == ([], [dgrad])


def _fused(flags):
    import ditron_train.megatron as plugin
    from tests.support.model_parallel import model_parallel

    plugin.apply(features="wgrad")
    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        config = _config(gradient_accumulation_fusion=True)
        found = []
        for fused in (False, True):
            column, row = _layers(fused, config)
            for weight in (column.weight, row.weight):
                weight.main_grad = buffer = torch.full(weight.shape, 3.0)
                if "fsdp" in flags:  # Megatron-FSDP has a buffer for it from backward on
                    weight.__fsdp_param__, weight.main_grad, weight.get_main_grad = (
                        True,
                        None,
                        lambda buffer=buffer: buffer,
                    )
                if "flag" in flags:
                    weight.grad_added_to_main_grad = False
                if "zero" in flags:
                    weight.zero_out_wgrad = True
            result = _run(column, row)
            if "flag" in flags and "zero" not in flags:  # the dummy is uninitialised memory
                for name in ("dcolumn.weight", "drow.weight"):
                    result[name] = torch.tensor(result[name].shape)
            result["flags"] = torch.tensor(
                [getattr(w, "grad_added_to_main_grad", -1) for w in (column.weight, row.weight)]
            )
            found.append(result)
        _assert_equal(*found)
        assert not torch.equal(found[1]["main.column.weight"], torch.full_like(found[1]["main.column.weight"], 3.0))
        _assert_ran_as_ops()


@pytest.mark.parametrize(
    "flags", [(), ("flag",), ("flag", "zero"), ("flag", "fsdp")], ids=["none", "flag", "zero", "fsdp"]
)
def test_wgrad_into_main_grad(flags):
    run_workers(2, _fused, flags)


def _deferred():
    import ditron_train.megatron as plugin
    from tests.support.model_parallel import model_parallel

    plugin.apply(features="wgrad")
    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        found = []
        for fused in (False, True):
            config = _config(gradient_accumulation_fusion=True)
            config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, 1
            inputs, grads = [], []
            column, row = _layers(fused, config, embedding_activation_buffer=inputs, grad_output_buffer=grads)
            for weight in (column.weight, row.weight):
                weight.main_grad = torch.zeros_like(weight)
            first = _run(column, row)
            assert len(inputs) == len(grads) == 1
            assert not column.weight.main_grad.any()  # left to later
            second = _run(column, row)
            assert len(grads) == 1 and column.weight.main_grad.any()  # the buffer is full: computed at once
            found.append({**{f"1{k}": v for k, v in first.items()}, **second, "kept": grads[0], "input": inputs[0]})
        _assert_equal(*found)
        _assert_ran_as_ops()


def test_deferred_wgrad():
    run_workers(2, _deferred)


def _recomputed():
    from megatron.core import tensor_parallel

    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        found = []
        for fused in (False, True):
            column, row = _layers(fused, _config())
            x = _integers(TOKENS // 2, BATCH, HIDDEN, seed=dist.get_rank()).requires_grad_()
            y = tensor_parallel.checkpoint(lambda t: row(column(t)[0])[0], False, x)  # noqa: B023
            y.square().sum().backward()
            found.append({"y": y.detach(), "dx": x.grad, "dc": column.weight.grad, "dr": row.weight.grad})
        _assert_equal(*found)
        _assert_ran_as_ops()


def test_activation_recomputation():
    run_workers(2, _recomputed)


def _first_called_where_saved_tensors_are_hooked(hooked):
    from torch.utils.checkpoint import checkpoint

    from tests.support.model_parallel import model_parallel

    saved = []

    def both(layers, x):
        """Saved tensors are counted, as torch's checkpoint does, or looked up later, as megatron-core's offloading
        does."""
        if hooked == "checkpoint":
            return checkpoint(lambda t: layers[1](layers[0](t)[0])[0], x, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.append(t), len(saved) - 1)[1], lambda i: saved[i]
        ):
            return layers[1](layers[0](x)[0])[0]

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        found = []
        for fused in (False, True):
            layers = _layers(fused, _config())
            x = _integers(TOKENS // 2, BATCH, HIDDEN, seed=dist.get_rank()).requires_grad_()
            saved.clear()
            y = both(layers, x)
            num_saved = len(saved)
            y.square().sum().backward()
            found.append({"y": y.detach(), "dx": x.grad, "dc": layers[0].weight.grad, "dr": layers[1].weight.grad})
            assert num_saved == (0 if hooked == "checkpoint" else 4)  # input and weight of each layer
        _assert_equal(*found)
        _assert_ran_as_ops()


@pytest.mark.parametrize("hooked", ["checkpoint", "hooks"])
def test_what_a_decision_saves_is_not_seen_by_hooks_of_saved_tensors(hooked):
    run_workers(2, _first_called_where_saved_tensors_are_hooked, hooked)


def _weight_argument_and_gathered_output():
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        found = []
        for fused in (False, True):
            column, _ = _layers(fused, _config(), skip_weight_param_allocation=True)
            weight = _integers(FFN // 2, HIDDEN, seed=dist.get_rank()).requires_grad_()
            x = _integers(TOKENS // 2, BATCH, HIDDEN, seed=3).requires_grad_()
            y, bias = column(x, weight=weight, runtime_gather_output=True)
            assert y.shape[-1] == FFN and bias is None
            y.square().sum().backward()
            found.append({"y": y.detach(), "dx": x.grad, "dw": weight.grad})
        _assert_equal(*found)
        _assert_ran_as_ops()


def test_weight_given_in_the_call_and_output_gathered():
    run_workers(2, _weight_argument_and_gathered_output)


def _pipelined_microbatches():
    """Several forwards before the first backward, as under 1F1B: each backward must find its own input."""
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        found = []
        for fused in (False, True):
            column, row = _layers(fused, _config())
            inputs = [_integers(TOKENS // 2, BATCH, HIDDEN, seed=s).requires_grad_() for s in range(3)]
            outputs = [row(column(x)[0])[0] for x in inputs]
            for y in reversed(outputs):
                y.square().sum().backward()
            found.append(
                {**{f"dx{i}": x.grad for i, x in enumerate(inputs)}, "dc": column.weight.grad, "dr": row.weight.grad}
            )
        _assert_equal(*found)
        _assert_ran_as_ops()


def test_several_forwards_before_backward():
    run_workers(2, _pipelined_microbatches)


def _microbatches_on_their_way():
    """Two steps of three microbatches added up in ``main_grad``, then one recomputed and one evaluation."""
    from megatron.core import tensor_parallel

    import ditron_train.megatron as plugin
    from tests.support.model_parallel import model_parallel

    plugin.apply(features="wgrad")
    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        found = []
        for fused in (False, True):
            column, row = _layers(fused, _config(gradient_accumulation_fusion=True), bias=True)
            for weight in (column.weight, row.weight):
                weight.main_grad = torch.zeros_like(weight)
            result = {}
            for step in range(2):
                inputs = [_integers(TOKENS // 2, BATCH, HIDDEN, seed=3 * step + s).requires_grad_() for s in range(3)]
                outputs = [row(column(x)[0])[0] for x in inputs]
                for index, y in enumerate(outputs):
                    y.square().sum().backward()
                    result[f"dx{step}{index}"] = inputs[index].grad
            y = tensor_parallel.checkpoint(lambda x: row(column(x)[0])[0], False, inputs[0])  # noqa: B023
            y.sum().backward()
            with torch.no_grad():
                result["evaluated"] = row(column(inputs[1])[0])[0]
            result |= {"dc": column.weight.main_grad, "dr": row.weight.main_grad, "db": column.bias.grad}
            found.append({**result, "dx": inputs[0].grad, "y": y.detach()})
        _assert_equal(*found)
        _assert_ran_as_ops()


def test_several_microbatches_on_their_way():
    run_workers(2, _microbatches_on_their_way)


def _library_after_tiles(tiles_us, library_us, equal_bits=(True, True)):
    """Layers whose tiles and whose products by the library take so long, 100 us natively, or have those bits. Returns
    how often the policy timed a layer, what the library multiplies from then on, and how often it did in a step."""
    import importlib
    from unittest import mock

    from megatron.core.parallel_state import get_tensor_model_parallel_group

    from ditron_train.policy import gate
    from ditron_train.policy.probe import Observation
    from ditron_train.tp import get_tp_context
    from ditron_train.tp.ag_gemm import LibraryAgGemmPlan
    from tests.support.model_parallel import model_parallel

    decide, run, runs, probes = (
        importlib.import_module("ditron_train.policy.decide"), LibraryAgGemmPlan.run, [], []
    )  # fmt: skip

    def counted(self, *given, **options):
        runs.append(self)
        return run(self, *given, **options)

    def probe(native, fused, **_):
        before = len(runs)
        fused()
        by_library = bool(len(runs) - before) or bool(context.way)
        probes.append(by_library)
        return Observation(equal_bits[by_library], 100.0, library_us if by_library else tiles_us)

    gate.forget("tp")
    with (
        model_parallel(tensor_model_parallel_size=dist.get_world_size()),
        mock.patch.object(decide, "probe", probe),
        mock.patch.object(LibraryAgGemmPlan, "run", counted),
    ):
        context = get_tp_context(get_tensor_model_parallel_group(), torch.device("cpu"))
        native, fused = (_layers(fused, _config()) for fused in (False, True))
        expected = _run(*native)
        _run(*fused)
        asked, before = len(probes), len(runs)
        for layer in fused:
            layer.weight.grad = None
        _assert_equal(expected, _run(*fused))
        assert len(probes) == asked
        found = sorted(f"{problem.op} {problem.layout}" for problem in context.by_library)
    gate.forget("tp")
    return asked, found, len(runs) - before


@pytest.mark.parametrize(
    "times, equal_bits, found",
    [
        ((90.0, 80.0), (True, True), (2, [], 0)),  # tiles will do
        ((110.0, 90.0), (True, True), (4, ["ag_gemm nn", "ag_gemm nt", "gemm_rs nt"], 2)),
        ((110.0, 120.0), (True, True), (4, [], 0)),
        ((90.0, 90.0), (False, True), (4, ["ag_gemm nn", "ag_gemm nt", "gemm_rs nt"], 2)),
        ((90.0, 90.0), (False, False), (4, [], 0)),
    ],
)
def test_the_library_multiplies_where_tiles_are_slower(times, equal_bits, found):
    env = {"DITRON_POLICY": "strict"}
    assert run_workers(2, _library_after_tiles, *times, equal_bits, env=env) == [found] * 2


def _made_in_inference_mode():
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()), torch.inference_mode():
        found = []
        for fused in (False, True):
            column, row = _layers(fused, _config())
            assert column.weight.is_inference() and row.weight.is_inference()
            hidden, _ = column(_integers(TOKENS // 2, BATCH, HIDDEN, seed=dist.get_rank()))
            found.append({"hidden": hidden, "y": row(hidden)[0]})
        _assert_equal(*found)
        _assert_ran_as_ops()


def test_weights_made_in_inference_mode():
    run_workers(2, _made_in_inference_mode)


def _reduced(options, frozen):
    """The layers without sequence parallelism, whose tokens are whole on every rank."""
    from ditron_train.policy import gate
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        config, found = _config(sequence_parallel=False), []
        for fused in (False, True):
            column, row = _layers(fused, config, **options)
            column.weight.requires_grad_(not frozen)
            x = _integers(TOKENS, BATCH, HIDDEN, seed=7).requires_grad_()
            hidden, column_bias = column(x)
            y, row_bias = row(hidden)
            (y * _integers(*y.shape, seed=50)).sum().backward()
            parameters = {f"d{n}": p.grad for layer in (column, row) for n, p in layer.named_parameters(f"{layer}")}
            found.append(
                {"hidden": hidden, "y": y, "dx": x.grad, "column": column_bias, "row": row_bias, **parameters}
            )
        names = [{name.replace("Ditron", ""): value for name, value in one.items()} for one in found]
        _assert_equal(*names)
        (answer,) = gate.answers("tp row ar")
        assert answer.context is not None and not gate.answers("tp column"), "the column layer is native"


@pytest.mark.parametrize(
    ("world_size", "options", "frozen"),
    [(2, {}, False), (2, {"bias": True}, True), (4, {"bias": True, "skip_bias_add": True}, False)],
)
def test_layers_without_sequence_parallelism_equal_native(world_size, options, frozen):
    run_workers(world_size, _reduced, options, frozen)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_an_input_with_strides_is_compared_as_a_copy(kind):
    """What the policy compares with refuses strides in front of a gather; Transformer Engine's layers copy them."""
    from ditron_train.megatron.tp.linear_call import LinearCall
    from ditron_train.megatron.tp.spec import LinearOp

    x = torch.arange(40.0).view(8, 1, 5)[..., :3]
    given, _ = LinearOp(kind).inputs(LinearCall(x, torch.ones(4, 3), None))
    assert given.is_contiguous() and torch.equal(given, x) and not x.is_contiguous()
