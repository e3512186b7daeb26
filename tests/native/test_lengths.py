"""Layers whose number of tokens varies: fused at every length, without agreements, memory or launches of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from ditron_train.runtime.errors import MismatchError
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from test_layers import HIDDEN, _assert_equal, _config, _integers, _layers, _run  # noqa: E402

LENGTHS = (24, 32, 40, 38, 36, 24, 10, 2, 38, 34, 22)  # the third is the first of a varying family


def _in_groups(body, *arguments):
    """``body`` with all ranks in one tensor parallel group."""
    from tests.support.model_parallel import model_parallel

    with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
        return body(*arguments)


def _lengths(rows: str | None) -> tuple[list[bool], list[int], list[int], int]:
    """Whether both layers were fused at each length; the agreements and bytes of the arena behind each; how many
    kernels have launches."""
    from ditron_train.policy import gate
    from ditron_train.stream.op_context import OpContext
    from ditron_train.tp.context import get_tp_context

    if rows is not None:
        os.environ["DITRON_ROWS"] = rows
    agreements, announce = [0], OpContext._announce

    def counted(self, *arguments, **options):
        agreements[0] += 1
        return announce(self, *arguments, **options)

    OpContext._announce = counted
    config = _config()

    def column_group(layers):
        return layers[0].tp_group

    native, ours = (_layers(is_ours, config) for is_ours in (False, True))
    fused, agreed, held = [], [], []
    for tokens in LENGTHS:
        expected = _run(*native, tokens=tokens)
        _assert_equal(expected, _run(*ours, tokens=tokens))
        calls = [answer.is_fused for answer in gate.answers("tp")]
        fused.append(all(calls) and len(calls) > 0)
        context = get_tp_context(column_group(ours))
        agreed.append(agreements[0])
        held.append(context.arena.num_bytes)
    return fused, agreed, held, len(context._launches)


def test_every_length_is_fused_and_none_costs_an_agreement_or_memory() -> None:
    for fused, agreed, held, pooled in run_workers(2, _in_groups, _lengths, None):
        assert all(fused)
        # Of 40 tokens buffers grow; shorter ones fit, and 38 and 36 have the range's room.
        assert len(set(agreed[2:])) == 1 and len(set(held[2:])) == 1
        assert 0 < pooled < 24


def test_memory_is_reserved_at_once_where_the_most_tokens_are_said() -> None:
    for fused, agreed, held, _ in run_workers(2, _in_groups, _lengths, "96"):
        assert all(fused) and len(set(held)) == 1
        assert len(set(agreed)) == 1


def _bad(case: str) -> list[str]:
    """What comes of bad lengths: the path at each call, or the error."""
    from ditron_train.policy import gate

    os.environ["DITRON_ROWS"] = "64"
    config = _config()
    column, row = _layers(True, config)
    native = _layers(False, config)
    _assert_equal(_run(*native, tokens=24), _run(column, row, tokens=24))
    if case == "beyond":
        _assert_equal(_run(*native, tokens=40), _run(column, row, tokens=40))
        return sorted({answer.reason or "fused" for answer in gate.answers("tp")})
    if case == "none":
        for tokens in (0, 2):
            _assert_equal(_run(*native, tokens=tokens), _run(column, row, tokens=tokens))
        return sorted({answer.reason or "fused" for answer in gate.answers("tp")})
    if case == "not divisible":  # of a row layer: Megatron's own error, on every rank
        try:
            row(_integers(7, 1, row.weight.shape[1], seed=1))
        except Exception as error:
            return [type(error).__name__]
    tokens = 8 + 2 * dist.get_rank()
    try:
        column(_integers(tokens, 2, HIDDEN, seed=1))
        column(_integers(tokens, 2, HIDDEN, seed=1))
    except MismatchError as error:
        return ["MismatchError", str(error)]
    return ["nothing"]


def test_more_tokens_than_were_said_run_natively() -> None:
    expected = ["fused", "more tokens than DITRON_ROWS=64"]
    assert run_workers(2, _in_groups, _bad, "beyond") == [expected] * 2


def test_no_token_runs_natively_and_two_are_fused() -> None:
    for found in run_workers(2, _in_groups, _bad, "none"):
        assert len(found) == 2 and "fused" in found and "shapes (0, 2" in " ".join(found)


def test_rows_that_do_not_divide_are_megatrons_error() -> None:
    assert run_workers(2, _in_groups, _bad, "not divisible") == [["AssertionError"]] * 2


def test_lengths_that_differ_between_ranks_are_an_error_on_every_rank() -> None:
    for name, *words in run_workers(2, _in_groups, _bad, "differ"):
        assert name == "MismatchError" and "rank 0: total_rows=32" in words[0] and "rank 1: total_rows=40" in words[0]
