"""Host side of the three products of a Newton-Schulz step, and the step made of them.

    A = X @ X^T            [m, m], symmetric: half of it is computed and mirrored
    B = b * A + c * A @ A  [m, m], symmetric likewise
    Y = a * X + B @ X      [m, n]

cuBLAS computes each whole. If bits equal and time is lower at a shape on this device, the fused path runs; else
cuBLAS (``plans.py`` decides).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch

from ditron_train.gemm.configs import GemmConfig, choose_config
from ditron_train.gemm.operands import aligned_operand, empty_aligned, make_descriptor
from ditron_train.gemm.ops import check_operands, on_device
from ditron_train.optim.kernels import addmm_kernel, symmetric_kernel
from ditron_train.optim.triangles import triangle_tiles, triangle_waves
from ditron_train.runtime.device import HOPPER_AND_NEWER, kernel_target, num_sms
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import KernelLaunch, kept_launch
from ditron_train.runtime.outside_compile import outside_compile
from ditron_train.schedule import lower_triangle_tile_order


@dataclass(frozen=True)
class ProductPlan:
    """Which products of one step run by our kernels.

    Attributes:
        use_gram: X @ X^T by its lower triangle.
        use_square: b * A + c * A @ A by its lower triangle.
        use_update: a * X + B @ X by the tile GEMM.
        reason: Why, in words for the log.
        use_graph: All steps as one CUDA graph.
        configs: Tile sizes of each product; by shape if None.
    """

    use_gram: bool
    use_square: bool
    use_update: bool
    reason: str
    use_graph: bool = False
    configs: tuple[GemmConfig | None, GemmConfig | None, GemmConfig | None] = (None, None, None)

    @property
    def uses(self) -> tuple[bool, bool, bool]:
        """Which products, in their order."""
        return self.use_gram, self.use_square, self.use_update


@cache  # never let go of: captured CUDA graphs, our own too, know only the address
def _triangle(size: int, config: GemmConfig, num_programs: int, device: torch.device) -> tuple[torch.Tensor, int, int]:
    """``triangle_tiles`` on the device, made once for a shape: tiles, how many of them whole, how many quarters."""
    if config == _SMALL:  # quarters of these would take other instructions, with other bits
        tiles = lower_triangle_tile_order(size, config.block_m, config.block_n, config.group_m)
        num_whole = len(tiles)
    else:
        tiles, num_whole = triangle_tiles(size, config.block_m, config.block_n, config.group_m, num_programs)
    return torch.from_numpy(tiles).to(device), num_whole, len(tiles) - num_whole


# On Hopper and later; a wide tile runs at the better rate but covers more above the diagonal and fills the last wave
# worse.
_WIDE = GemmConfig(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3)
# Four warps, not eight as in other GEMMs: 1-18 % faster from 1536 to 5120 rows, more if a tile has its SM to
# itself.
_SQUARE = GemmConfig(block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=4)
_SQUARE_RATE = 0.97
# Two run on a multiprocessor at a time: a 1024 x 1024 result took 0.74 of the time of its 36 square tiles on 132
# multiprocessors. Steps of 128 are worth 8 % over 64, four warps 50 % over eight.
_SMALL = GemmConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3)
_SMALL_PER_SM = 2
_SMALL_ADDMM = GemmConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)
_SMALL_ROWS = 2048  # from here on small tiles never were the quickest


@lru_cache(maxsize=1024)
def _symmetric_config(size: int, k: int, dtype: torch.dtype, target: str, sms: int) -> GemmConfig:
    if target not in HOPPER_AND_NEWER:
        config = choose_config(size, size, k, dtype, target, sms)
        block = min(config.block_m, config.block_n)
        return GemmConfig(block, block, config.block_k, config.num_warps, config.num_stages, config.group_m)

    rows = -(-size // _SMALL.block_m)
    if rows * (rows + 1) // 2 <= _SMALL_PER_SM * sms:
        return _SMALL

    def waves(config: GemmConfig) -> float:
        return triangle_waves(size, config.block_m, config.block_n, config.group_m, sms)

    return _WIDE if 2 * waves(_WIDE) <= waves(_SQUARE) / _SQUARE_RATE else _SQUARE


def symmetric_choices(size: int, k: int, dtype: torch.dtype, device: torch.device) -> list[GemmConfig]:
    """Tile sizes for a symmetric [size, size] result that are worth timing, the likeliest first."""
    target = kernel_target(device)
    first = _symmetric_config(size, k, dtype, target, num_sms(device))
    if target not in HOPPER_AND_NEWER:
        return [first]
    others = (_SQUARE, _SMALL) if size < _SMALL_ROWS else (_SQUARE, _WIDE)
    return [first, *(config for config in others if config != first)]


def addmm_choices(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> list[GemmConfig]:
    """Likewise for an [m, n] result of ``addmm``."""
    target = kernel_target(device)
    first = _addmm_config(m, n, k, dtype, target, num_sms(device))
    if target not in HOPPER_AND_NEWER or m >= _SMALL_ROWS:
        return [first]
    return [first, *(config for config in (_SQUARE, _SMALL_ADDMM) if config != first)]


def _symmetric(
    a: torch.Tensor, add: torch.Tensor | None, alpha: float, beta: float, config: GemmConfig | None
) -> torch.Tensor:
    """alpha * A @ A^T + beta * add, [m, m], aligned, for a symmetric ``add``."""
    target = check_operands("symmetric product", a, a if add is None else add)
    m, k = a.shape
    if m == 0 or k == 0:
        raise NotSupportedError(f"symmetric product of an empty matrix {m} x {k}")
    sms = num_sms(a.device)
    config = config or _symmetric_config(m, k, a.dtype, target, sms)
    a = aligned_operand(a)
    has_add = add is not None
    add = a if add is None else aligned_operand(add)  # a stand-in that is not read
    out = empty_aligned(m, m, a.dtype, a.device)
    num_programs = _SMALL_PER_SM * sms if config == _SMALL else sms
    _launch_symmetric(a, add, out, float(alpha), float(beta), config, has_add, num_programs)
    return out


def _launch(kernel: Any, num_programs: int, a: torch.Tensor, config: GemmConfig, **options: int) -> KernelLaunch:
    """Of a product of ``a``; ``options``: the kernel's constants besides its blocks, in its order."""
    blocks = dict(BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k)
    return kept_launch(kernel, num_programs, a.dtype, a.device.index, **blocks, **options, **config.launch_options)


