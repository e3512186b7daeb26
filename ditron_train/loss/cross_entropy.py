"""Cross entropy over a divided vocabulary, with the bits of Megatron's unfused one and a third of its memory traffic.

Equivalent code, of each rank with its part ``logits [s, b, V]`` of the vocabulary, from word ``first_word`` on::

    x = logits.float()                                  # megatron.core.tensor_parallel.cross_entropy
    largest = all_reduce(x.max(-1), MAX)
    x -= largest
    predicted = all_reduce(x[target - first_word], SUM) # 0 if the target is another rank's
    e = exp(x)
    sums = all_reduce(e.sum(-1), SUM)
    loss = log(sums) - predicted
    # backward
    logits.grad = ((e / sums - is_target) * loss.grad).bfloat16()

Megatron passes over fp32 logits for each line, and keeps ``e / sums`` for its backward. Here the maximum is taken of
the logits as they are, one kernel writes ``e``, torch adds it up (so in torch's order), and ``e`` is given back; the
backward computes it again from the logits in the one kernel that writes their gradient::

    maxima of logits | e | sums of e (torch) | ... | gradient
    2 bytes read       2 + 4   4 read                2 read, 2 written     of each logit

against 50 bytes by torch's operators. The exponential is CUDA's ``expf``, as in torch; division rounds to nearest.

Timeline of ``cross_entropy`` with its backward. NCCL exchanges one fp32 value of each token, three times:

    native   compute   | to fp32 | max |     | subtract | exp | sum |               | softmax | backward, to bf16 |
    native   NCCL      |               | max |                      | sums, predicted |
    fused    compute   | max |     | e | sum |                 | backward |
    fused    NCCL      |     | max |         | sums, predicted |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ditron_train.gemm.ops import on_device
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import COMPILE_OPTIONS
from ditron_train.runtime.outside_compile import outside_compile

_BLOCK, _NUM_WARPS = 4096, 8


@triton.jit
def _exponentials(logits, largest, row, columns, words):
    x = tl.load(logits + row * words + columns, mask=columns < words, other=0.0).to(tl.float32)
    return libdevice.exp(x - tl.load(largest + row))


@triton.jit
def exponentials_kernel(logits, largest, exponentials, words, BLOCK: tl.constexpr):
    """exponentials = exp(logits - largest) in fp32, of rows of ``words`` logits; a program takes BLOCK of a row."""
    blocks = tl.cdiv(words, BLOCK)
    row = tl.cast(tl.program_id(0) // blocks, tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    values = _exponentials(logits, largest, row, columns, words)
    tl.store(exponentials + row * words + columns, values, mask=columns < words)


@triton.jit
def gradient_kernel(logits, largest, sums, target, grad_loss, gradient, first_word, words, BLOCK: tl.constexpr):
    """gradient = (exp(logits - largest) / sums - is_target) * grad_loss, rounded once; programs as above."""
    blocks = tl.cdiv(words, BLOCK)
    row = tl.cast(tl.program_id(0) // blocks, tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    values = _exponentials(logits, largest, row, columns, words)
    softmax = tl.div_rn(values, tl.zeros_like(values) + tl.load(sums + row))
    is_target = columns == tl.load(target + row) - first_word
    found = tl.where(is_target, softmax - 1.0, softmax) * tl.load(grad_loss + row)
    tl.store(gradient + row * words + columns, found.to(gradient.dtype.element_ty), mask=columns < words)


def _launch(kernel: Any, logits: torch.Tensor, *arguments: Any) -> None:
    words = logits.shape[-1]
    num_programs = logits.numel() // words * triton.cdiv(words, _BLOCK)
    with on_device(logits.device):
        kernel[(num_programs,)](logits, *arguments, words, BLOCK=_BLOCK, num_warps=_NUM_WARPS, **COMPILE_OPTIONS)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group, first_word):
        largest = logits.amax(dim=-1).float()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        predicted = _predicted(logits, target, largest, first_word)
        exponentials = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        _launch(exponentials_kernel, logits, largest, exponentials)
        sums = exponentials.sum(dim=-1)
        del exponentials
        dist.all_reduce(predicted, group=group)
        dist.all_reduce(sums, group=group)
        ctx.first_word = first_word
        ctx.save_for_backward(logits, largest, sums, target)
        return torch.log(sums) - predicted

    @staticmethod
    def backward(ctx, grad_loss):
        refuse_second_derivatives("cross_entropy")
        logits, largest, sums, target = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        _launch(gradient_kernel, logits, largest, sums, target, grad_loss.contiguous(), gradient, ctx.first_word)
        return gradient, None, None, None


def _predicted(logits: torch.Tensor, target: torch.Tensor, largest: torch.Tensor, first_word: int) -> torch.Tensor:
    """logits - largest at the target, 0 if the target is another rank's."""
    words = logits.shape[-1]
    is_elsewhere = (target < first_word) | (target >= first_word + words)
    place = (target - first_word).masked_fill(is_elsewhere, 0)
    found = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).float() - largest
    return found.masked_fill(is_elsewhere, 0.0)


def unsupported_reason(logits: torch.Tensor, target: torch.Tensor) -> str | None:
    """Why ``cross_entropy`` does not take these, or None."""
    if logits.dtype not in (torch.bfloat16, torch.float16):
        return f"the logits are {logits.dtype}"
    if target.dtype != torch.int64 or target.shape != logits.shape[:-1] or not logits.is_contiguous():
        return f"logits of shape {tuple(logits.shape)} and targets of shape {tuple(target.shape)} are not covered"
    return None if logits.numel() else "there are no tokens"


@outside_compile
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup, *, first_word: int
) -> torch.Tensor:
    """The loss of each token (collective over ``group``).

    Args:
        logits: Of this rank's words [..., V], bf16 or fp16, contiguous; they must not be changed before the backward,
            which computes from them.
        target: The word that follows, of the whole vocabulary [...], int64, contiguous.
        group: Tensor parallel group that the vocabulary is divided over.
        first_word: The first of this rank's words.

    Returns:
        fp32 [...], alike on all ranks.

    Raises:
        NotSupportedError: Types or shapes do not fit; before anything is sent.
    """
    reason = unsupported_reason(logits, target)
    if reason is not None:
        raise NotSupportedError(f"cross_entropy: {reason}")
    return _CrossEntropy.apply(logits, target, group, first_word)
