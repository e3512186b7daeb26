"""``bench tp`` on CPU processes: rows of every part, bits equal, bad shapes refused."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.bench import tp
from ditron_train.tools.cases.tp_gemm import AG_GEMM, GEMM_RS
from ditron_train.tools.op_rows import shapes_for
from ditron_train.tools.results import read_results
from tests.support.exact import exact_sums
from tests.support.processes import run_workers


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tp.add_arguments(parser)
    return parser.parse_args([*words, "--repetitions", "1", "--warmup", "0"])


def _run(*words: str) -> int:
    return tp.run(_arguments(*words))


@pytest.mark.slow
def test_rows_of_both_ops_and_their_backward(tmp_path: Path) -> None:
    shape = ("--shape", "128", "64", "128")
    assert run_workers(2, _run, *shape, "--output", str(tmp_path)) == [0, 0]
    (path,) = tmp_path.glob("*/tp.json")
    stamp, rows = read_results(path)
    assert stamp.count == 2
    names = [(row.op, row.direction) for row in rows]
    assert names[:3] == [("ag_gemm", "forward"), ("gemm_rs", "forward"), ("gemm_ar", "forward")]
    assert names[3:] == [
        ("column_linear", "backward"),
        ("row_linear", "backward"),
        ("row_linear_ar", "forward_backward"),
    ]
    for row in rows:
        assert row.bitwise_equal and row.shape == {"m": 128, "n": 64, "k": 128} and row.native_us > 0
    assert rows[0].gemm_us and rows[0].comm_us and rows[0].peer is None and rows[0].limit_us is None


def _layer_rows(is_split: bool) -> list[tuple[str, str, bool, bool]]:
    """Op and pass of each row, whether ranks have the same tokens, whether results are those of stock Megatron."""
    from ditron_train.tools.bench import megatron_tp
    from ditron_train.tools.session import bench_session

    small = dict(hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2)
    arguments = argparse.Namespace(repetitions=1, warmup=0)
    with (
        mock.patch.object(megatron_tp, "_LLAMA_70B", small),
        mock.patch.dict(megatron_tp.LAYER_SHAPE, tokens=32, hidden=64, ffn_hidden=128),
        mock.patch.dict(os.environ, DITRON_POLICY="force"),
        bench_session("tp", arguments) as session,
        megatron_tp.megatron_world(session),
        exact_sums(),
    ):
        pair = megatron_tp._LayerPair(session, is_split=is_split)
        others = [torch.empty_like(pair.passes.x) for _ in range(2)]
        dist.all_gather(others, pair.passes.x)
        fused, native = (pair.passes.forward_backward(pair.layers[name]) for name in ("fused", "native"))
        is_equal = all(torch.equal(*pair) for pair in zip(fused, native, strict=True))
        rows = list(megatron_tp.layer_rows(session, is_split=is_split))
        return [(row.op, row.direction, torch.equal(*others), is_equal) for row in rows]


@pytest.mark.parametrize("is_split, op", [(True, "transformer_layer"), (False, "transformer_layer_ar")])
def test_a_layer_has_rows_with_and_without_sequence_parallelism(is_split: bool, op: str) -> None:
    expected = [(op, direction, not is_split, True) for direction in ("forward", "forward_backward")]
    assert run_workers(2, _layer_rows, is_split) == [expected] * 2


def _refused(*words: str) -> str:
    try:
        tp.run(_arguments(*words))
    except SettingError as error:
        return str(error)
    return "accepted"


def test_bad_shapes_are_refused_on_every_rank() -> None:
    messages = run_workers(2, _refused, "--shape", "127", "64", "128", "--part", "ag_gemm")
    assert messages == ["ag_gemm 127x64x128 does not divide over 2 ranks: M and N have to"] * 2
    assert "accepted" not in run_workers(2, _refused_model)


def _refused_model() -> str:
    try:
        shapes_for(AG_GEMM, _arguments("--model", "GPT-9", "--part", "ag_gemm"), 2, True)
    except SettingError as error:
        return str(error)
    return "accepted"


def test_every_published_shape_divides() -> None:
    for case in (AG_GEMM, GEMM_RS):
        for world_size in (2, 4, 8):
            assert len(shapes_for(case, _arguments(), world_size, True)) == 6