def _launch_symmetric(
    a: torch.Tensor,
    add: torch.Tensor,
    out: torch.Tensor,
    alpha: float,
    beta: float,
    config: GemmConfig,
    has_add: bool,
    num_programs: int,
) -> None:
    """Launches on aligned, not empty operands."""
    m, k = a.shape
    order, num_whole, num_quarters = _triangle(m, config, num_programs, a.device)
    grid = min(num_programs, max(num_whole, num_quarters))
    options = dict(HAS_ADD=has_add, SPLIT_STORE=config.block_n > config.block_m, HAS_QUARTERS=num_quarters > 0)
    launch = _launch(symmetric_kernel, grid, a, config, **options)
    block, half = (config.block_m, config.block_m), config.block_m // 2
    descriptors = whole = (
        make_descriptor(a, (config.block_m, config.block_k)),
        make_descriptor(a, (config.block_n, config.block_k)),
        make_descriptor(add, block),
        make_descriptor(out, block),
    )
    if num_quarters:
        descriptors = (
            make_descriptor(a, (half, 2 * config.block_k)),
            make_descriptor(a, (half, 2 * config.block_k)),
            make_descriptor(add, (half, half)),
            make_descriptor(out, (half, half)),
        )
    with on_device(a.device):
        launch(*whole, *descriptors, order, num_whole, num_quarters, k, alpha, beta)


@outside_compile
def gram(x: torch.Tensor, *, config: GemmConfig | None = None) -> torch.Tensor:
    """X @ X^T by its lower triangle.

    Args:
        x: [m, n], bf16 or fp16 (interpreted: fp32 too), any strides, not empty.
        config: Tile sizes, ``block_n`` equal to ``block_m`` or twice it; by shape if None.

    Returns:
        [m, m], symmetric bit for bit.

    Raises:
        NotSupportedError: A type or device without a kernel, or an empty matrix.
    """
    return _symmetric(x, None, 1.0, 0.0, config)


@outside_compile
def scaled_square(a: torch.Tensor, b: float, c: float, *, config: GemmConfig | None = None) -> torch.Tensor:
    """b * A + c * A @ A for a symmetric A, by its lower triangle; rounds as ``torch.addmm(A, A, A, beta=b, alpha=c)``.

    Args:
        a: [m, m], symmetric bit for bit (not checked), as ``gram`` gives it.
        b: Factor of A.
        c: Factor of the product.
        config: As ``gram``.

    Returns:
        [m, m], symmetric bit for bit.

    Raises:
        NotSupportedError: As ``gram``, or A is not square.
    """
    if a.dim() != 2 or a.shape[0] != a.shape[1]:
        raise NotSupportedError(f"scaled_square of a {' x '.join(map(str, a.shape))} matrix")
    return _symmetric(a, a, c, b, config)


