"""Bodies of the tests of ``all_gather``: Transformer Engine's own function around an attention in plain PyTorch, on
CPUs, natively and with the fused exchanges."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pathlib
import random
import sys
import types
from unittest.mock import MagicMock, patch

import te_sources
import torch
import torch.distributed as dist

_DPA = "transformer_engine.pytorch.attention.dot_product_attention"
_REAL = "attention.dot_product_attention.context_parallel"


def _attend(q, k, v, window, causal, seq_dim):
    """Softmax attention in fp32 of the last queries; window and mask are aligned at the end."""
    if seq_dim == 0:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    query = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])[None]
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen &= (key <= query + right) if right >= 0 else seen
    seen &= (key >= query - left) if left >= 0 else seen
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    out = torch.einsum("bhst,bthd->bshd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
    return out.transpose(0, 1) if seq_dim == 0 else out


def _strides(tensor):
    """Of the dimensions that are longer than 1: no kernel moves along the others."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


class Kernels:
    """Stand for Transformer Engine's kernels by the names that its code calls; ``calls`` is what they were given.

    Small gradients are -0: sums over steps turn them into +0.
    """

    def __init__(self, minor):
        self.calls, self.minor = [], minor

    def _note(self, name, *given, **options):
        words = [(tuple(one.shape), _strides(one), one.double().sum().item()) if torch.is_tensor(one) else one
                 for one in (*given, *(options[name] for name in sorted(options)))]  # fmt: skip
        assert all(one.is_contiguous() for one in given if torch.is_tensor(one))
        self.calls.append((name, repr(words), sorted(options)))

    def _forward(self, q, k, v, window, causal, seq_dim):
        out = _attend(q.float(), k.float(), v.float(), window, causal, seq_dim).to(q.dtype).contiguous()
        return out, q.float().sum().view(1), v.float().sum().view(1)

    def _backward(self, grad, q, k, v, out, saved, window, causal, seq_dim):
        found = self._forward(q, k, v, window, causal, seq_dim)
        assert all(torch.equal(one, other) for one, other in zip((out, *saved), found))
        with torch.enable_grad():
            leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
            found = torch.autograd.grad(_attend(*leaves, window, causal, seq_dim), leaves, grad.float())
        return [torch.where(x.abs() < 0.05, -0.0, x).to(q.dtype) for x in found]

    def _packed(self, q, k, v, starts, padded, key_starts, key_padded, window, causal):
        """Each sequence for itself, from its valid rows: the others are not looked at, and 0."""
        bounds = starts, padded, key_starts, key_padded
        out = torch.zeros_like(q) + 0 * (q.sum() + k.sum() + v.sum())  # a step may have no rows
        for number in range(len(starts) - 1):
            num_rows, num_keys = (int(one[number + 1] - one[number]) for one in (starts, key_starts))
            own, keys = slice(int(padded[number]), None), slice(int(key_padded[number]), None)
            parts = q[own][:num_rows], k[keys][:num_keys], v[keys][:num_keys]
            assert [len(part) for part in parts] == [num_rows, num_keys, num_keys], bounds
            if num_rows and num_keys:
                found = _attend(*(part.unsqueeze(0) for part in parts), window, causal, 1)[0]
                # A row that sees no key attends to nothing.
                out[int(padded[number]) : int(padded[number]) + num_rows] = found.nan_to_num()
        return out

    def _packed_forward(self, q, k, v, *options):
        out = self._packed(q.float(), k.float(), v.float(), *options).to(q.dtype)
        return out, q.float().sum().view(1), v.float().sum().view(1)

    def _packed_backward(self, grad, q, k, v, out, saved, *options):
        found = self._packed_forward(q, k, v, *options)
        assert all(torch.equal(one, other) for one, other in zip(saved, found[1:]))
        with torch.enable_grad():
            leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
            found = torch.autograd.grad(self._packed(*leaves, *options), leaves, grad.float())
        return [torch.where(x.abs() < 0.05, -0.0, x.nan_to_num()).to(q.dtype) for x in found]

    def packed_attn_fwd(self, is_training, most, most_keys, starts, key_starts, q, k, v, dtype, backend, *,
                        window_size, attn_mask_type, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                        **options):  # fmt: skip
        self._note("packed forward", is_training, most, most_keys, starts, key_starts, q, k, v, dtype, window_size,
                   attn_mask_type, cu_seqlens_q_padded, cu_seqlens_kv_padded, **options)  # fmt: skip
        causal = attn_mask_type == "padding_causal_bottom_right"
        bounds = starts, cu_seqlens_q_padded, key_starts, cu_seqlens_kv_padded
        out, *saved = self._packed_forward(q, k, v, *bounds, window_size, causal)
        return out, saved

    def packed_attn_bwd(self, most, most_keys, starts, key_starts, q, k, v, out, grad, dtype, saved, backend, *,
                        window_size, attn_mask_type, cu_seqlens_q_padded, cu_seqlens_kv_padded,
                        **options):  # fmt: skip
        self._note("packed backward", most, most_keys, starts, key_starts, q, k, v, out, grad, dtype, *saved,
                   window_size, attn_mask_type, cu_seqlens_q_padded, cu_seqlens_kv_padded, **options)  # fmt: skip
        causal = attn_mask_type == "padding_causal_bottom_right"
        bounds = starts, cu_seqlens_q_padded, key_starts, cu_seqlens_kv_padded
        return *self._packed_backward(grad, q, k, v, out, saved, *bounds, window_size, causal), None

    def fused_attn_fwd(self, is_training, rows, num_keys, starts, key_starts, q, k, v, dtype, backend, *, window_size,
                       attn_mask_type, qkv_layout, **options):  # fmt: skip
        if qkv_layout == "thd_thd_thd":
            return self.packed_attn_fwd(is_training, rows, num_keys, starts, key_starts, q, k, v, dtype, backend,
                                        window_size=window_size, attn_mask_type=attn_mask_type, **options)  # fmt: skip
        self._note("fused forward", is_training, rows, num_keys, starts, key_starts, q, k, v, dtype, window_size,
                   attn_mask_type, qkv_layout, **options)  # fmt: skip
        seq_dim, causal = qkv_layout.index("s"), attn_mask_type == "causal_bottom_right"
        assert (q.shape[seq_dim], k.shape[seq_dim]) == (rows, num_keys) and not options["return_max_logit"]
        out, *saved = self._forward(q, k, v, window_size, causal, seq_dim)
        return out, saved

    def fused_attn_bwd(self, rows, num_keys, starts, key_starts, q, k, v, out, grad, dtype, *rest, window_size,
                       attn_mask_type, qkv_layout, **options):  # fmt: skip
        *types, saved, backend = rest
        if qkv_layout == "thd_thd_thd":
            return self.packed_attn_bwd(rows, num_keys, starts, key_starts, q, k, v, out, grad, dtype, saved, backend,
                                        window_size=window_size, attn_mask_type=attn_mask_type, **options)  # fmt: skip
        assert len(types) == (self.minor < 15)
        self._note("fused backward", rows, num_keys, starts, key_starts, q, k, v, out, grad, dtype, types, *saved,
                   window_size, attn_mask_type, qkv_layout, **options)  # fmt: skip
        seq_dim, causal = qkv_layout.index("s"), attn_mask_type == "causal_bottom_right"
        return *self._backward(grad, q, k, v, out, saved, window_size, causal, seq_dim), None

    def _flash_attn_fwd(self, q, k, v, *args, causal, softmax_scale, window_size_left, window_size_right, **options):
        names = {"dropout_p", "return_softmax", "alibi_slopes", "softcap"}
        assert options.keys() == names and not args, options
        self._note("flash 2 forward", q, k, v, *args, causal, softmax_scale, window_size_left, window_size_right,
                   **options)  # fmt: skip
        out, lse, rng = self._forward(q, k, v, (window_size_left, window_size_right), causal, 1)
        return out, lse, None, rng

    def _flash_attn_bwd(self, grad, q, k, v, out, lse, dq, dk, dv, *, causal, softmax_scale, window_size_left,
                        window_size_right, rng_state, **options):  # fmt: skip
        assert options.keys() == {"dropout_p", "alibi_slopes", "deterministic", "softcap"}, options
        self._note("flash 2 backward", grad, q, k, v, out, lse, causal, softmax_scale, window_size_left,
                   window_size_right, rng_state, **options)  # fmt: skip
        window = window_size_left, window_size_right
        for to, one in zip((dq, dk, dv), self._backward(grad, q, k, v, out, (lse, rng_state), window, causal, 1)):
            to.copy_(one)

    def _flash_attn_fwd_v3(self, q, k, v, *args, causal, softmax_scale, **options):
        window = self._window(options)
        self._note("flash 3 forward", q, k, v, *args, causal, softmax_scale, window)
        if torch.is_tensor(args[4]):
            bounds = self._bounds(args[4], args[5], args[7], args[8])
            return *self._packed_forward(q, k, v, *bounds, window, causal)[:2], None, None
        out, lse, rng = self._forward(q, k, v, window, causal, 1)
        return out, lse, None, None

    def _flash_attn_bwd_v3(self, grad, q, k, v, out, lse, *args, softmax_scale, deterministic, **options):
        causal = options.pop("causal" if self.minor < 14 else "is_causal")
        window, (*lengths, dq, dk, dv) = self._window(options), args
        self._note("flash 3 backward", grad, q, k, v, out, lse, *lengths, causal, softmax_scale, deterministic, window)
        saved = lse, v.float().sum().view(1)
        if torch.is_tensor(lengths[0]):
            found = self._packed_backward(grad, q, k, v, out, saved, *self._bounds(*lengths[:4]), window, causal)
        else:
            found = self._backward(grad, q, k, v, out, saved, window, causal, 1)
        for to, one in zip((dq, dk, dv), found):
            to.copy_(one)

    def _bounds(self, padded, key_padded, used, used_keys):
        """As cuDNN is told them."""
        starts, key_starts = (torch.nn.functional.pad(one.cumsum(0), (1, 0)) for one in (used, used_keys))
        return starts, padded, key_starts, key_padded

    def _window(self, options):
        if self.minor < 14:
            (window,) = options.values()
            assert [*options] == ["window_size"]
            return window
        assert options.keys() == {"window_size_left", "window_size_right"}
        return options["window_size_left"], options["window_size_right"]


