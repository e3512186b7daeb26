"""Transformer Engine's own code of its linear layers, from a checkout of any version, on the operands of the stand-in.

The modules of the layers, and those that they are written with, are executed as they are. Everything else is
simulated: operands, products and movement are the stand-in's, a norm changes nothing, the rest is names without a
content. Blocks from 2.12 on are in the checkout's own tensors, too, and are gathered by its own code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import pathlib
import sys
import types

import torch
from te_stand_in import modules

#: What is executed as it stands in the checkout.
_REAL = ("module.base", "module._common", "module.linear", "module.layernorm_linear", "torch_version", "utils")
#: Likewise of versions whose blocks are stored as GEMMs take them; two of the names stand for modules that are
#: simulated, too.
_REAL_BLOCKS = {
    "tensor.storage.float8_blockwise_tensor_storage": "tensor.storage.float8_blockwise_tensor_storage",
    "tensor.real_quantizer": "tensor.float8_blockwise_tensor",
    "real_distributed": "distributed",
}
_PACKAGE = "transformer_engine.pytorch"


class _Names(type):
    """Classes whose every attribute is another of them."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)


def _named(name):
    """A name that is called, decorated with, inherited from or asked for a type, whatever it is."""
    return _Names(name, (), {"__init__": lambda *_, **__: None, "__call__": lambda _, function=None, *__: function})


