"""Newton-Schulz iteration: the orthogonal factor of a matrix, by products alone.

With X_0 = G / max(|G|_F, eps), each step computes

    A = X X^T,  B = b A + c A A,  X <- a X + B X,

a quintic polynomial that drives every singular value towards 1 (K. Jordan et al., "Muon: an optimizer for hidden
layers in neural networks", 2024; the five-step coefficients are those that F. L. Cesista, Y. Jiacheng and K. Jordan
found by search, "Squeezing 1-2% efficiency gains out of Muon", 2025; "polar_express" is N. Amsel et al., 2025).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from ditron_train.gemm.ops import on_device
from ditron_train.optim.graphs import Steps, step_graph
from ditron_train.optim.kernels import normalize_kernel
from ditron_train.optim.plans import ProductMode, plan_products
from ditron_train.optim.products import newton_schulz_step
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import kept_launch
from ditron_train.runtime.outside_compile import outside_compile

CoefficientType = Literal["simple", "quintic", "polar_express"]
ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]

_TILE = 64

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (7.2086, -15.5131, 9.0178),
        (3.9623, -2.5813, 0.4542),
        (3.9466, -2.5765, 0.4544),
        (3.8991, -2.5671, 0.4566),
        (3.7186, -2.5308, 0.4653),
        (3.1390, -2.3073, 0.4733),
        (2.1715, -1.5246, 0.3885),
        (1.8648, -1.2224, 0.3577),
    ),
}


@contextlib.contextmanager
def fp32_matmul_precision(precision: str) -> Iterator[None]:
    """How torch multiplies fp32 matrices (TF32 or not), for the time of one orthogonalisation."""
    before = torch.get_float32_matmul_precision()
    if before == precision:
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def muon_scale(num_rows: int, num_columns: int, mode: ScaleMode = "spectral") -> float:
    """Factor that makes an orthogonal update of a [num_rows, num_columns] weight comparable between shapes.

    ``spectral``: sqrt(max(rows, columns)); ``unit_rms_norm``: sqrt(rows / columns); ``shape_scaling``:
    sqrt(max(1, rows / columns)).

    Raises:
        NotSupportedError: An unknown mode.
    """
    if mode == "spectral":
        return max(num_rows, num_columns) ** 0.5
    if mode == "unit_rms_norm":
        return (num_rows / num_columns) ** 0.5
    if mode == "shape_scaling":
        return max(1, num_rows / num_columns) ** 0.5
    raise NotSupportedError(f"scale mode {mode!r} is not spectral, unit_rms_norm or shape_scaling")


def unsupported_reason_steps(coefficient_type: str, num_steps: int) -> str | None:
    """Why so many steps of the set of that name cannot be taken, or None."""
    if coefficient_type not in COEFFICIENTS:
        return f"coefficients {coefficient_type!r} are not one of {', '.join(COEFFICIENTS)}"
    number = len(COEFFICIENTS[coefficient_type])
    if num_steps < 1 or num_steps % number:
        return f"{num_steps} steps are not a multiple of the {number} of {coefficient_type!r}"
    return None


def step_coefficients(coefficient_type: CoefficientType, num_steps: int) -> list[tuple[float, float, float]]:
    """(a, b, c) of each step: the set of that name, repeated.

    Raises:
        NotSupportedError: An unknown set, or a number of steps that is not a whole multiple of it.
    """
    reason = unsupported_reason_steps(coefficient_type, num_steps)
    if reason is not None:
        raise NotSupportedError(reason)
    coefficients = COEFFICIENTS[coefficient_type]
    return list(coefficients) * (num_steps // len(coefficients))


def normalized(
    x: torch.Tensor, *, eps: float, dtype: torch.dtype, contiguous: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """X / max(|X|_F, eps) with rows <= columns (transposed if they are not), in ``dtype``.

    The norm is torch's own reduction; the rest is one pass on a GPU.

    Args:
        x: fp32 [rows, columns] with unit inner stride.
        eps: Lower bound of the norm.
        dtype: bf16, fp16 or fp32.
        contiguous: Whether a transposed result is written transposed; else it is a view, as native's is. cuBLAS may
            choose other algorithms, with other bits, for one than for the other.
        out: On a GPU: memory for the result, contiguous, in the shape in which it is written.
    """
    transpose = x.shape[0] > x.shape[1]
    view = x.mT if transpose else x
    norm = torch.linalg.vector_norm(view, 2, dim=(-2, -1), keepdim=True)
    if x.device.type != "cuda":
        return (view / norm.clamp_min(eps).expand_as(view)).to(dtype)
    rows, columns = x.shape
    write_transposed = transpose and contiguous
    if out is None:
        out = torch.empty(view.shape if write_transposed else x.shape, dtype=dtype, device=x.device)
    num_programs = -(-rows // _TILE) * -(-columns // _TILE)
    constants = dict(TRANSPOSE=write_transposed, BLOCK_M=_TILE, BLOCK_N=_TILE)
    launch = kept_launch(normalize_kernel, num_programs, dtype, x.device.index, **constants)
    with on_device(x.device):
        launch(x, norm, out, rows, columns, x.stride(0), out.stride(0), eps)
    return out.mT if transpose and not contiguous else out


@outside_compile
def newton_schulz(
    grad: torch.Tensor,
    *,
    num_steps: int = 5,
    coefficient_type: CoefficientType = "quintic",
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    mode: ProductMode = "strict",
    borrow: bool = False,
) -> torch.Tensor:
    """Approximate orthogonal factor of one matrix, in the orientation rows <= columns and the type of the products.

    Args:
        grad: fp32 [rows, columns].
        num_steps: Steps, a multiple of the coefficient set's length.
        coefficient_type: Which polynomials. ``polar_express`` changes results against native Muon.
        eps: Lower bound of the norm: a zero gradient gives a zero factor.
        dtype: Type of the products; bf16 is what "medium" precision means.
        mode: See ``plan_products``.
        borrow: Whether the result may be memory of a CUDA graph, which the next call on this stream overwrites,
            whatever its shape: saves a copy of small matrices.

    Returns:
        [min, max] of ``dtype``: transposed if ``grad`` has more rows than columns. NaN and infinities pass through.

    Raises:
        NotSupportedError: Not a matrix, not fp32, unknown coefficients, or a number of steps that does not fit.
    """
    if grad.dim() != 2 or grad.dtype != torch.float32:
        raise NotSupportedError(f"Newton-Schulz needs an fp32 matrix, got {grad.dtype} of {grad.dim()} dimensions")
    coefficients = step_coefficients(coefficient_type, num_steps)
    if grad.numel() == 0:
        return torch.empty(min(grad.shape), max(grad.shape), dtype=dtype, device=grad.device)
    if grad.stride(1) != 1:
        grad = grad.contiguous()
    transposed = grad.shape[0] > grad.shape[1]
    m, n = sorted(grad.shape)
    plan = plan_products(m, n, dtype, grad.device, mode, transposed=transposed)
    contiguous = plan.use_gram and plan.use_update
    if plan.use_graph:
        is_view = transposed and not contiguous
        graph = step_graph(Steps(m, n, dtype, grad.device, is_view, tuple(coefficients), plan))
        if graph is not None:
            normalized(grad, eps=eps, dtype=dtype, contiguous=contiguous, out=graph.storage)
            return graph.replay() if borrow else graph.replay().clone()
    x = normalized(grad, eps=eps, dtype=dtype, contiguous=contiguous)
    for a, b, c in coefficients:
        x = newton_schulz_step(x, a, b, c, plan)
    return x


@outside_compile
def orthogonalize(grad: torch.Tensor, **options) -> torch.Tensor:
    """As ``newton_schulz`` (with its options), back in the shape of ``grad`` and fp32."""
    x = newton_schulz(grad, **options, borrow=True).to(torch.float32, copy=True)
    return x.mT if grad.shape[0] > grad.shape[1] else x