def _starts(batch, rows, device):
    return torch.arange(batch + 1) * rows


def _gather_along_first_dim(x, group):
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out, None


def _reduce_scatter_along_first_dim(x, group):
    """In the order of NCCL's ring, rounded at every hop."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x, group=group)
    total, *others = [parts[(rank + 1 + step) % world].chunk(world)[rank] for step in range(world)]
    for part in others:
        total = total + part
    return total, None


class _Reorders:
    """Transformer Engine's kernels of packed sequences, written as its CUDA code is."""

    @staticmethod
    def _places(starts, world, total):
        """Row by sequence of each row by rank."""
        places, divided = [], [int(start) // world for start in starts]
        for row in range(total):
            rank, token = divmod(row, total // world)
            number = max(one for one in range(len(divided) - 1) if divided[one] <= token)
            length, index = divided[number + 1] - divided[number], token - divided[number]
            offset = rank if index < length // 2 else 2 * (world - 1) - rank
            places.append(index + divided[number] * world + length // 2 * offset)
        return torch.tensor(places)

    @classmethod
    def thd_sequence_order_to_cp_rank_order(cls, rows, starts, world, total):
        return rows[cls._places(starts, world, total)]

    @classmethod
    def thd_cp_rank_order_to_sequence_order(cls, rows, starts, world, total):
        out = torch.full_like(rows, float("nan"))
        out[cls._places(starts, world, total)] = rows
        return out

    @staticmethod
    def thd_copy_valid_tokens_from_per_split_to_rank_local(out, rows, padded, starts):
        for number in range(len(starts) - 1):
            own = slice(int(padded[number]), int(padded[number] + starts[number + 1] - starts[number]))
            out[own] = rows[own]


def pose(checkout):
    """Has Python find Transformer Engine of ``checkout``, whose code of context parallelism runs as it is; returns
    that module, its kernels and what our module says it runs natively for."""
    import ditron_train.megatron.sp.spec  # noqa: F401  megatron-core looks for Transformer Engine, which is not to be there yet

    minor = te_sources._minor_of(checkout)
    finder = te_sources._Finder(checkout, minor)
    finder._real = {_REAL: _REAL}
    sys.meta_path.insert(0, finder)
    names = [f"transformer_engine.pytorch.{name}" for name in (
        "cpp_extensions.fused_attn", "constants", "distributed", "graph", "jit", "utils")]  # fmt: skip
    names += [f"{_DPA}.utils", f"{_DPA}.backends", "transformer_engine_torch"]
    simulated = [importlib.import_module(name) for name in names]
    fused_attn, constants, distributed, graph, jit, others, utils, backends, tex = simulated
    kernels = Kernels(minor)
    for module, names in ((fused_attn, ("fused_attn_fwd", "fused_attn_bwd")),
                          (backends, [name for name in dir(kernels) if name.startswith("_flash")])):  # fmt: skip
        for name in names:
            setattr(module, name, getattr(kernels, name))
    constants.dist_group_type, constants.TE_DType = dist.ProcessGroup, {torch.bfloat16: "bf16"}
    utils.get_full_cu_seqlens = _starts
    flags = [f"v{version}_plus" for version in ("2_3", "2_4", "2_4_1", "2_5_7", "2_6_0", "2_7_0")]
    utils.FlashAttentionUtils = types.SimpleNamespace(**dict.fromkeys(flags, True))
    distributed.get_distributed_world_size, distributed.get_distributed_rank = dist.get_world_size, dist.get_rank
    distributed.gather_along_first_dim = _gather_along_first_dim
    distributed.reduce_scatter_along_first_dim = _reduce_scatter_along_first_dim
    graph.is_graph_capturing = lambda: False
    jit.jit_fuser = lambda function: function
    others.nvtx_range_push = others.nvtx_range_pop = lambda *_: None
    for name in ("sequence_order_to_cp_rank_order", "cp_rank_order_to_sequence_order",
                 "copy_valid_tokens_from_per_split_to_rank_local"):  # fmt: skip
        setattr(tex, f"thd_{name}", getattr(_Reorders, f"thd_{name}"))
    tex.NVTE_Fused_Attn_Backend = types.SimpleNamespace(NVTE_F16_arbitrary_seqlen="arbitrary")
    utils.get_attention_quantizers = lambda *_: [None] * 6
    quantization, quantized = (importlib.import_module(f"transformer_engine.pytorch.{name}")
                               for name in ("quantization", "quantized_tensor"))  # fmt: skip
    quantization.FP8GlobalStateManager = types.SimpleNamespace(get_fp8_recipe=lambda: None)
    quantized.prepare_for_saving = lambda *tensors: (tensors, None)
    quantized.restore_from_func_ctx = lambda ctx: ctx.saved_tensors
    torch.cuda.current_stream = torch.cuda.Event = lambda *_: MagicMock()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    te = importlib.import_module(f"transformer_engine.pytorch.{_REAL}")

    from ditron_train.megatron.sp import te_all_gather

    reasons = []
    te_all_gather.log_native = lambda what, reason: reasons.append(reason)
    te_all_gather.is_at_least = lambda name, lowest: minor >= int(lowest.split(".")[1])
    return te, kernels, reasons


def _arguments(te, case, **options):
    """Of Transformer Engine's function, by name."""
    world, rank = dist.get_world_size(), dist.get_rank()
    seq_dim = case["format"].index("s")
    generator = torch.Generator().manual_seed(case["seed"] + rank)

    def values(heads):
        shape = [case["batch"], 2 * case["rows"], heads, 8]
        shape = shape if seq_dim else [shape[1], shape[0], *shape[2:]]
        return torch.randn(shape, generator=generator).bfloat16()

    total = 2 * case["rows"] * world
    starts, window = torch.arange(case["batch"] + 1) * total, case["window"]
    mask = "causal" if case["causal"] else "no_mask"
    given = dict(
        is_training=True, q=values(case["heads"]), k=values(case["groups"]), v=values(case["groups"]),
        cu_seqlens_q=starts, max_seqlen_q=total, max_seqlen_kv=total, cu_seqlens_q_padded=None, dropout_p=0.0,
        softmax_scale=None, qkv_format=case["format"], attn_mask_type=mask, attn_bias_type="no_bias", attn_bias=None,
        deterministic=True, use_fused_attention=case["kernels"] == "cudnn", return_max_logit=False, window_size=window,
        cp_group=dist.group.WORLD, cp_stream=MagicMock(), use_flash_attn_3=case["kernels"] == "flash 3",
    )  # fmt: skip
    return {**given, **options}, values(case["heads"])


def _results(te, given, grad):
    leaves = {name: given[name].detach().requires_grad_() for name in "qkv"}
    out = te.AttnFuncWithCPAndKVAllGather.apply(*{**given, **leaves}.values())
    out.backward(grad.view(out.shape))
    return [out.detach(), *(leaf.grad for leaf in leaves.values())]


def compare(checkout, seed, num_cases):
    """Calls, results and gradients of random cases, natively and fused; returns how many shapes were fused."""
    te, kernels, reasons = pose(checkout)
    from ditron_train.megatron.sp.te_all_gather import fused_exchanges
    from ditron_train.policy import gate

    draw, function = random.Random(seed), te.AttnFuncWithCPAndKVAllGather
    for number in range(num_cases):
        groups, rows = draw.choice([1, 2]), draw.choice([2, 5])
        kind = ["cudnn", "cudnn", "flash 2", "flash 3"][number % 4]
        windows = [(-1, 0), (0, 0), (draw.randrange(1, 3 * rows), 0), None]
        causal = draw.random() < 0.75
        case = dict(
            format="bshd" if kind != "cudnn" else draw.choice(["sbhd", "bshd"]), batch=draw.choice([1, 2]), rows=rows,
            groups=groups, heads=groups * draw.choice([1, 2]), causal=causal, kernels=kind, seed=10 * number,
            window=draw.choice(windows) if causal else draw.choice([(-1, -1), (3, 2), None]),
        )  # fmt: skip
        given, grad = _arguments(te, case)
        given |= dict(
            cu_seqlens_kv=given["cu_seqlens_q"], cu_seqlens_kv_padded=None, pad_between_seqs=False, fp8=False,
            fp8_meta=None, quantizers=None, fp8_output=False,
        )  # fmt: skip
        names = list(inspect.signature(te.AttnFuncWithCPAndKVAllGather.forward).parameters)[1:]
        given = {name: given[name] for name in names}
        native, calls = _results(te, given, grad), kernels.calls[:]
        with fused_exchanges():
            assert te.AttnFuncWithCPAndKVAllGather is not function
            _results(te, given, grad)  # the gate's own run of the path is part of the first call
            kernels.calls.clear()
            fused = _results(te, given, grad)
        assert te.AttnFuncWithCPAndKVAllGather is function
        for one, other in zip(kernels.calls, calls, strict=True):
            assert one == other, (one, other)
        assert len(calls) == 4
        kernels.calls.clear()
        for name, one, other in zip(("out", "dq", "dk", "dv"), fused, native, strict=True):
            assert one.shape == other.shape and one.stride() == other.stride(), (name, case)
            assert torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16)), (name, case)
            assert name in ("out", "dq") or not torch.signbit(one[one == 0]).any()
    assert not reasons, reasons
    return sum(answer.context is not None for answer in gate.answers("sp all_gather_attention"))


def _packed_arguments(case):
    """Of Transformer Engine's function for packed sequences, and the gradient of its result."""
    world, rank = dist.get_world_size(), dist.get_rank()
    lengths = torch.tensor(case["lengths"], dtype=torch.int32)
    whole = lengths if case["indivisible"] else (lengths + 2 * world - 1) // (2 * world) * (2 * world)
    starts, padded = (torch.nn.functional.pad(one.cumsum(0, dtype=torch.int32), (1, 0)) for one in (lengths, whole))
    padded = padded if case["padded"] or case["indivisible"] else None
    starts = starts if padded is not None else torch.nn.functional.pad(whole.cumsum(0, dtype=torch.int32), (1, 0))
    padded = starts if padded is None else padded
    generator, most = torch.Generator().manual_seed(case["seed"] + rank), int(whole.max())

    def values(heads):
        return torch.randn(int(padded[-1]) // world, heads, 8, generator=generator).bfloat16()

    is_flash = case["kernels"] == "flash 3"
    given = dict(
        is_training=True, q=values(case["heads"]), k=values(case["groups"]), v=values(case["groups"]),
        cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=most, max_seqlen_kv=most, cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded, dropout_p=0.0, softmax_scale=None, qkv_format="thd",
        attn_mask_type="padding_causal" if case["causal"] else "padding", attn_bias_type="no_bias", attn_bias=None,
        deterministic=True, use_fused_attention=not is_flash, return_max_logit=False, window_size=case["window"],
        cp_group=dist.group.WORLD, cp_stream=MagicMock(), use_flash_attn_3=is_flash, pad_between_seqs=case["padded"],
        fp8=False, fp8_meta=None, quantizers=None, fp8_output=False,
    )  # fmt: skip
    return given, values(case["heads"])


def _packed_case(draw, number, world):
    chunk = 2 * world
    lengths = [
        [draw.randrange(1, 4 * chunk) for _ in range(draw.randrange(2, 6))],  # uneven
        [5 * chunk],
        [draw.randrange(1, chunk + 1) for _ in range(12)],
        [3 * chunk, 1, chunk],  # most of a rank's rows of one are padding
    ][number % 4]
    groups, causal = draw.choice([1, 2]), draw.random() < 0.7
    window = [None, (-1, 0), (draw.randrange(1, 2 * chunk), 0)] if causal else [None, (-1, -1), (3, 2)]
    return dict(
        lengths=lengths, padded=draw.random() < 0.7, groups=groups, heads=groups * draw.choice([1, 2]), causal=causal,
        kernels=draw.choice(["cudnn", "cudnn", "flash 3"]), window=draw.choice(window), seed=10 * number,
        indivisible=False,
    )  # fmt: skip


def _same_bits(found, wanted):
    return all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in zip(found, wanted))


def compare_packed(checkout, seed, num_cases):
    """Calls, results and gradients of packed sequences, natively and fused, in buffers that hold NaN before; returns
    how many gradients of keys and values are zero."""
    te, kernels, reasons = pose(checkout)
    from ditron_train.megatron.sp import te_all_gather
    from ditron_train.policy import gate

    draw, num_zeros = random.Random(seed), 0
    names = [*inspect.signature(te.AttnFuncWithCPAndKVAllGather.forward).parameters][1:]
    for number in range(num_cases):
        case = _packed_case(draw, number, dist.get_world_size())
        given, grad = _packed_arguments(case)
        given = {name: given[name] for name in names}
        native, calls = _results(te, given, grad), kernels.calls[:]
        with te_all_gather.fused_exchanges():
            _results(te, given, grad)
            (context,) = {answer.context for answer in gate.answers("sp all_gather_attention")}
            for plan in context.prepared.values():
                plan.buffer.local.fill_(float("nan"))
            dist.barrier()
            kernels.calls.clear()
            reorders, te.tex.thd_cp_rank_order_to_sequence_order = te.tex.thd_cp_rank_order_to_sequence_order, None
            try:
                fused = _results(te, given, grad)
            finally:
                te.tex.thd_cp_rank_order_to_sequence_order = reorders
        assert kernels.calls == calls and len(calls) == 4, case
        kernels.calls.clear()
        assert _same_bits(fused, native), case
        for one, other in zip(fused, native, strict=True):
            assert one.shape == other.shape and one.stride() == other.stride()
        for one in native[2:]:
            assert not torch.signbit(one[one == 0]).any() and not one.isnan().any()
            num_zeros += int((one == 0).sum())
    assert not reasons, reasons
    return num_zeros


def packed_stays_native(checkout, lengths):
    """Packed sequences that are not covered; returns the reasons in the log."""
    te, kernels, reasons = pose(checkout)
    from ditron_train.megatron.sp.te_all_gather import fused_exchanges

    case = dict(lengths=lengths, padded=False, groups=1, heads=2, causal=True, kernels="cudnn", window=None, seed=0,
                indivisible=True)  # fmt: skip
    given, grad = _packed_arguments(case)
    names = [*inspect.signature(te.AttnFuncWithCPAndKVAllGather.forward).parameters][1:]
    with fused_exchanges():
        try:
            _results(te, {name: given[name] for name in names}, grad)
        except AssertionError as error:  # Transformer Engine's own
            reasons.append(str(error).split("!")[0])
    return reasons


def _stand_in():
    """Has megatron-core find a Transformer Engine whose ``all_gather`` function is made of the native exchanges, and a
    wrapper of its attention that calls that function by name; returns the module with the function, the wrapper and
    what is run natively for which reason."""
    import te_simulated

    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "sp"))
    from bodies_keys import RingMoves, attended_ranges

    from ditron_train.sp.all_gather_attention import GatheredAttention, all_gather_attention

    te, kernels = types.ModuleType(f"{_DPA}.context_parallel"), Kernels(10)

    class Attention(torch.nn.Module):
        overrides: dict = {}

        def __init__(
            self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
            k_channels=None, v_channels=None, num_splits=None, cp_comm_type="p2p", pg_collection=None,
        ):  # fmt: skip
            super().__init__()
            self.config, self.cp_group, self.cp_comm_type = config, pg_collection.cp, cp_comm_type

        def forward(
            self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None,
            num_splits=None,
        ):  # fmt: skip
            total = len(query) * dist.get_world_size()
            case = dict(format="sbhd", batch=1, rows=2, groups=1, heads=1, causal=True, kernels="cudnn", seed=0,
                        window=self.config.window_size)  # fmt: skip
            options = dict(q=query, k=key, v=value, max_seqlen_q=total, max_seqlen_kv=total)
            options["cu_seqlens_q"] = torch.arange(query.shape[1] + 1) * total
            given, _ = _arguments(te, case, **{**options, **self.overrides})
            return te.AttnFuncWithCPAndKVAllGather.apply(*given.values()).flatten(2)

    te_simulated.pose_transformer_engine(Attention)
    backends = types.ModuleType(f"{_DPA}.backends")
    sys.modules[te.__name__], sys.modules[backends.__name__] = te, backends
    sys.modules[_DPA].context_parallel, sys.modules[_DPA].backends = te, backends

    def info(chunk, world, rows, num_keys, window, causal):
        found = attended_ranges(2 * world, rows, causal=causal, window=window or (-1, -1))[chunk]
        return found, (-1 if window is None else window[0], 0 if causal else -1)

    def forward(ctx, is_training, q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_kv, cu_seqlens_q_padded, dropout_p,
                softmax_scale, qkv_format, attn_mask_type, attn_bias_type, attn_bias, deterministic,
                use_fused_attention, return_max_logit, window_size, cp_group, cp_stream,
                use_flash_attn_3):  # fmt: skip
        raise AssertionError("called by apply")

    class Function:
        num_calls = 0

        @classmethod
        def apply(cls, *args):
            from ditron_train.megatron.sp import te_all_gather

            cls.num_calls += 1
            given = types.SimpleNamespace(**dict(zip(te_all_gather._PARAMETERS, args)))
            values, steps = (given.q, given.k, given.v), te_all_gather._FusedAttention(given)
            moves = RingMoves(given.cp_group, steps.ranges, torch.device("cpu"))
            return all_gather_attention(*values, GatheredAttention(moves, steps, 0, None))

    Function.forward = staticmethod(forward)
    te.AttnFuncWithCPAndKVAllGather, te.get_kv_seq_info_after_all_gather = Function, info
    te.fused_attn_fwd, te.fused_attn_bwd = kernels.fused_attn_fwd, kernels.fused_attn_bwd
    te.is_graph_capturing, te.TE_DType = lambda: False, {torch.bfloat16: "bf16"}
    te.dpa_utils = types.SimpleNamespace(
        get_full_cu_seqlens=lambda batch, rows, device: torch.arange(batch + 1) * rows
    )
    te.fa_utils = types.SimpleNamespace(v2_7_0_plus=False)
    te.tex = MagicMock()

    from ditron_train.megatron.sp import te_all_gather, te_attention

    reasons = []
    te_all_gather.log_native = te_attention.log_native = lambda what, reason: reasons.append(reason)
    return te, Attention, reasons