class _Simulated(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _named(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of Transformer Engine: real ones in the checkout, the others simulated."""

    def __init__(self, checkout, minor):
        self._files = pathlib.Path(checkout) / "transformer_engine" / "pytorch"
        self._real = {**dict(zip(_REAL, _REAL)), **(_REAL_BLOCKS if minor >= 12 else {})}

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in ("transformer_engine", "transformer_engine_torch"):
            return None
        name = fullname.removeprefix(f"{_PACKAGE}.")
        if name in self._real:
            file = self._files.joinpath(*self._real[name].split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file) if file.exists() else None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Simulated(spec.name)

    def exec_module(self, module):
        pass


class _States:
    """``FP8GlobalStateManager`` of a step in FP8 without delayed scaling."""

    recipe = types.SimpleNamespace(backward_override=None)
    quantization_state = types.SimpleNamespace(is_first_fp8_module=False, skip_fp8_weight_update_tensor=None)
    IS_FIRST_FP8_MODULE = False
    get_fp8_recipe = classmethod(lambda cls: cls.recipe)
    is_fp8_enabled = staticmethod(lambda: True)
    fp8_graph_capturing = is_first_fp8_module = staticmethod(lambda: False)


def _no(*_, **__):
    return False


def _nothing(*_, **__):
    return None


def _keep(*tensors):
    return [], tensors


def _restore(*given):
    return given[0].tensor_objects if len(given) == 1 else given[0]


def _general_gemm(*operands, quantization_params=None, ub=None, ub_type=None, extra_output=None, **options):
    for name in ("bulk_overlap", "accumulate"):
        assert not options.pop(name, False)
    assert quantization_params is None and ub is None and extra_output is None
    return sys.modules[f"{_PACKAGE}.cpp_extensions"].simulated_gemm(*operands, **options)


_RESTORED = ("restore_from_func_ctx", "restore_from_saved")
_STAND_INS = ("tensor.float8_tensor", "tensor.float8_blockwise_tensor", "distributed", "cpp_extensions")
_USERBUFFERS = [f"ub_{name}" for name in ("overlap_rs_fprop", "overlap_ag_fprop", "overlap_ag_dgrad")]
_USERBUFFERS += [f"ub_{name}" for name in ("overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad")]
_OFFLOADS = ("start_offload", "mark_not_offload", "mark_activation_offload")
_SIMULATED = {
    "quantization": {"FP8GlobalStateManager": _States},
    "export": {"is_in_onnx_export_mode": _no},
    "graph": {"is_graph_capturing": _no},
    "constants": {"TE_DType": {}, "DType": _Names("DType", (), {"cast": staticmethod(lambda dtype: dtype)})},
    "cpu_offload": {"is_cpu_offload_enabled": _no, **dict.fromkeys(_OFFLOADS, _nothing)},
    "tensor.utils": {"is_custom": _no},
    "distributed_weight": {"is_distributed_weight": _no},
    "cpp_extensions": {
        "general_gemm": _general_gemm,
        "rmsnorm_fwd": lambda x, weight, eps, out, quantizer, *_: (quantizer(x), None, torch.ones(1)),
    },
    "distributed": {
        "get_distributed_world_size": torch.distributed.get_world_size,
        **dict.fromkeys(("_fsdp_scatter_tensors", "_fsdp_gather_tensors"), _nothing),
        **dict.fromkeys(("is_fp8_activation_recompute_enabled", "in_fp8_activation_recompute_phase"), _no),
    },
}


def _operands(module):
    """What the code asks operands and quantizers for beside what stands in."""
    module.Storage.transpose = module.Storage.update_usage

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        if columnwise_usage:
            self.transpose(True)

    module.Storage.update_usage = update_usage
    module.Quantizer.is_requantization_safe = lambda self: True
    module.Quantizer.supports_only_rowwise_all_gather = lambda self: hasattr(self, "scale")
    module.Quantizer.is_quantizable = lambda self, values: True
    module.rmsnorm_bwd = lambda grad, x, deviation, weight, *_: (grad, grad.sum(dim=0))
    module.bgrad_quantize = lambda grad, quantizer: (grad.sum(dim=0), quantizer(grad))
    return {
        "QuantizedTensorStorage": module.Quantized,
        "Quantizer": module.Quantizer,
        "prepare_for_saving": _keep,
        **dict.fromkeys(_RESTORED, _restore),
    }


class _GroupedQuantization(contextlib.nullcontext):
    """``_coalescing_manager`` of torch where each collective has ended when it returns, as gloo's do."""

    def __init__(self, group=None, device=None, async_ops=False):
        super().__init__(self)

    def wait(self):
        pass


def _real_blocks(simulated):
    """Has a version's own code lay blocks out and gather them: values and products alone are the stand-in's."""

    def real(name):
        return importlib.import_module(f"{_PACKAGE}.{name}")

    stand_in, distributed = simulated["tensor.float8_blockwise_tensor"], simulated["distributed"]
    made, others = stand_in.Float8BlockQuantizer, distributed.gather_along_first_dim
    storage = real("tensor.storage.float8_blockwise_tensor_storage").Float8BlockwiseQTensorStorage
    storage.values, storage.is_ready = stand_in.Fields.values, stand_in.BlockStorage.is_ready
    quantizer = real("tensor.real_quantizer").Float8BlockQuantizer
    kept = {name: getattr(made, name) for name in ("blocks", "made", "make_empty", "quantize")}
    kept["num_dimensions"] = property(lambda self: self.block_scaling_dim)
    stand_in.Float8BlockQuantizer = type(quantizer.__name__, (quantizer,), kept)
    stand_in.BlockStorage = storage
    simulated["tensor.float8_tensor"].swap_first_dims = lambda first, out: out.copy_(first.transpose(0, 1))
    torch.distributed._coalescing_manager = _GroupedQuantization
    gather = real("real_distributed").gather_along_first_dim

    def gather_along_first_dim(inp, process_group, async_op=False, quantizer=None):
        is_block = isinstance(quantizer, stand_in.Float8BlockQuantizer)
        return (gather if is_block else others)(inp, process_group, async_op, quantizer)

    distributed.gather_along_first_dim = gather_along_first_dim


def _minor_of(checkout):
    """X of the version 2.X of a checkout."""
    return int((pathlib.Path(checkout) / "build_tools" / "VERSION.txt").read_text().split(".")[1])


def pose(checkout, module, layer):
    """Has Python find Transformer Engine of ``checkout``; returns its class ``layer`` as one of layers that are
    made as those of the stand-in."""
    minor = _minor_of(checkout)
    sys.meta_path.insert(0, _Finder(checkout, minor))
    sources = modules(minor)
    simulated = {
        name: importlib.import_module(f"{_PACKAGE}.{name}") for name in (*_STAND_INS, *_SIMULATED, "quantized_tensor")
    }
    for name in _STAND_INS:
        exec(sources[f"{_PACKAGE}.{name}"], vars(simulated[name]))
    vars(simulated["quantized_tensor"]).update(_operands(simulated["tensor.float8_tensor"]))
    simulated["cpp_extensions"].simulated_gemm = simulated["cpp_extensions"].general_gemm
    for name, values in _SIMULATED.items():
        vars(simulated[name]).update(values)
    sys.modules["transformer_engine_torch"] = simulated["tensor.float8_tensor"]
    importlib.import_module(f"{_PACKAGE}.utils")._empty_tensor = lambda: torch.empty(0)
    if minor >= 12:
        _real_blocks(simulated)
    base = importlib.import_module(f"{_PACKAGE}.module.base")
    base.quantize_weight = lambda *, tensor, quantizer, **_: (quantizer(tensor), None)
    found = importlib.import_module(f"{_PACKAGE}.module.{module}")
    gives_group = hasattr(found, "set_quantizer_amax_reduction_group")
    return _layer_class(getattr(found, layer), functools.partial(_quantizers, minor, gives_group))


def _quantizers(minor, gives_group, recipe, mode, group):
    """Of a layer's input, weight and gradient."""
    tensors, blocks = (
        sys.modules[f"{_PACKAGE}.tensor.{name}"] for name in ("float8_tensor", "float8_blockwise_tensor")
    )
    kinds, payload = [tensors.DType.kFloat8E4M3] * 2 + [tensors.DType.kFloat8E5M2], 0 if mode == "column" else 2
    made = []
    for place, kind in enumerate(kinds):
        if recipe == "blockwise":
            options = dict(rowwise=True, columnwise=True, block_scaling_dim=2 if place == 1 else 1)
            options.update({"all_gather_usage": place == payload} if minor < 12 else {})
            made.append(blocks.Float8BlockQuantizer(kind, **options))
        else:
            of = group if place == payload and not gives_group else None
            made.append(tensors.Float8CurrentScalingQuantizer(kind, None, group=of))
    return made


def _layer_class(native, quantizers):
    opens = not hasattr(native, "end_forward")
    on, off = ["fp8", "sequence_parallel"], ["fp8_calibration", "fuse_wgrad_accumulation", "save_original_input"]
    off += ["is_fsdp2", "gemm_bias_unfused_add", "return_bias", "primary_weights_in_fp8", *_USERBUFFERS]
    off += ["zero_centered_gamma", "return_layernorm_output", "return_layernorm_output_gathered"]
    nothing = ("ub_name", "fsdp_group", "symmetric_ar_type", "name", "layer_norm_bias")

    class Layer(native):
        tp_size, activation_dtype, normalization, eps = 2, torch.bfloat16, "RMSNorm", 0.0
        fwd_ln_sm_margin = inf_ln_sm_margin = bwd_ln_sm_margin = 0
        wgrad_store = types.SimpleNamespace(delay_wgrad_compute=_no)
        vars().update({**dict.fromkeys(on, True), **dict.fromkeys(off, False), **dict.fromkeys(nothing)})
        is_debug_iter = _enable_weight_preswizzle = _no
        end_forward = _nothing

        def __init__(self, weight, mode, group, recipe, bias=None):
            torch.nn.Module.__init__(self)
            self.weight, self.parallel_mode, self.tp_group = torch.nn.Parameter(weight), mode, group
            self.bias = None if bias is None else torch.nn.Parameter(bias)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(weight.shape[1], dtype=weight.dtype))
            self.use_bias = self.apply_bias = bias is not None
            self.scales = self.amaxes = torch.zeros(1)  # of delayed scaling
            self._fp8_workspaces = {}
            self.inputs, self.weights, self.grads = made = quantizers(recipe, mode, group)
            self.quantizers = dict(scaling_fwd=made[:2], scaling_bwd=made[2:])

        def prepare_forward(self, inp, *_, **__):
            return contextlib.nullcontext(inp) if opens else inp

        def get_weight_workspace(self, *, tensor, quantizer, **_):
            return quantizer(tensor)

        def _get_weight_and_bias_tensors(self):
            return self.weight, self.bias

        def _get_quantizers(self, *_):
            return self.inputs, self.weights, None, None, None, self.grads

    return Layer
