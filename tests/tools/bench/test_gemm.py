"""``bench gemm`` in a CPU process: both layouts of a product, bits equal; which products a rank's share of the layers
has."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import torch

from ditron_train.tools.bench import gemm
from ditron_train.tools.results import read_results
from tests.support.processes import run_workers


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gemm.add_arguments(parser)
    return parser.parse_args([*words, "--repetitions", "1", "--warmup", "0"])


def _run(*words: str) -> int:
    return gemm.run(_arguments(*words))


def test_rows_of_both_layouts(tmp_path: Path) -> None:
    assert run_workers(1, _run, "--shape", "48", "40", "24", "--output", str(tmp_path)) == [0]
    (path,) = tmp_path.glob("*/gemm.json")
    _, rows = read_results(path)
    assert [row.op for row in rows] == ["gemm_nt", "gemm_nn"]
    assert all(row.bitwise_equal and row.shape == {"m": 48, "n": 40, "k": 24} for row in rows)


def test_products_are_one_ranks_share_of_the_layers() -> None:
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    products = gemm._products(_arguments("--tp", "4", "--model", "Qwen2-72B"), gpu)
    assert [tuple(product) for product in products] == [
        ("Qwen2-72B column", 8192, 29568 // 4, 8192),
        ("Qwen2-72B row", 8192, 8192, 29568 // 4),
    ]
