"""Our tensor parallel layers against Megatron's own, local and Transformer Engine, bit for bit.

Outputs and every gradient: published shapes, random ones, bias, weight gradients into ``main_grad``, recomputation, a
whole GPT, and CUDA graph replay. Whatever the routing decides, bits must equal; where an op is expected to run, that
it did is asserted too.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ditron_train.data import load_workloads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
pytest.importorskip("megatron.core")

NUM_RANDOM_SHAPES, NUM_RANDOM_SHAPES_OF_SHARED_GPUS = 100, 12  # of each of five layers
AG_SHAPES, RS_SHAPES = (load_workloads()[name]["shapes"] for name in ("ag_gemm", "gemm_rs"))


@pytest.fixture(autouse=True)
def _wherever_bits_are_equal(monkeypatch):
    """Whether an op is faster on this machine is not what these tests are about."""
    monkeypatch.setenv("DITRON_POLICY", "bits")


@pytest.fixture(scope="module")
def tensor_parallel(device):
    """Megatron's groups: tensor parallel over all ranks."""
    from megatron.core import parallel_state

    import ditron_train.megatron
    from ditron_train.cpu import megatron_shim as megatron_cpu

    if dist.get_world_size() == 1:
        pytest.skip("needs at least 2 GPUs")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    megatron_cpu.seed(1)
    megatron_cpu.allow_torch_norm_with_sequence_parallel()
    yield dist.get_world_size()
    ditron_train.megatron.restore()
    megatron_cpu.uninstall()
    parallel_state.destroy_model_parallel()


def _config(hidden=128, dtype=torch.bfloat16, **options):
    from megatron.core.transformer import TransformerConfig

    settings = {
        "num_layers": 2,
        "num_attention_heads": 8,
        "add_bias_linear": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": dist.get_world_size(),
        "sequence_parallel": True,
        **options,
    }
    return TransformerConfig(hidden_size=hidden, params_dtype=dtype, bf16=dtype == torch.bfloat16, **settings)


def _normals(*shape, seed, dtype=torch.bfloat16):
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + dist.get_rank())
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)


