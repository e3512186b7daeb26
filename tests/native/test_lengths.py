"""Layers whose number of tokens varies: fused at every length, without agreements, memory or launches of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from ditron_train.runtime.errors import DitronError, MismatchError
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
from test_layers import HIDDEN, _assert_equal, _config, _integers, _layers, _run  # noqa: E402

LENGTHS = (24, 32, 40, 38, 36, 24, 10, 2, 38, 34, 22)  # the third is the first of a varying family


def _in_groups(body, *arguments):
    """``body`` with all ranks in one tensor parallel group."""
    from tests.support.model_parallel import model_parallel

    with (
        model_parallel(tensor_model_parallel_size=dist.get_world_size()),
        mock.patch.dict(os.environ),  # what a body sets is undone
    ):
        return body(*arguments)


def _lengths(rows: str | None) -> tuple[list[bool], list[int], list[int], int]:
    """Whether both layers were fused at each length; the agreements and bytes of the arena after each; how many
    kernels have launches."""
    from ditron_train.policy import gate
    from ditron_train.stream import agreement
    from ditron_train.tp.context import get_tp_context

    if rows is not None:
        os.environ["DITRON_ROWS"] = rows
    agreements, announce = [0], agreement._announce

    def counted(*arguments, **options):
        agreements[0] += 1
        return announce(*arguments, **options)

    config = _config()

    def column_group(layers):
        return layers[0].tp_group

    native, fused = (_layers(is_fused, config) for is_fused in (False, True))
    were_fused, agreed, held = [], [], []
    with mock.patch.object(agreement, "_announce", counted):
        for tokens in LENGTHS:
            expected = _run(*native, tokens=tokens)
            _assert_equal(expected, _run(*fused, tokens=tokens))
            calls = [answer.is_fused for answer in gate.answers("tp")]
            were_fused.append(all(calls) and len(calls) > 0)
            context = get_tp_context(column_group(fused))
            agreed.append(agreements[0])
            held.append(context.arena.num_bytes)
    return were_fused, agreed, held, len(context._launches)


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


def _audited(case: str) -> tuple[list[str], list[str], int]:
    """Reasons of the answers, lines of errors, and how many calls were computed by both paths."""
    import logging

    from ditron_train.megatron.tp import spec
    from ditron_train.policy import audit, gate

    os.environ["DITRON_AUDIT"] = "2"
    os.environ["DITRON_ROWS"] = "96" if "fixed" not in case else ""
    compared, same_bits = [], audit.same_bits
    audit.same_bits = lambda expected, found: compared.append(1) or same_bits(expected, found)
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ditron_train").addHandler(handler)
    right = spec.row_linear

    def wrong(x, weight, **options):
        y = right(x, weight, **options)
        return y + (dist.get_rank() == 1 and x.shape[0] == 22)

    if "wrong" in case:
        spec.row_linear = wrong  # what a trial and an audit run
    os.environ["DITRON_POLICY"] = "bits" if "bits" in case else "strict"
    try:
        config = _config()
        native, fused = (_layers(is_fused, config) for is_fused in (False, True))
        for tokens in (24, 22, 22, 24, 38, 22) if "fixed" not in case else (24, 22, 22, 24):
            try:
                found = _run(*fused, tokens=tokens)
            except DitronError as error:
                return [type(error).__name__], [str(error)], len(compared)
            if "wrong" not in case:
                _assert_equal(_run(*native, tokens=tokens), found)
        return sorted({answer.reason or "fused" for answer in gate.answers("tp")}), lines, len(compared)
    finally:
        spec.row_linear = right
        audit.same_bits = same_bits
        logging.getLogger("ditron_train").removeHandler(handler)


def test_an_audit_computes_every_nth_call_by_both_paths() -> None:
    for reasons, lines, compared in run_workers(2, _in_groups, _audited, "right"):
        assert reasons == ["fused"] and not lines and compared == 6  # of 6 calls of each of two layers


FOUND = "an audit found other bits than the native path's on rank 1"


@pytest.mark.parametrize("case", ["wrong", "wrong fixed"])
def test_a_difference_is_one_line_and_native_from_then_on(case: str) -> None:
    (reasons, lines, compared), (others, silent, same) = run_workers(2, _in_groups, _audited, case)
    assert reasons == others == [FOUND, "fused"] and compared == same and not silent
    assert len(lines) == 1 and lines[0].startswith("tp row at (22, 2, 48)") and FOUND in lines[0]


def test_a_difference_is_an_error_where_bits_are_asked_for() -> None:
    for name, words, _ in run_workers(2, _in_groups, _audited, "wrong bits"):
        assert name == ["DitronError"] and FOUND in words[0]
