"""Rows of an embedding by word, with the bits of PyTorch's deterministic gradient, whose sums stay in registers.

Equivalent code, of a rank that holds ``weight [V, H]`` of the vocabulary; of ``words [...]``, counted from its first,
those outside of it are other ranks'::

    is_elsewhere = (words < 0) | (words >= V)
    index = words.masked_fill(is_elsewhere, 0)
    result = weight[index]                          # megatron.core.tensor_parallel.VocabParallelEmbedding
    result[is_elsewhere] = 0                        # so these tokens' gradients are +0
    # backward
    weight.grad = zeros_like(weight)
    for token in range(num_tokens):                 # one after the other, each sum rounded to the type of weight
        weight.grad[index[token]] += result.grad[token]

PyTorch sorts the tokens by word. For each token of a word its kernel then reads the word's sum from memory, adds the
token's gradient and writes it back, which takes about 1 us a token, and all tokens of other ranks are tokens of word
0: with 8 ranks seven of eight. Here the sum of a word stays in registers, gradients are read ahead of the sums, and
tokens of other ranks are skipped: no sum changes if +0 is added, since a sum that begins with +0 never becomes -0.
(Rows of at most 32 features PyTorch adds otherwise.)

Timeline of ``lookup``, backward, of a word with three tokens; other words are summed concurrently:

    native   compute   | sort | read, add, write | read, add, write | read, add, write |
    fused    compute   | sort | read | add | add | add | write |
    fused    ahead     |      | read |
    fused    further   |      | read |
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ditron_train.gemm.ops import on_device
from ditron_train.runtime.derivatives import refuse_second_derivatives
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.launch import COMPILE_OPTIONS

_BLOCK, _AHEAD, _NUM_WARPS = 512, 8, 2
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SHORT_ROW = 32  # up to so many features PyTorch rounds a sum once


@triton.jit(do_not_specialize=["num_words"])  # trials have another vocabulary
def sum_tokens_kernel(
    gradient, words, ends, tokens, sums, num_words, features, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """sums[word] = 0 + gradient[token] + ... over the tokens of each word in order, rounded to the type of sums after
    each; of words that have no token, and of word ``num_words``, nothing is written.

    ``words`` are sorted, ``ends`` says where each of them ends, and ``tokens`` of which token it is. A program takes
    BLOCK features of the word that begins at its position; it reads up to AHEAD tokens ahead of the sum."""
    begin = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word, end = tl.load(words + begin).to(tl.int64), tl.load(ends + begin)
    is_first = tl.load(ends + begin - 1, mask=begin > 0, other=0) == begin
    if is_first & (word < num_words):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for place in tl.range(begin, end, num_stages=AHEAD):
            token = tl.load(tokens + place)
            addend = tl.load(gradient + token * features + columns, mask=columns < features, other=0.0)
            total = (total + addend.to(tl.float32)).to(sums.dtype.element_ty).to(tl.float32)
        tl.store(sums + word * features + columns, total.to(sums.dtype.element_ty), mask=columns < features)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, index, is_elsewhere):
        ctx.num_words, ctx.is_elsewhere = len(weight), is_elsewhere
        ctx.save_for_backward(index)
        return weight[index]

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivatives("lookup")
        (index,) = ctx.saved_tensors
        words = index.remainder(ctx.num_words).int()  # -1 is the last word
        if ctx.is_elsewhere is not None:
            words.masked_fill_(ctx.is_elsewhere, ctx.num_words)
        features = gradient.shape[-1]
        sums = gradient.new_zeros(ctx.num_words, features)
        in_order, tokens = words.flatten().sort(stable=True)
        ends = torch.searchsorted(in_order, in_order, right=True)
        sizes = (ctx.num_words, features, _BLOCK, _AHEAD)
        with on_device(gradient.device):
            sum_tokens_kernel[words.numel(), triton.cdiv(features, _BLOCK)](
                gradient.contiguous(), in_order, ends, tokens, sums, *sizes, num_warps=_NUM_WARPS, **COMPILE_OPTIONS
            )
        return sums, None, None


def unsupported_reason(weight: torch.Tensor, index: torch.Tensor) -> str | None:
    """Why `lookup` does not take these, or None."""
    if weight.dtype not in _DTYPES or index.dtype != torch.int64 or index.device != weight.device:
        return f"an embedding of {weight.dtype} on {weight.device} by {index.dtype} on {index.device}"
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dim() != 2 or len(weight) >= 1 << 31:
        return f"the embedding is a {type(weight).__name__} of {weight.dim()} dimensions"
    if weight.is_cuda and weight.shape[1] <= _SHORT_ROW:
        return f"PyTorch adds rows of {weight.shape[1]} features in another order"
    return None if index.numel() and weight.numel() else "there are no tokens"


def lookup(weight: torch.Tensor, index: torch.Tensor, is_elsewhere: torch.Tensor | None = None) -> torch.Tensor:
    """``weight[index]``, with its gradient in deterministic mode.

    Args:
        weight: bf16, fp16 or fp32 [V, H], on GPUs of more than 32 features.
        index: int64 [...], as PyTorch takes it.
        is_elsewhere: bool [...], which tokens' gradients are known to be +0, as those of other ranks' words, whose
            rows Megatron sets to zero: they are not added.

    Returns:
        [..., H], of the type of ``weight``.

    Raises:
        NotSupportedError: Types or sizes do not fit.
    """
    reason = unsupported_reason(weight, index)
    if reason is not None:
        raise NotSupportedError(f"lookup: {reason}")
    return _Lookup.apply(weight, index, is_elsewhere)