def _classes(kind):
    """Megatron's class and the fused one."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from ditron_train.megatron.tp import layers as tp

    if kind in ("column", "row"):
        return {
            "column": (ColumnParallelLinear, tp.DitronColumnParallelLinear),
            "row": (RowParallelLinear, tp.DitronRowParallelLinear),
        }[kind]
    te = _import_te()
    return {
        "te_column": (te.TEColumnParallelLinear, te.DitronTEColumnParallelLinear),
        "te_norm_column": (te.TELayerNormColumnParallelLinear, te.DitronTELayerNormColumnParallelLinear),
        "te_row": (te.TERowParallelLinear, te.DitronTERowParallelLinear),
    }[kind]


def _import_te():
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    from ditron_train.megatron.tp import te_layers as tp_te

    return tp_te


def _build(kind, index, n, k, config, bias, skip_bias_add):
    options = {"config": config, "init_method": torch.nn.init.normal_, "bias": bias, "skip_bias_add": skip_bias_add}
    if "column" in kind:
        options["gather_output"] = False
    else:
        options["input_is_parallel"] = True
    layer = _classes(kind)[index](k, n, is_expert=False, **options)
    with torch.no_grad():  # also of parameters in FP8
        for position, parameter in enumerate(layer.parameters()):
            scale = 0.5 if parameter.dim() == 1 else 0.05
            parameter.copy_(_normals(*parameter.shape, seed=position, dtype=parameter.dtype) * scale)
    return layer


def _sliced(shape, num_more, seed, dtype):
    """Values of this shape, of rows that go on for ``num_more``."""
    return _normals(*shape[:-1], shape[-1] + num_more, seed=seed, dtype=dtype)[..., : shape[-1]]


def _forward_backward(kind, layer, m, k, dtype, seed, num_more=0):
    world_size = dist.get_world_size()
    shape = (m // world_size, 1, k) if "column" in kind else (m, 1, k // world_size)
    x = _sliced(shape, num_more, seed + 70, dtype).requires_grad_()
    y, bias = layer(x)
    y.backward(_sliced(y.shape, num_more, seed + 80, dtype))
    torch.cuda.synchronize()
    found = {"y": y.detach(), "dx": x.grad, "bias": bias}
    for name, parameter in layer.named_parameters():
        found[f"d{name}"] = parameter.grad
        found[f"main {name}"] = getattr(parameter, "main_grad", None)
    return found


def _assert_same(all_equal, native, fused, what):
    assert native.keys() == fused.keys()
    for name, expected in native.items():
        if expected is None:
            assert fused[name] is None, (what, name)
        else:
            assert all_equal(fused[name], expected), (what, name)


def _compare(
    all_equal,
    kind,
    m,
    n,
    k,
    *,
    dtype=torch.bfloat16,
    bias=False,
    skip_bias_add=False,
    is_frozen=False,
    seed=0,
    num_more=0,
    **options,
):
    from ditron_train.policy import gate

    gate.forget()
    config = _config(hidden=max(128, k // 128 * 128), dtype=dtype, **options)
    layers = [_build(kind, index, n, k, config, bias, skip_bias_add) for index in (0, 1)]
    for layer in layers:
        layer.weight.requires_grad_(not is_frozen)
    native, fused = (_forward_backward(kind, layer, m, k, dtype, seed, num_more) for layer in layers)
    _assert_same(all_equal, native, fused, (kind, m, n, k, dtype))


def _num_ops():
    from ditron_train.policy import gate

    return sum(answer.context is not None for answer in gate.answers("tp"))


@pytest.mark.parametrize("shape", AG_SHAPES, ids=lambda shape: shape["model"])
@pytest.mark.parametrize("kind", ["column", "te_column", "te_norm_column"])
def test_column_layers_at_published_shapes(tensor_parallel, all_equal, kind, shape):
    _compare(all_equal, kind, shape["M"], shape["N"], shape["K"])
    assert _num_ops() == 1


@pytest.mark.parametrize(
    ("kind", "sequence_parallel"),
    [
        ("te_column", True),
        ("te_norm_column", True),
        ("row", False),
        ("row", True),
        ("te_row", False),
        ("te_row", True),
    ],
)
def test_inputs_and_gradients_with_strides(tensor_parallel, all_equal, kind, sequence_parallel):
    """As the latent that multi-head latent attention splits off. Kernels of Transformer Engine read no strides; NCCL
    refuses to gather them for Megatron's local column layer. Megatron's local row layer multiplies an input with
    strides as it is, so the fused path falls back to it."""
    _compare(all_equal, kind, 1024, 2048, 4096, num_more=64, sequence_parallel=sequence_parallel)
    if kind == "row":
        assert _num_ops() == 0, "the input has strides"
    else:
        assert _num_ops() >= 1, "native would be compared with native"


@pytest.mark.parametrize("kind", ["column", "te_column", "te_norm_column"])
def test_column_layers_with_a_frozen_weight(tensor_parallel, all_equal, kind):
    """Their dgrad is a GEMM-RS, in whose GEMM the long sum of the second shape may be split by cuBLAS."""
    _compare(all_equal, kind, 512, 14336 * tensor_parallel, 4096, is_frozen=True)  # native where cuBLAS splits the sum
    _compare(all_equal, kind, 8192, 11008, 4096, is_frozen=True)
    assert _num_ops() == 1


@pytest.mark.parametrize("shape", RS_SHAPES, ids=lambda shape: shape["model"])
@pytest.mark.parametrize("kind", ["row", "te_row"])
def test_row_layers_at_published_shapes(tensor_parallel, all_equal, kind, shape):
    _compare(all_equal, kind, shape["M"], shape["N"], shape["K"])
    assert _num_ops() == 1


@pytest.mark.parametrize("kind", ["column", "row", "te_column", "te_norm_column", "te_row"])
def test_layers_at_random_shapes(tensor_parallel, all_equal, kind, shares_gpus):
    _classes(kind)
    draw, num_fused = random.Random(kind), 0
    for seed in range(NUM_RANDOM_SHAPES_OF_SHARED_GPUS if shares_gpus else NUM_RANDOM_SHAPES):
        step = tensor_parallel * draw.choice([8, 8, 64, 128] if kind.startswith("te") else [1, 8, 8, 64, 128])
        m, n, k = (step * draw.randint(1, max(1, 3000 // step)) for _ in range(3))
        bias, dtype = draw.random() < 0.5, draw.choice([torch.bfloat16, torch.bfloat16, torch.float16])
        _compare(all_equal, kind, m, n, k, dtype=dtype, bias=bias, skip_bias_add=draw.random() < 0.7, seed=seed)
        num_fused += _num_ops()
    assert num_fused > 0, "native would be compared with native"


def _used_state(layer):
    """What Transformer Engine's quantizers of input, weight and output gradient keep; others never write it."""
    found = {}
    for name, indices in (("scaling_fwd", (0, 1)), ("scaling_bwd", (0,))):
        for index in indices:
            for what in ("scale", "amax"):  # of blocks nothing is kept
                found[f"{name} {index} {what}"] = getattr(layer.quantizers[name][index], what, None)
        found[f"{name} history"] = getattr(layer.fp8_meta[name], "amax_history", None)
    return {name: None if value is None else value.clone() for name, value in found.items()}


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("kind", ["te_column", "te_norm_column", "te_row"])
def test_te_layers_in_fp8_at_random_shapes(tensor_parallel, all_equal, kind, recipe):
    """Three steps each: results, gradients, and scales and histories behind them."""
    _import_te()
    from megatron.core.fp8_utils import get_fp8_context

    from ditron_train.policy import gate

    block = 128 if recipe == "blockwise" else 16
    draw, step, num_overlapped = random.Random(f"{kind} {recipe}"), block * tensor_parallel, [0, 0]
    for seed in range(4):
        gate.forget()
        m, n, k = (step * draw.randint(128 // block, 3000 // step) for _ in range(3))
        config = _config(hidden=max(128, k // 128 * 128), fp8=draw.choice(["hybrid", "e4m3"]), fp8_recipe=recipe)
        seen = []
        for index in (0, 1):
            bias = bool(seed % 2)  # of columns it is added inside the product
            layer, steps = _build(kind, index, n, k, config, bias, not bias), []
            for repeat in range(3):
                shape = (m // tensor_parallel, 1, k) if "column" in kind else (m, 1, k // tensor_parallel)
                x = _normals(*shape, seed=10 * seed + repeat).requires_grad_()
                with get_fp8_context(config, 0):
                    y, _ = layer(x)
                y.backward(_normals(*y.shape, seed=10 * seed + repeat + 5))
                named = {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
                steps.append({"y": y.detach(), "dx": x.grad, **named})
                layer.zero_grad()
            seen.append([*steps, _used_state(layer)])
        for native, fused in zip(*seen):
            _assert_same(all_equal, native, fused, (kind, recipe, m, n, k))
        num_overlapped[seed % 2] += _num_ops()
    assert min(num_overlapped) > 0, "without and with a bias"


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("kind", ["te_column", "te_norm_column", "te_row"])
@pytest.mark.parametrize("flags", [(), ("flag",), ("flag", "zero")], ids=["none", "flag", "zero"])
def test_te_weight_gradient_into_main_grad(tensor_parallel, all_equal, kind, normalization, flags):
    """Two microbatches: the first may be written over the buffer, the second is added to it."""
    from ditron_train.policy import gate

    gate.forget()
    config = _config(1024, gradient_accumulation_fusion=True, normalization=normalization)
    found = []
    for index in (0, 1):
        layer = _build(kind, index, 2048, 1024, config, bias=True, skip_bias_add=True)
        layer.weight.main_grad = torch.full(layer.weight.shape, 3.0, device="cuda")
        if "flag" in flags:
            layer.weight.grad_added_to_main_grad = False
        layer.weight.zero_out_wgrad = "zero" in flags
        results = {}
        for microbatch in range(2):
            step = _forward_backward(kind, layer, 2048, 1024, torch.bfloat16, microbatch)
            if "flag" in flags and "zero" not in flags:  # the dummy is uninitialised memory
                step["dweight"] = torch.tensor(step["dweight"].shape, device="cuda")
            results.update(
                {f"{microbatch} {name}": value if value is None else value.clone() for name, value in step.items()}
            )
        found.append(results)
    _assert_same(all_equal, *found, (kind, flags))
    assert _num_ops() >= 1, "native would be compared with native"


@pytest.mark.parametrize("kind", ["te_column", "te_norm_column"])
def test_te_bias_inside_the_product(tensor_parallel, all_equal, kind):
    """Rounded once with the product, and its gradient out of the weight gradient's GEMM: QKV of Qwen2, GPT."""
    for seed, (m, n, k) in enumerate(((4096, 4608, 3584), (2048, 6144, 4096), (1032, 1016, 520))):
        options = dict(bias=True, seed=seed)
        _compare(all_equal, kind, m, n, k, **options)
        assert _num_ops() == 1 or seed == 2
    _compare(all_equal, kind, 2048, 3072, 2048, is_frozen=True, **options)


@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize("kind", ["te_column", "te_norm_column", "te_row"])
def test_te_delayed_weight_gradients(tensor_parallel, all_equal, kind, with_main_grad):
    """--delay-wgrad-compute: two backwards, then both weight gradients, with gathers of others between."""
    from ditron_train.policy import gate

    _import_te()
    gate.forget()
    found = []
    for index in (0, 1):
        config = _config(1024, gradient_accumulation_fusion=with_main_grad)
        config.delay_wgrad_compute = True  # its own check wants the schedule that calls backward_dw
        layer, other = (_build(kind, index, 2048, 1024, config, "column" in kind, False) for _ in range(2))
        for one in (layer, other):
            one.weight.main_grad = torch.full(one.weight.shape, 3.0, device="cuda")
        results = {}
        for microbatch in range(2):
            step = _forward_backward(kind, layer, 2048, 1024, torch.bfloat16, microbatch)
            _forward_backward(kind, other, 2048, 1024, torch.bfloat16, 7 + microbatch)
            assert layer.weight.grad is None
            results.update({f"{microbatch} {name}": step[name] for name in ("y", "dx")})
        for microbatch in range(2):
            layer.backward_dw()
            results[f"{microbatch} dw"] = None if layer.weight.grad is None else layer.weight.grad.clone()
            results[f"{microbatch} main"] = layer.weight.main_grad.clone()
            results[f"{microbatch} db"] = layer.bias.grad if "column" in kind else None
        found.append(results)
    _assert_same(all_equal, *found, (kind, with_main_grad))
    assert _num_ops() == 1


def test_recomputation_and_several_forwards_before_backward(tensor_parallel, all_equal):
    from megatron.core import tensor_parallel as megatron_tp

    found = []
    for index in (0, 1):
        column, row = (_build(kind, index, *size, _config(1024), False, False)
                       for kind, size in (("column", (4096, 1024)), ("row", (1024, 4096))))  # fmt: skip
        inputs = [_normals(2048 // tensor_parallel, 1, 1024, seed=s).requires_grad_() for s in range(3)]
        outputs = [megatron_tp.checkpoint(lambda x: row(column(x)[0])[0], False, x) for x in inputs]  # noqa: B023
        for y in reversed(outputs):
            y.backward(_normals(*y.shape, seed=9))
        found.append(
            {**{f"dx{i}": x.grad for i, x in enumerate(inputs)}, "dc": column.weight.grad, "dr": row.weight.grad}
        )
    _assert_same(all_equal, *found, "recompute")


@pytest.mark.parametrize("kinds", [("column", "row"), ("te_column", "te_row")], ids=["local", "te"])
def test_shared_experts_beside_the_dispatcher(tensor_parallel, all_equal, kinds):
    """--moe-shared-expert-overlap: rows are gathered and sums are scattered by the dispatcher's calls, not by these
    layers."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    config = _config(
        512, num_moe_experts=2 * tensor_parallel, moe_token_dispatcher_type="alltoall", moe_shared_expert_overlap=True,
        moe_shared_expert_intermediate_size=1024, moe_ffn_hidden_size=512,
    )  # fmt: skip
    found, groups = [], SimpleNamespace(tp=get_tensor_model_parallel_group())
    for index in (0, 1):
        first, second = (_classes(kind)[index] for kind in kinds)
        experts = SharedExpertMLP(config, MLPSubmodules(linear_fc1=first, linear_fc2=second), False, groups).cuda()
        for position, weight in enumerate(experts.parameters()):
            weight.data.copy_(_normals(*weight.shape, seed=position) * 0.05)
        x = _normals(1024, 1, 512, seed=70).requires_grad_()
        experts.pre_forward_comm(x)
        experts.linear_fc1_forward_and_act()
        experts.linear_fc2_forward()
        experts.post_forward_comm()
        y = experts.get_output()
        y.backward(_normals(*y.shape, seed=80))
        torch.cuda.synchronize()
        found.append(
            {"y": y.detach(), "dx": x.grad, **{name: weight.grad for name, weight in experts.named_parameters()}}
        )
    _assert_same(all_equal, *found, kinds)


def test_graph_replay_of_column_and_row(tensor_parallel, all_equal):
    """Forward and backward of both layers captured once, replayed on new data."""
    config = _config(1024)
    pairs = [[_build(kind, index, n, k, config, False, False) for kind, n, k in
              (("column", 4096, 1024), ("row", 1024, 4096))] for index in (0, 1)]  # fmt: skip
    static = SimpleNamespace(x=torch.empty(2048 // tensor_parallel, 1, 1024, dtype=torch.bfloat16, device="cuda"))
    static.x.requires_grad_()
    static.grad = torch.empty_like(static.x)

    def run(column, row, x, grad):
        for tensor in (x, column.weight, row.weight):
            tensor.grad = None
        y = row(column(x)[0])[0]
        y.backward(grad)
        return [y.detach(), x.grad, column.weight.grad, row.weight.grad]

    static.x.data.normal_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(*pairs[1], static.x, static.grad)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run(*pairs[1], static.x, static.grad)
    for repeat in range(5):
        static.x.data.copy_(_normals(*static.x.shape, seed=repeat))
        static.grad.copy_(_normals(*static.x.shape, seed=10 + repeat))
        graph.replay()
        torch.cuda.synchronize()
        expected = run(*pairs[0], static.x.detach().clone().requires_grad_(), static.grad)
        for fused, native in zip(results, expected):
            assert all_equal(fused, native)


def _gpt_step(use_te, seed=5):
    """Loss and every gradient of one step of a GPT whose parameters depend on `seed` only."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from ditron_train.cpu import megatron_shim as megatron_cpu

    megatron_cpu.seed(seed)
    config = _config(1024, normalization="RMSNorm", attention_dropout=0.0, hidden_dropout=0.0, deterministic_mode=True,
                     bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False)  # fmt: skip
    spec = (
        specs.get_gpt_layer_with_transformer_engine_spec()
        if use_te
        else specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    model = GPTModel(config, spec, vocab_size=1024 * dist.get_world_size(), max_sequence_length=1024,
                     position_embedding_type="rope", share_embeddings_and_output_weights=False).cuda()  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 1024, (2, 1025), generator=generator).cuda()
    mask = None if use_te else torch.ones(1024, 1024, dtype=torch.bool, device="cuda").triu(1)[None, None]
    positions = torch.arange(1024, device="cuda").expand(2, 1024)
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
    loss.backward()
    names = [type(module).__qualname__ for module in model.modules()]
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}, names


@pytest.mark.parametrize("use_te", [False, True], ids=["local", "te"])
def test_gpt_loss_and_every_gradient(tensor_parallel, all_equal, use_te, monkeypatch):
    import ditron_train.megatron

    if use_te:
        _import_te()
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        native, _ = _gpt_step(use_te)
        again, _ = _gpt_step(use_te)
        ditron_train.megatron.apply(features=("tp",))
        fused, names = _gpt_step(use_te)
    finally:
        ditron_train.megatron.restore()
        torch.use_deterministic_algorithms(False)
    assert sum(name.startswith("Ditron") for name in names) == 9
    repeated = [name for name in native if all_equal(native[name], again[name])]
    assert "loss" in repeated and len(repeated) > len(native) // 2, "native itself does not repeat"
    for name in repeated:
        assert all_equal(native[name], fused[name]), name
