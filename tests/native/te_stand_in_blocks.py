"""Operands with a scale for each block, and their gathers, of the stand-in for Transformer Engine: as sources.

Until 2.11 what is sent is stored as the tensor does (COMPACT), from 2.12 on as GEMMs take it: bytes of columns as
[K, rows], scales of rows as [K / 128, rows].
"""

from __future__ import annotations

_SHARED = """
import torch
from transformer_engine.pytorch.tensor.float8_tensor import Float8BlockScaleTensorFormat, Quantized, Quantizer, TYPES

READY, COMPACT = Float8BlockScaleTensorFormat.GEMM_READY, Float8BlockScaleTensorFormat.COMPACT
FIELDS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype", "quantizer",
          "is_2D_scaled", {fields})


class Fields(Quantized):
    def __init__(self, **fields):
        assert set(fields) == set(FIELDS)
        vars(self).update({{f"_{{name}}": value for name, value in fields.items()}})

    def get_metadata(self):
        return {{name: getattr(self, f"_{{name}}") for name in FIELDS}}

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        for side, is_used in (("_rowwise", rowwise_usage), ("_columnwise", columnwise_usage)):
            assert not is_used or getattr(self, f"{{side}}_data") is not None
            if is_used is False:
                vars(self).update({{f"{{side}}_data": None, f"{{side}}_scale_inv": None}})

    def clear(self):
        for name in FIELDS[:4]:
            if getattr(self, f"_{{name}}") is not None:
                getattr(self, f"_{{name}}").data = torch.empty(0)

    def values(self, rowwise):
        side = "_rowwise" if rowwise else "_columnwise"
        data, scales = getattr(self, f"{{side}}_data"), getattr(self, f"{{side}}_scale_inv")
        assert self.is_ready() and data.is_contiguous() and scales.is_contiguous()
        data = data.flatten(0, -2) if rowwise else data.flatten(1)
        data = data.view(TYPES[self._fp8_dtype]).float()
        rows = scales.repeat_interleave(128, 0)[: len(data)] if self._is_2D_scaled else scales.t()
        return data * rows.repeat_interleave(128, 1)[:, : data.shape[1]]


class BlockQuantizer(Quantizer):
    def __init__(self, fp8_dtype, rowwise, columnwise, num_dimensions):
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.num_dimensions = num_dimensions

    def is_quantizable(self, values):
        size = values.size()
        return size[-1] % 128 == 0 and size[:-1].numel() % 128 == 0

    def blocks(self, values):
        rows, columns = values.shape
        height = 128 if self.num_dimensions == 2 else 1
        blocks = values.reshape(rows // height, height, columns // 128, 128)
        scales = 2.0 ** -torch.ceil(torch.log2(blocks.abs().amax((1, 3), keepdim=True).clamp(min=1.0))) * 4
        data = (blocks * scales).reshape(rows, columns).to(TYPES[self.dtype]).view(torch.uint8)
        return data, 1 / scales[:, 0, :, 0]
"""

_COMPACT = """

class BlockStorage(Fields):
    def is_ready(self):
        return self._data_format == READY

    def size(self):
        return (self._columnwise_data if self._rowwise_data is None else self._rowwise_data).shape

    def _transpose_columnwise_data(self):
        before = self._columnwise_data
        self._columnwise_data = before.t().contiguous()
        before.data = torch.empty(0)


class Float8BlockQuantizer(BlockQuantizer):
    def __init__(self, fp8_dtype, *, rowwise, columnwise, force_pow_2_scales=True, block_scaling_dim=2,
                 all_gather_usage=False):
        super().__init__(fp8_dtype, rowwise, columnwise, block_scaling_dim)
        self.all_gather_usage = all_gather_usage
        assert force_pow_2_scales

    def quantize(self, values):
        flat, found = values.reshape(-1, values.shape[-1]), dict.fromkeys(FIELDS)
        is_flat, travels = self.num_dimensions == 1, self.all_gather_usage
        if self.rowwise_usage:
            data, scales = self.blocks(flat)
            scales = scales.t().contiguous() if is_flat and not travels else scales
            found.update(rowwise_data=data.view(values.shape), rowwise_scale_inv=scales)
        if self.columnwise_usage:
            data, scales = self.blocks(flat.t().contiguous())
            data = data.t().contiguous().view(values.shape) if travels else data
            found.update(columnwise_data=data, columnwise_scale_inv=scales.t().contiguous() if is_flat else scales)
        form = COMPACT if travels else READY
        found.update(fp8_dtype=self.dtype, quantizer=self, is_2D_scaled=not is_flat, data_format=form)
        return BlockStorage(**found)
"""

