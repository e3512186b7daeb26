"""Rows of an embedding by word, with the bits of PyTorch's deterministic gradient, whose sums stay in registers.

Equivalent code, of a rank that holds ``weight [V, H]`` of the vocabulary; ``words [...]`` count from its first word::

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

_BLOCK, _AHEAD, _NUM_WARPS = 512, 16, 2
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def sum_tokens_kernel(
    gradient, words, ends, tokens, sums, num_words, features, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """sums[word] = 0 + gradient[token] + ... over the tokens of each word in order, rounded to the type of sums after
    each; of words that have no token nothing is written.

    ``words`` are sorted, ``ends`` says where each of them ends, and ``tokens`` of which token it is. A program takes
    BLOCK features of the word that begins at its position; it reads AHEAD tokens at a time."""
    begin = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word, end = tl.load(words + begin), tl.load(ends + begin)
    is_first = tl.load(ends + begin - 1, mask=begin > 0, other=0) == begin
    if is_first & (word >= 0) & (word < num_words):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for place in range(begin, end, AHEAD):
            for ahead in tl.static_range(AHEAD):
                is_there = place + ahead < end
                token = tl.load(tokens + place + ahead, mask=is_there, other=0)
                addend = tl.load(
                    gradient + token * features + columns, mask=is_there & (columns < features), other=0.0
                )
                total = (total + addend.to(tl.float32)).to(sums.dtype.element_ty).to(tl.float32)
        tl.store(sums + word * features + columns, total.to(sums.dtype.element_ty), mask=columns < features)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, words):
        ctx.num_words = len(weight)
        ctx.save_for_backward(words)
        return weight[words.masked_fill((words < 0) | (words >= len(weight)), 0)]

    @staticmethod
    def backward(ctx, gradient):
        refuse_second_derivatives("lookup")
        (words,) = ctx.saved_tensors
        features = gradient.shape[-1]
        sums = gradient.new_zeros(ctx.num_words, features)
        in_order, tokens = words.flatten().sort(stable=True)
        ends = torch.searchsorted(in_order, in_order, right=True)
        sizes = (ctx.num_words, features, _BLOCK, _AHEAD)
        with on_device(gradient.device):
            sum_tokens_kernel[words.numel(), triton.cdiv(features, _BLOCK)](
                gradient.contiguous(), in_order, ends, tokens, sums, *sizes, num_warps=_NUM_WARPS, **COMPILE_OPTIONS
            )
        return sums, None


def unsupported_reason(weight: torch.Tensor, words: torch.Tensor) -> str | None:
    """Why `lookup` does not take these, or None."""
    if weight.dtype not in _DTYPES or words.dtype != torch.int64:
        return f"an embedding of {weight.dtype} by {words.dtype}"
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dim() != 2:
        return f"the embedding is a {type(weight).__name__} of {weight.dim()} dimensions"
    return None if words.numel() and weight.numel() else "there are no tokens"


def lookup(weight: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """The rows of ``weight`` that ``words`` name; of words that it does not have its first row.

    Whoever calls it sets the results of such words to zero, which makes their gradients zero: they are not added.

    Args:
        weight: bf16, fp16 or fp32 [V, H].
        words: int64 [...], counted from the first of this rank's words.

    Returns:
        [..., H], of the type of ``weight``.

    Raises:
        NotSupportedError: Types do not fit.
    """
    reason = unsupported_reason(weight, words)
    if reason is not None:
        raise NotSupportedError(f"lookup: {reason}")
    return _Lookup.apply(weight, words)