@outside_compile
def addmm(
    add: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, alpha: float, beta: float, config: GemmConfig | None = None
) -> torch.Tensor:
    """beta * add + alpha * A @ B by the tile GEMM; rounds as ``torch.addmm(add, A, B, beta=beta, alpha=alpha)``.

    Args:
        add: [m, n], bf16 or fp16 (interpreted: fp32 too), any strides, not empty.
        a: [m, k] of the same type.
        b: [k, n] of the same type.
        alpha: Factor of the product.
        beta: Factor of ``add``.
        config: Tile sizes; by shape if None.

    Returns:
        [m, n].

    Raises:
        NotSupportedError: A type or device without a kernel, an empty matrix, or shapes that do not fit.
    """
    target = check_operands("addmm", add, a)
    check_operands("addmm", a, b)
    if not add.dim() == a.dim() == b.dim() == 2:
        raise NotSupportedError(f"addmm: {tuple(add.shape)}, {tuple(a.shape)} and {tuple(b.shape)} are no matrices")
    m, n, k = *add.shape, a.shape[1]
    if tuple(a.shape) != (m, k) or tuple(b.shape) != (k, n) or min(m, n, k) == 0:
        raise NotSupportedError(f"addmm of shapes {tuple(add.shape)}, {tuple(a.shape)} and {tuple(b.shape)}")
    sms = num_sms(a.device)
    config = config or _addmm_config(m, n, k, a.dtype, target, sms)
    add, a, b = aligned_operand(add), aligned_operand(a), aligned_operand(b)
    out = empty_aligned(m, n, a.dtype, a.device)
    _launch_addmm(add, a, b, out, float(alpha), float(beta), config, sms)
    return out


@lru_cache(maxsize=1024)
def _addmm_config(m: int, n: int, k: int, dtype: torch.dtype, target: str, sms: int) -> GemmConfig:
    if target in HOPPER_AND_NEWER and _SMALL_ADDMM.num_tiles(m, n) <= sms:
        return _SMALL_ADDMM
    config = choose_config(m, n, k, dtype, target, sms)
    if config.split_store:  # the block of ``add`` takes the shared memory of a stage
        config = replace(config, num_stages=min(config.num_stages, 3))
    return config


def _launch_addmm(
    add: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    alpha: float,
    beta: float,
    config: GemmConfig,
    num_programs: int,
) -> None:
    """Launches on aligned, not empty operands."""
    m, n = out.shape
    num_tiles, num_whole_tiles = config.num_tiles(m, n), config.num_whole_tiles(m, n, num_programs)
    split_last_wave = num_whole_tiles < num_tiles
    grid = num_programs if split_last_wave else min(num_programs, num_tiles)
    options = dict(GROUP_M=config.group_m, SPLIT_STORE=config.split_store, SPLIT_LAST_WAVE=split_last_wave)
    launch = _launch(addmm_kernel, grid, a, config, **options)
    b_desc = make_descriptor(b, (config.block_k, config.block_n))
    half_b_desc = make_descriptor(b, (config.block_k, config.block_n // 2)) if split_last_wave else b_desc
    a_desc = make_descriptor(a, (config.block_m, config.block_k))
    add_desc, c_desc = (make_descriptor(tensor, config.store_block) for tensor in (add, out))
    with on_device(a.device):
        launch(a_desc, b_desc, half_b_desc, add_desc, c_desc, m, n, a.shape[1], num_whole_tiles, alpha, beta)


def newton_schulz_step(x: torch.Tensor, a: float, b: float, c: float, plan: ProductPlan) -> torch.Tensor:
    """One step on X [m, n], m <= n; each product by our kernel or by torch, as the plan says. Equal bits either
    way."""
    of_gram, of_square, of_update = plan.configs
    a_matrix = gram(x, config=of_gram) if plan.use_gram else x @ x.mT
    if plan.use_square:
        b_matrix = scaled_square(a_matrix, b, c, config=of_square)
    else:
        b_matrix = torch.addmm(a_matrix, a_matrix, a_matrix, alpha=c, beta=b)
    del a_matrix  # so that the result can take its place
    if plan.use_update:
        return addmm(x, b_matrix, x, alpha=1.0, beta=a, config=of_update)
    return torch.addmm(x, b_matrix, x, alpha=1.0, beta=a)