_READY = """

class BlockStorage(Fields):
    def is_ready(self):
        return True

    def size(self):
        if self._rowwise_data is not None:
            return self._rowwise_data.shape
        first, *others = self._columnwise_data.shape
        return torch.Size((*others, first))


class Float8BlockQuantizer(BlockQuantizer):
    def __init__(self, fp8_dtype, *, rowwise, columnwise, force_pow_2_scales=True, block_scaling_dim=2):
        super().__init__(fp8_dtype, rowwise, columnwise, block_scaling_dim)
        self.block_scaling_dim = block_scaling_dim
        assert force_pow_2_scales

    def get_columnwise_shape(self, shape):
        return (shape[-1], *shape[:-1])

    def get_scale_shape(self, shape, columnwise):
        rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
        assert self.block_scaling_dim == 1
        return (rows // 128, columns) if columnwise else (columns // 128, rows)

    def make_empty(self, shape, *, dtype, device):
        found = dict.fromkeys(FIELDS)
        for name, size, used in (
            ("rowwise", shape, self.rowwise_usage),
            ("columnwise", self.get_columnwise_shape(shape), self.columnwise_usage),
        ):
            if used:
                found[f"{name}_data"] = torch.empty(size, dtype=torch.uint8)
                found[f"{name}_scale_inv"] = torch.empty(self.get_scale_shape(shape, name == "columnwise"))
        return self.made(found)

    def made(self, found):
        found.update(fp8_dtype=self.dtype, quantizer=self, is_2D_scaled=self.num_dimensions == 2)
        return BlockStorage(**found)

    def quantize(self, values):
        flat, found, is_flat = values.reshape(-1, values.shape[-1]), dict.fromkeys(FIELDS), self.num_dimensions == 1
        if self.rowwise_usage:
            data, scales = self.blocks(flat)
            found.update(rowwise_data=data.view(values.shape))
            found.update(rowwise_scale_inv=scales.t().contiguous() if is_flat else scales)
        if self.columnwise_usage:
            data, scales = self.blocks(flat.t().contiguous())
            found.update(columnwise_data=data.view(self.get_columnwise_shape(values.shape)))
            found.update(columnwise_scale_inv=scales.t().contiguous() if is_flat else scales)
        return self.made(found)
"""

_GATHER_COMPACT = """

def gather_blocks(inp, process_group, quantizer):
    inp = inp if isinstance(inp, BlockStorage) else quantizer(inp)
    fields = inp.get_metadata()
    for name in FIELDS[:4]:
        used = quantizer.rowwise_usage if name.startswith("row") else quantizer.columnwise_usage
        fields[name] = all_rows(fields[name], process_group) if used else None
    if quantizer.rowwise_usage:
        fields["rowwise_scale_inv"] = fields["rowwise_scale_inv"].t().contiguous()
    if quantizer.columnwise_usage:
        fields["columnwise_data"] = fields["columnwise_data"].flatten(0, -2).t().contiguous()
    return BlockStorage(**{**fields, "data_format": READY})
"""

_GATHER_READY = """

def gather_blocks(inp, process_group, quantizer):
    inp = inp if isinstance(inp, BlockStorage) else quantizer(inp)
    fields, world = inp.get_metadata(), dist.get_world_size(process_group)
    for name in FIELDS[:4]:
        used = quantizer.rowwise_usage if name.startswith("row") else quantizer.columnwise_usage
        fields[name] = all_rows(fields[name], process_group) if used else None
    for name in ("rowwise_scale_inv", "columnwise_data"):  # along the second dimension
        if fields[name] is not None:
            fields[name] = torch.cat(fields[name].chunk(world), dim=1)
    return BlockStorage(**fields)
"""


def blocks(minor: int) -> str:
    """The module of a quantizer and its tensors as 2.``minor`` has them."""
    fields = '"data_format"' if minor < 12 else '"fake_dtype"' if minor >= 14 else ""
    return _SHARED.format(fields=fields) + (_COMPACT if minor < 12 else _READY)


def gather(minor: int) -> str:
    """The function that gathers them, for a module that has ``all_rows``."""
    return _GATHER_COMPACT if minor < 12 else _GATHER_READY
