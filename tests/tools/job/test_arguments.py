"""The reader of Megatron's arguments: what it takes, completes, and refuses in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.job import read_job
from ditron_train.tools.job.arguments import pattern_values
from ditron_train.tools.job.model import layer_counts, matrices_of, windowed_layers
from tests.tools.job.record_arguments import PATH, merged, of_checkout

SIZES = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192"
PATTERN = "--hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --hybrid-layer-pattern"


def job(words: str):
    return read_job(words.split())


def test_megatrons_defaults_and_what_it_derives() -> None:
    found = job(SIZES)
    assert (found.model.ffn, found.model.channels, found.model.groups) == (16384, 128, 32)
    assert found.cp_comm_type == "p2p" and found.moe_token_dispatcher_type == "allgather"
    assert job(f"{SIZES} --swiglu").model.ffn == 10880
    assert job(f"{SIZES} --num-query-groups 8").model.groups == 32
    assert job(f"{SIZES} --num-query-groups 8 --group-query-attention").model.groups == 8
    assert not job(
        f"{SIZES} --sequence-parallel"
    ).sequence_parallel  # as Megatron-LM has it without tensor parallelism
    assert job(f"{SIZES} --sequence-parallel --tensor-model-parallel-size 2").sequence_parallel


@pytest.mark.parametrize("gated", ["--swiglu", "--quick-geglu"])
def test_gated_activations_have_a_wide_first_layer(gated: str) -> None:
    widths = {m.name: m.n for m in matrices_of(job(f"{SIZES} --ffn-hidden-size 8192 {gated}"))}
    assert widths["MLP: linear_fc1"] == 2 * 8192
    assert {m.name: m.n for m in matrices_of(job(f"{SIZES} --ffn-hidden-size 8192"))}["MLP: linear_fc1"] == 8192


def test_the_vocabulary_is_the_tokenizers_unless_it_is_given() -> None:
    assert job(f"{SIZES} --tokenizer-type HuggingFaceTokenizer").vocabulary is None
    assert "output_layer" not in {m.name for m in matrices_of(job(SIZES))}
    assert job(f"{SIZES} --vocab-size 50257").vocabulary == 50304
    assert job(f"{SIZES} --vocab-size 50257 --tensor-model-parallel-size 8").vocabulary == 51200
    assert job(f"{SIZES} --padded-vocab-size 50000").vocabulary == 50000


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("--num-layers 8", (8, 8, 1)),
        ("--num-layers 8 --pipeline-model-parallel-size 4", (2, 2, 1)),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", (4, 4, 2)),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4", (4, 4, 4)),
        (
            "--num-layers 94 --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 4 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            (12, 11, 4),
        ),
        (
            "--num-layers 61 --pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 4 "
            "--decoder-last-pipeline-num-layers 1",
            (4, 1, 1),
        ),
        (
            "--num-layers 61 --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout Et*3|(tt|)*29,m|L",
            (9, 6, 4),
        ),
    ],
)
def test_stages_are_those_of_megatron(words: str, stages: tuple[int, int, int]) -> None:
    assert job(f"{SIZES} {words}").stages == stages


def test_stages_of_a_hybrid_pattern() -> None:
    assert job(f"{PATTERN} M*M-|M*M-M --pipeline-model-parallel-size 2").stages == (5, 5, 1)
    with pytest.raises(SettingError, match="3 segments of the hybrid pattern do not divide over 2 stages"):
        job(f"{PATTERN} M|M|M --pipeline-model-parallel-size 2")


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ("", {"*": 8, "-": 8}),
        ("--num-experts 8", {"*": 8, "E": 8}),
        ("--num-experts 8 --moe-layer-freq 2", {"*": 8, "E": 4, "-": 4}),
        ("--num-experts 8 --moe-layer-freq ([0]*3+[1]*5)", {"*": 8, "E": 5, "-": 3}),
        ("--num-experts 8 --mtp-num-layers 1", {"*": 9, "E": 9}),
        ("--experimental-attention-variant gdn --linear-attention-freq 4", {"*": 2, "-": 8, "G": 6}),
        ("--is-hybrid-model --hybrid-attention-ratio 0.25 --hybrid-mlp-ratio 0.5", {"M": 2, "*": 2, "-": 4}),
    ],
)
def test_layers_are_counted(words: str, counts: dict[str, int]) -> None:
    assert dict(layer_counts(job(f"{SIZES} {words}"))) == counts


@pytest.mark.parametrize(
    "words, windowed",
    [
        ("", 0),
        ("--window-size 4096,0", 8),
        ("--window-size (-1,0)", 0),
        ("--window-size 4096,0 --window-attn-skip-freq 4", 6),  # all but each fourth
        ("--window-size 4096,0 --window-attn-skip-freq ([1]*3+[0])*2", 6),
    ],
)
def test_attentions_with_a_window_are_counted(words: str, windowed: int) -> None:
    assert windowed_layers(job(f"{SIZES} {words}")) == windowed


def test_a_hybrid_model_has_the_layers_of_its_pattern_alone() -> None:
    found = job(f"{PATTERN} MM-*|MM-* --num-experts 8 --moe-shared-expert-intermediate-size 512 --vocab-size 1024")
    names = {m.name.partition(":")[0] for m in matrices_of(found)}
    assert names == {"Mamba", "MLP", "attention", "output_layer"}  # no shared experts: no layer has experts
    assert read_job(f"pretrain_mamba.py {SIZES}".split()).is_hybrid_model


@pytest.mark.parametrize(
    "text", ["[0]*9999999999", "[[0]*4096]*4096*4096", "__import__('os')", "1+", "[0.5]", "((((1"]
)
def test_a_pattern_is_a_pattern(text: str) -> None:
    with pytest.raises(SettingError, match="is no pattern of layers"):
        pattern_values(text)
    assert pattern_values("([0]*1+[1]*3)*2") == [0, 1, 1, 1] * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{SIZES} --sequence-paralel", "--sequence-paralel is no argument.*did you mean --sequence-parallel"),
        (f"{SIZES} --tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size"),
        (f"{SIZES} --quite-my-own 2", "is no argument of Megatron-LM .*--allow-unknown"),
        (f"{SIZES} stray", "stray is no argument"),
        ("--num-layers 2", "lack --hidden-size, --num-attention-heads, --seq-length"),
        (f"{SIZES} --ffn-hidden-size wide", "--ffn-hidden-size: invalid int value: 'wide'"),
        (f"{SIZES} --ffn-hidden-size", "--ffn-hidden-size has no value: is a variable not set here"),
        (f"{SIZES} --fp8-recipe mine", "--fp8-recipe: invalid choice"),
        (f"{SIZES} --num-experts 0", "--num-experts has to be from 1 to 1048576"),
        (f"{SIZES} --ffn-hidden-size {2**31}", "from 1 to 1048576"),
        (f"{SIZES} --tensor-model-parallel-size 5", "32 heads do not divide"),
        (f"{SIZES} --swiglu --hidden-size 1 --num-attention-heads 1", "too small"),
        (f"{SIZES} --num-experts 2 --moe-router-topk 4", "--moe-router-topk 4 is more than --num-experts 2"),
        (f"{SIZES} --num-experts 6 --expert-model-parallel-size 4", "6 experts do not divide"),
        (f"{SIZES} --pipeline-model-parallel-size 3", "8 layers do not divide over 3 stages"),
        (f"{SIZES} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout tx|t", "layout tx"),
        (f"{SIZES} --yaml-cfg x.yaml", "--yaml-cfg: the file decides"),
        (f"pretrain_t5.py {SIZES}", "pretrain_t5.py trains another kind of model"),
        (f"{SIZES} --ditron speed", "--ditron does not know 'speed'"),
    ],
)
def test_what_is_no_job_is_refused_in_one_sentence(words: str, says: str) -> None:
    with pytest.raises(SettingError, match=says) as refused:
        job(words)
    assert "\n" not in str(refused.value)


def test_a_scripts_own_arguments_are_passed_over_only_if_asked_for() -> None:
    found = read_job(f"{SIZES} --my-own-argument 3 --bf16".split(), allow_unknown=True)
    assert found.unknown == ("--my-own-argument",) and found.bf16


def test_arguments_without_an_effect_are_known() -> None:
    found = job(f"{SIZES} --lr 1e-4 --train-iters 10 --swiglu")
    assert found.model.swiglu and found.without_effect() == ["--lr", "--train-iters"]


def test_a_path_that_a_variable_would_hold_may_be_missing() -> None:
    assert job(f"{SIZES} --load --data-path --save-interval --bf16").bf16


def test_the_table_has_what_every_supported_version_has() -> None:
    table = json.loads(PATH.read_text())
    for name in ("--num-layers", "--moe-use-legacy-grouped-gemm", "--cuda-graph-modules", "--optimizer-cpu-offload"):
        assert name in table  # of the oldest and of the newest


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="set MEGATRON_LM to a checkout of Megatron-LM")
def test_the_table_has_the_checkouts_arguments() -> None:
    found = merged([of_checkout(Path(os.environ["MEGATRON_LM"]))])
    assert found.keys() <= json.loads(PATH.read_text()).keys()
