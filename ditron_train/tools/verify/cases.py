"""What to verify: the linear layers of a job's model, single shapes, or random ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ditron_train.tools.cases import ModelSizes, Shape
from ditron_train.tools.cases.tp_gemm import local_shapes
from ditron_train.tools.job import read_job
from ditron_train.tp.choices import Op

if TYPE_CHECKING:  # megatron-core need not be there for what is asked of this module alone
    from ditron_train.megatron.tp.spec import Kind

# A LLaMA-70B-like layer, and one that the interpreter computes in seconds.
_GPU_MODEL = ModelSizes(8192, 28672, 64, 8, 128, 8192, 1, True, None, None, 2, 28672)
_CPU_MODEL = ModelSizes(64, 128, 16, 8, 4, 64, 1, True, None, None, 2, 128)
_NEEDED = ("hidden_size", "num_attention_heads", "seq_length")


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


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """What there is instead of a model, whose sizes are Megatron's arguments after ``--``."""
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


def model_sizes(words: Sequence[str], on_gpu: bool) -> ModelSizes:
    """The model that Megatron's arguments describe; without any the default one.

    Raises:
        SettingError: A size is missing or cannot be.
    """
    if not words:
        return _GPU_MODEL if on_gpu else _CPU_MODEL
    return read_job(words, needs=_NEEDED).model


def model_cases(model: ModelSizes, dtype: torch.dtype) -> list[Case]:
    """The four linear layers of a transformer layer, and the output layer if its size is given."""
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