def _module(ranks, **options):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from ditron_train.cpu import megatron_shim as megatron_cpu
    from ditron_train.megatron.sp.te_attention import DitronTEDotProductAttention

    settings = dict(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        hidden_dropout=0.0, context_parallel_size=ranks, cp_comm_type="all_gather",
    )  # fmt: skip
    config = TransformerConfig(**{**megatron_cpu.CPU_CONFIG, **settings, **options})
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    arguments = dict(cp_comm_type="all_gather", pg_collection=groups)
    return DitronTEDotProductAttention(config, 1, AttnMaskType.causal, "self", **arguments)


@contextlib.contextmanager
def _megatron():
    from megatron.core import parallel_state

    import ditron_train.megatron as plugin
    from ditron_train.cpu import megatron_shim as megatron_cpu

    with megatron_cpu.megatron_on_cpu():
        ranks = dist.get_world_size()
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        plugin.apply(features="sp")
        try:
            yield ranks
        finally:
            plugin.restore()
            parallel_state.destroy_model_parallel()


def _attended(core, packed=None):
    from megatron.core.transformer.enums import AttnMaskType

    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    q, k, v = (torch.randn(8, 1, heads, 8, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2))
    out = core(q, k, v, None, AttnMaskType.causal, packed_seq_params=packed)
    out.backward(torch.randn(out.shape, generator=generator).bfloat16())
    return [out.detach(), q.grad, k.grad, v.grad]


