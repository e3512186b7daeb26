"""What ``predict`` promises, and what it does not: faults of earlier versions, each as a whole kind."""

from __future__ import annotations

import json
import re

import pytest

from ditron_train.cli import main
from ditron_train.data.device_profiles import network_named, profile_named
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.doctor.job import examine_job
from ditron_train.tools.job import read_job
from ditron_train.tools.predict.estimates import Cluster, estimate_step
from ditron_train.tools.predict.predictor import Prediction, predict

FEATURES = ("tp", "sp", "ep", "pp", "muon")
DENSE = (
    "--num-layers 8 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --global-batch-size 32 --swiglu --sequence-parallel --bf16 "
    "--disable-bias-linear --vocab-size 128256 --attention-dropout 0"
)
TP = f"{DENSE} --tensor-model-parallel-size 8"
EP = (
    f"{DENSE} --expert-model-parallel-size 8 --num-experts 64 --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm"
)
SP = f"{DENSE} --context-parallel-size 8 --cp-comm-type a2a"
FP8 = f"{TP} --fp8-format hybrid"
LINEARS = {"attention: linear_qkv", "attention: linear_proj", "MLP: linear_fc1", "MLP: linear_fc2"}
EXPERTS = {"experts: dispatch and combine", "experts: GEMMs in one kernel with them"}


def cluster(nodes: int = 1, device: str = "h100") -> Cluster:
    return Cluster(profile_named(device), nodes, 8, network_named("ib-400"))


def predicted(words: str, nodes: int = 1, step_ms: float | None = 1e6) -> Prediction:
    return predict(read_job(words.split()), cluster(nodes), FEATURES, step_ms)


def step_us(words: str, nodes: int = 1) -> dict[str, float]:
    estimates = estimate_step(read_job(words.split()), cluster(nodes))
    return {name: times.native_us for name, times in estimates.items()}


def test_each_feature_gains_where_it_has_something_to_do() -> None:
    for words, parts in (
        (TP, LINEARS | {"output_layer"}),
        (EP, EXPERTS),
        (SP, {"attention: QKV projection with its exchange", "attention: output projection with its exchange"}),
        (f"{DENSE} --pipeline-model-parallel-size 4", {"messages between stages"}),
    ):
        found = predicted(words)
        assert found.parts.keys() == parts, words
        assert found.gain > 1 and found.between[0] < found.gain < found.between[1]
        assert all(fused < native for native, fused in found.parts.values())


def test_the_gain_is_out_of_the_step_that_the_user_states() -> None:
    alone, stated = predicted(TP, step_ms=None), predicted(TP, step_ms=9000.0)
    saved = sum(native - fused for native, fused in alone.parts.values())
    assert alone.step_ms is alone.gain is alone.between is None and stated.parts == alone.parts
    assert stated.gain == pytest.approx(9000 / (9000 - saved))
    with pytest.raises(SettingError, match="is it a step of this job"):
        predicted(TP, step_ms=1.0)


@pytest.mark.parametrize(
    ("words", "native"),
    [
        (f"{TP} --tp-comm-overlap", LINEARS),
        (f"{FP8} --fp8-recipe mxfp8", LINEARS),
        (f"{FP8} --fp8-recipe blockwise --fp8-param-gather", LINEARS),
        (f"{FP8} --fp8-recipe delayed --fp8-param-gather", LINEARS),
        (f"{FP8} --fp8-recipe tensorwise --cuda-graph-impl local", LINEARS),
        (
            f"{FP8} --fp8-recipe tensorwise --cuda-graph-impl transformer_engine --cuda-graph-scope attn",
            {"attention: linear_qkv", "attention: linear_proj"},
        ),
        (
            f"{FP8} --fp8-recipe tensorwise --cuda-graph-impl transformer_engine --cuda-graph-modules mlp",
            {"MLP: linear_fc1", "MLP: linear_fc2"},
        ),
        (f"{EP} --moe-router-dtype fp64", {"experts: dispatch and combine"}),
        (f"{EP} --moe-token-dispatcher-type flex", {"experts: dispatch and combine"}),
        (f"{EP} --cuda-graph-impl local", {"experts: dispatch and combine"}),
        (f"{EP} --overlap-moe-expert-parallel-comm", {"experts: dispatch and combine"}),
        (f"{SP} --attention-dropout 0.1", {"attention: exchanges"}),
        (f"{DENSE} --context-parallel-size 8 --cp-comm-type p2p", {"attention: exchanges"}),
        (f"{DENSE} --context-parallel-size 8 --cp-comm-type all_gather", {"attention: exchanges"}),
    ],
)
def test_what_runs_natively_gains_nothing_for_the_doctors_reason(words: str, native: set[str]) -> None:
    found = predicted(words)
    reasons = {part.name: part.native_because for part in examine_job(words.split()).parts}
    assert native <= found.native.keys() and not native & found.parts.keys()
    for name in native:
        assert found.native[name] == reasons[name] is not None


def test_steps_of_muon_are_not_estimated() -> None:
    assert predicted(f"{DENSE} --optimizer muon").native["Newton-Schulz steps of matrices"] == "not estimated"


