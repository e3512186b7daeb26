"""Megatron's arguments, read without Megatron."""

from __future__ import annotations

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.predict.megatron_arguments import parse_job

PATTERN = "--hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --hybrid-layer-pattern".split()
SIZES = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192".split()


def test_what_is_not_said_is_as_megatron_has_it() -> None:
    job = parse_job(SIZES)
    model = job.model
    assert (model.ffn, model.groups, model.channels, model.swiglu) == (4 * 4096, 32, 128, False)
    assert (job.tp, job.pp, job.cp, job.ep, job.chunks, job.optimizer, job.global_batch) == (
        1,
        1,
        1,
        1,
        1,
        "adam",
        None,
    )
    assert model.vocabulary == 32000 and model.experts is None
    assert parse_job([*SIZES, "--swiglu"]).model.ffn == 10880  # two thirds, in whole 64


def test_groups_count_with_their_flag_alone() -> None:
    assert parse_job([*SIZES, "--num-query-groups", "8"]).model.groups == 32
    assert parse_job([*SIZES, "--group-query-attention", "--num-query-groups=8"]).model.groups == 8


def test_unknown_arguments_are_listed_with_their_values_passed_over() -> None:
    words = ["torchrun", "pretrain_gpt.py", "--lr", "1e-4", "--data-path", "0.5", "a", "0.5", "b", *SIZES, "--lr", "2"]
    assert parse_job(words).ignored == ("--lr", "--data-path")
    assert parse_job(words).model == parse_job(SIZES).model


def test_a_vocabulary_is_padded_for_its_ranks() -> None:
    words = [*SIZES, "--vocab-size", "128257", "--tensor-model-parallel-size", "8"]
    assert parse_job(words).model.vocabulary == 129024  # whole 8 x 128


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (SIZES[2:], "--num-layers"),
        ([*SIZES, "--ffn-hidden-size", "wide"], "--ffn-hidden-size takes one number"),
        ([*SIZES, "--ffn-hidden-size"], "takes one number, not nothing"),
        ([*SIZES, "--micro-batch-size", "0"], "from 1 to"),
        ([*SIZES, "--global-batch-size", "1" + 400 * "0"], "from 1 to 16777216"),
        ([*SIZES, "--ffn-hidden-size", str(2**31)], "from 1 to 1048576"),
        ([*SIZES, "--num-attention-heads", "65536"], "too small for 65536 heads"),
        ([*SIZES, "--swiglu", "--hidden-size", "1", "--num-attention-heads", "1"], "too small for 1 heads"),
        ([*SIZES, "--kv-channels", "65536"], "32 heads of 65536 channels are more than"),
        ([*SIZES, "--num-experts", "8", "--moe-router-topk", "9"], "9 is more than --num-experts 8"),
        ([*SIZES, "--pipeline-model-parallel-size", "3"], "8 layers do not divide over 3 stages"),
        ([*SIZES, "--tensor-model-parallel-size", "5"], "do not divide"),
        ([*PATTERN, "M-M-M", "--pipeline-model-parallel-size", "2"], "5 layers do not divide over 2 stages"),
        ([*PATTERN, "M|M|M", "--pipeline-model-parallel-size", "2"], "3 segments of the hybrid pattern do not divide"),
        ([*PATTERN, "/MM"], "--num-layers has to be from 1"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        parse_job(words)


@pytest.mark.parametrize(
    ("pattern", "layers", "chunks"),
    [("M*M-|M*M-M", 9, 1), ("M*M-|M*M-|M-M-|M-M*", 16, 2), ("M*M-M*M-", 8, 1), ("M-M-|M-M*-/MM/MM", 9, 1)],
)
def test_a_hybrid_pattern_says_layers_and_stages(pattern: str, layers: int, chunks: int) -> None:
    for name in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
        words = [name, pattern, "--pipeline-model-parallel-size", "2"]
        for sizes in (SIZES[2:], [*SIZES, "--num-layers", "64"]):  # which the pattern overrides
            job = parse_job([*sizes, *words])
            assert (job.num_layers, job.chunks) == (layers, chunks)


def test_without_a_global_batch_each_replica_has_one_microbatch() -> None:
    job = parse_job([*SIZES, "--micro-batch-size", "2", "--tensor-model-parallel-size", "2"])
    assert job.data_parallel(8) == 4 and job.microbatches(8) == 1 and job.microbatches(2) == 1


def test_experts_are_split_as_other_layers_unless_said_otherwise() -> None:
    words = [*SIZES, "--num-experts", "8", "--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    assert parse_job(words).expert_slices == 2 and parse_job(words).expert_replicas(8) == 2
    whole = parse_job([*words, "--expert-tensor-parallel-size", "1"])
    assert whole.expert_slices == 1 and whole.expert_replicas(8) == 4


def test_microbatches_are_what_replicas_leave() -> None:
    job = parse_job([*SIZES, "--global-batch-size", "64", "--tensor-model-parallel-size", "4"])
    assert job.data_parallel(16) == 4 and job.microbatches(16) == 16
    for ranks, says in ((6, "do not divide into TP 4"), (12, "does not divide over 3 replicas")):
        with pytest.raises(SettingError, match=says):
            job.microbatches(ranks)


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        ("--num-layers-per-virtual-pipeline-stage 1", 4),
        ("--num-layers-per-virtual-pipeline-stage 2", 2),
        ("--num-virtual-stages-per-pipeline-rank 2", 2),
        ("", 1),
    ],
)
def test_virtual_stages_in_both_of_megatrons_ways(words: str, chunks: int) -> None:
    assert parse_job([*SIZES, "--pipeline-model-parallel-size", "2", *words.split()]).chunks == chunks