def modules_agree(window):
    """Bits of the attention that gathers by itself, in training and in evaluation."""
    te, native, reasons = _stand_in()
    with _megatron() as ranks:
        core = _module(ranks, window_size=window)
        fused = _attended(core)
        assert te.AttnFuncWithCPAndKVAllGather.num_calls == 0 and not reasons, reasons
        core.__class__ = native
        for one, other in zip(fused, _attended(core), strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))
        assert te.AttnFuncWithCPAndKVAllGather.num_calls == 1


def stays_native(kind):
    """What is not covered is computed by Transformer Engine's own function; returns the reasons in the log."""
    te, attention, reasons = _stand_in()
    from megatron.core.packed_seq_params import PackedSeqParams

    overrides = {
        "dropout": {"dropout_p": 0.1}, "logits": {"return_max_logit": True}, "mask": {"attn_mask_type": "padding"},
        "bias": {"attn_bias_type": "post_scale_bias"}, "uneven": {"max_seqlen_kv": 12},
    }  # fmt: skip
    options = {
        "fp8": {"fp8": "e4m3", "fp8_dot_product_attention": True}, "module_dropout": {"attention_dropout": 0.1}
    }  # fmt: skip
    with _megatron() as ranks:
        core = _module(ranks)
        for name, value in options.get(kind, {}).items():
            setattr(core.config, name, value)
        attention.overrides = overrides.get(kind, {})
        if kind == "version":
            te.AttnFuncWithCPAndKVAllGather.forward = staticmethod(lambda ctx, q: None)
        if kind == "group":
            core.cp_group = None
        packed = PackedSeqParams(qkv_format="thd") if kind in ("packed", "dynamic") else None
        if kind == "dynamic":
            packed.cp_group = dist.group.WORLD
        _attended(core, packed)
        assert te.AttnFuncWithCPAndKVAllGather.num_calls == 1
    return reasons


