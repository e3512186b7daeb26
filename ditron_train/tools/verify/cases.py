"""What to verify: the linear layers of a model given by Megatron's arguments, single shapes, or random ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.cases import ModelSizes, Shape
from ditron_train.tools.cases.tp_gemm import local_shapes
from ditron_train.tp.choices import Op

if TYPE_CHECKING:  # megatron-core need not be there for what is asked of this module alone
    from ditron_train.megatron.tp.spec import Kind

# A LLaMA-70B-like layer, and one that the interpreter computes in seconds.
_GPU_MODEL = dict(hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8, seq_length=8192)
_CPU_MODEL = dict(hidden_size=64, ffn_hidden_size=128, num_attention_heads=16, num_query_groups=8, seq_length=64)


@dataclass(frozen=True)
class Case:
    """One linear layer.

    Attributes:
        name: Which layer of the model, or ``custom``, ``random``.
        kind: ``column`` (all-gather, GEMM) or ``row`` (GEMM, reduce-scatter).
        m: Tokens of all ranks.
        n: Output features, before division over the ranks (``column``).
        k: Input features, before division over the ranks (``row``).
        dtype: Of activations and weights.
        sequence_parallel: Whether tokens are split over the ranks outside the layer; else sums are all-reduced.
    """

    name: str
    kind: Kind
    m: int
    n: int
    k: int
    dtype: torch.dtype
    sequence_parallel: bool = True

    def local_shapes(self, world_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of x and weight on each rank.

        Raises:
            SettingError: A size is not above 0, or does not divide over the ranks.
        """
        shape = Shape(self.name, {"m": self.m, "n": self.n, "k": self.k})
        op: Op = "ag_gemm" if self.kind == "column" else "gemm_rs" if self.sequence_parallel else "gemm_ar"
        return local_shapes(op, shape, world_size, f"{self.name} {self.kind}")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """A model in Megatron's own words."""
    model = parser.add_argument_group(
        "model", "Megatron's arguments; default: a LLaMA-70B-like layer (CPU: a small one)"
    )
    for name in (
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "num-query-groups",
        "kv-channels",
        "seq-length",
    ):
        model.add_argument(f"--{name}", type=int, metavar="N")
    model.add_argument("--micro-batch-size", type=int, default=1, metavar="N")
    model.add_argument("--no-swiglu", dest="swiglu", action="store_false", help="fc1 without a gate")
    model.add_argument("--padded-vocab-size", type=int, metavar="N", help="the output layer too")


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and the alternatives."""
    add_model_arguments(parser)
    experts = parser.add_argument_group(
        "its experts", "of --rooms ep; default: 128 of a published layer (CPU: a small one)"
    )
    for name in ("num-experts", "moe-router-topk", "moe-ffn-hidden-size"):
        experts.add_argument(f"--{name}", type=int, metavar="N")
    other = parser.add_argument_group("instead of a model")
    other.add_argument(
        "--column", nargs=3, type=int, action="append", metavar=("M", "N", "K"), help="one column layer"
    )
    other.add_argument("--row", nargs=3, type=int, action="append", metavar=("M", "N", "K"), help="one row layer")
    other.add_argument("--random", type=int, default=0, metavar="N", help="N random shapes")
    other.add_argument(
        "--largest", type=int, metavar="N", help="largest size of a random shape (default 8192, CPU: 160)"
    )
    other.add_argument("--seed", type=int, default=0, metavar="N", help="of the random shapes and of all data")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, CPU: float32")
    parser.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_false",
        help="the layers as they are without sequence parallelism, with all-reduces",
    )


def model_sizes(arguments: argparse.Namespace, on_gpu: bool) -> ModelSizes:
    """What the command line says, completed as Megatron does, or the default model.

    Raises:
        SettingError: A size that cannot be.
    """
    size = dict(_GPU_MODEL if on_gpu else _CPU_MODEL)
    given = {name: getattr(arguments, name) for name in size}
    if given["hidden_size"] is not None:
        ffn = 4 * given["hidden_size"]
        size.update(ffn_hidden_size=int(ffn * 2 / 3 / 64) * 64 if arguments.swiglu else ffn)
    size.update({name: value for name, value in given.items() if value is not None})
    if given["num_attention_heads"] is not None and given["num_query_groups"] is None:
        size["num_query_groups"] = given["num_attention_heads"]
    experts, topk, expert_ffn = (
        getattr(arguments, name, None) for name in ("num_experts", "moe_router_topk", "moe_ffn_hidden_size")
    )
    others = (arguments.kv_channels, arguments.padded_vocab_size, experts, topk, expert_ffn)
    if min(*size.values(), arguments.micro_batch_size, *(number for number in others if number is not None)) < 1:
        raise SettingError("sizes of a model have to be above 0")
    if size["hidden_size"] % size["num_attention_heads"] and arguments.kv_channels is None:
        raise SettingError(
            f"hidden size {size['hidden_size']} does not divide into {size['num_attention_heads']} heads"
        )
    return ModelSizes(
        hidden=size["hidden_size"],
        ffn=size["ffn_hidden_size"],
        heads=size["num_attention_heads"],
        groups=size["num_query_groups"],
        channels=arguments.kv_channels or size["hidden_size"] // size["num_attention_heads"],
        seq_length=size["seq_length"],
        micro_batch_size=arguments.micro_batch_size,
        swiglu=arguments.swiglu,
        vocabulary=arguments.padded_vocab_size,
        experts=experts,
        topk=topk or 2,
        expert_ffn=expert_ffn or size["ffn_hidden_size"],
    )


def model_cases(model: ModelSizes, dtype: torch.dtype) -> list[Case]:
    """The four linear layers of a transformer layer, and the output layer where its size is given."""
    kinds: dict[str, Kind] = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
    cases = [Case(name, kinds[name], model.tokens, *shape, dtype) for name, shape in model.matrices.items()]
    if model.vocabulary:
        cases.append(Case("output", "column", model.tokens, model.vocabulary, model.hidden, dtype))
    return cases


def shape_cases(arguments: argparse.Namespace, dtype: torch.dtype) -> list[Case]:
    """What ``--column`` and ``--row`` name."""
    return [
        Case("custom", kind, m, n, k, dtype)
        for kind in ("column", "row")
        for m, n, k in getattr(arguments, kind) or ()
    ]


def random_cases(
    count: int,
    seed: int,
    world_size: int,
    on_gpu: bool,
    *,
    largest: int | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[Case]:
    """Shapes from small to large (about ``largest``), aligned and not, the same on every rank; of one dtype or of
    all."""
    generator = np.random.default_rng(seed)
    dtypes = (dtype,) if dtype else (torch.bfloat16, torch.float16) if on_gpu else (torch.float32,)
    largest = largest or (8192 if on_gpu else 160)

    def size(multiple_of: int) -> int:
        step = multiple_of * int(generator.choice((1, 8, 64) if on_gpu else (1, 8)))
        return step * max(1, round(np.exp(generator.uniform(np.log(step), np.log(max(largest, step + 1)))) / step))

    for _ in range(count):
        kind: Kind = "column" if generator.integers(2) else "row"
        m = size(world_size)
        n = size(world_size if kind == "column" else 1)
        k = size(world_size if kind == "row" else 1)
        yield Case("random", kind, m, n, k, dtypes[int(generator.integers(len(dtypes)))])