def test_without_a_vocabulary_the_output_layer_is_left_out_and_that_is_said() -> None:
    found = predicted(TP.replace("--vocab-size 128256", "--tokenizer-type HuggingFaceTokenizer"))
    assert found.native["output_layer"] == "not estimated"
    assert any("the tokenizer decides the vocabulary" in line for line in found.idle)
    assert "output_layer" in predicted(TP).parts


def test_gated_activations_count_alike() -> None:
    """The width of the first layer is given, so ``--quick-geglu`` takes what ``--swiglu`` takes."""
    geglu = step_us(TP.replace("--swiglu", "--quick-geglu"))
    assert geglu["MLP: linear_fc1"] == step_us(TP)["MLP: linear_fc1"]
    assert step_us(TP.replace("--swiglu", ""))["MLP: linear_fc1"] < 0.6 * geglu["MLP: linear_fc1"]


def test_virtual_stages_shorten_the_bubble() -> None:
    pp = f"{DENSE} --num-layers 16 --pipeline-model-parallel-size 4"
    layer = "MLP: linear_fc1"
    plain, virtual = step_us(pp)[layer], step_us(f"{pp} --num-layers-per-virtual-pipeline-stage 1")[layer]
    layout = "--pipeline-model-parallel-layout Et|(t|)*14tL"
    assert virtual < plain and step_us(f"{pp} {layout}")[layer] == pytest.approx(virtual)
    # 14 layers, the embedding and the loss on 4 ranks: 4 layers, but 3 on the last, beside the output layer
    split = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 14"
    assert step_us(f"{pp} {split}")[layer] in (pytest.approx(plain), pytest.approx(0.75 * plain))


def test_parts_that_do_not_exist_are_not_listed() -> None:
    words = f"{FP8} --fp8-recipe tensorwise --first-last-layers-bf16 --mtp-num-layers 1"
    names = {part.name for part in examine_job(words.split()).parts}
    assert "multi-token prediction: eh_proj" in names
    assert not any(name.startswith("multi-token prediction: eh_proj,") for name in names)
    hybrid = f"{TP} --hybrid-layer-pattern MM-*MM-* --num-experts 8 --moe-shared-expert-intermediate-size 1024"
    assert not any("experts" in part.name for part in examine_job(hybrid.split()).parts)


@pytest.mark.parametrize("stated", [[], ["--step-ms", "9000"]])
def test_the_rows_of_the_table_add_up(capsys: pytest.CaptureFixture[str], stated: list[str]) -> None:
    assert main(["predict", "--device", "h100", *stated, "--", *TP.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.findall(r"(?<= )\d+\.\d(?= |$)", line) for line in lines if re.search(r"\d\.\d  +\d+\.\d$", line)]
    values = [[float(cell) for cell in row] for row in rows]
    for column in range(3):
        assert sum(row[column] for row in values[:-1]) == pytest.approx(values[-1][column], abs=0.11)


def test_one_gpu_has_no_exchange_and_no_gain() -> None:
    alone = Cluster(profile_named("h100"), 1, 1, network_named("ib-400"))
    found = predict(read_job(DENSE.split()), alone, FEATURES, 1e6)
    assert found.gain == 1 and not found.parts and found.between == (1, 1)


def test_groups_across_nodes_are_not_estimated() -> None:
    found = predicted(f"{EP} --expert-model-parallel-size 16", nodes=2)
    assert found.native["experts: dispatch and combine"].startswith("its group spans nodes")
    assert found.gain == 1


def test_typos_and_unknown_arguments_do_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        (f"{TP} --sequence-paralel", "did you mean --sequence-parallel?"),
        (f"{TP} --tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size?"),
    ):
        for command in ("predict", "doctor"):
            assert main([command, "--", *words.split()]) == 2
            assert says in capsys.readouterr().err
    assert main(["predict", "--allow-unknown", "--", *TP.split(), "--my-own", "3"]) == 0
    assert "passed over, as Megatron-LM does not have them: --my-own" in capsys.readouterr().out


def test_it_prints_json_and_what_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TP.split(), "--lr", "1e-4"]
    assert main(["predict", "--json", "--step-ms", "9000", "--", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_ms"] == 9000 and found["gpus"] == 8 and found["gain"] > 1
    assert main(["predict", "--", *words]) == 0
    assert "--lr" not in capsys.readouterr().out
    assert main(["predict", "-v", "--", *words]) == 0
    assert "without an effect here: --lr" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "abacus"], "no profile is called abacus"),
        (["--network", "pigeons"], "no network is called pigeons"),
        (["--step-ms", "0"], "--step-ms has to be a number above 0"),
        (["--nodes", "0"], "lack"),
        (["--picture", "x.png"], "predict draws no pictures any more"),
    ],
)
def test_options_that_cannot_be(capsys: pytest.CaptureFixture[str], options: list[str], says: str) -> None:
    words = [] if says == "lack" else TP.split()
    assert main(["predict", *options, "--", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