def packed_of_ever_new_lengths(checkout, num_lengths):
    """Bits of packed sequences at ``num_lengths`` lengths, one after the other; returns how often both paths were
    compared."""
    te, _, reasons = pose(checkout)
    from ditron_train.megatron.sp import te_all_gather
    from ditron_train.sp.all_gather_attention import ALL_GATHER_ATTENTION

    names = [*inspect.signature(te.AttnFuncWithCPAndKVAllGather.forward).parameters][1:]
    chunk, trial = 2 * dist.get_world_size(), ALL_GATHER_ATTENTION.trial
    with patch.object(type(ALL_GATHER_ATTENTION), "trial", autospec=True) as trials:
        trials.side_effect = lambda self, call, context: trial(call, context)
        for number in range(num_lengths):
            lengths = [chunk * (1 + number), chunk, chunk * 2]
            case = dict(lengths=lengths, padded=True, groups=1, heads=2, causal=True, kernels="cudnn", window=None,
                        seed=number, indivisible=False)  # fmt: skip
            given, grad = _packed_arguments(case)
            given = {name: given[name] for name in names}
            native = _results(te, given, grad)
            with te_all_gather.fused_exchanges():
                assert _same_bits(_results(te, given, grad), native), lengths
    assert not reasons, reasons
    return trials.call_count
