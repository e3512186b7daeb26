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
GATHERED, GATHERS = (
    f"{DENSE} --context-parallel-size 8 --cp-comm-type all_gather",
    "attention: gathers of keys and values",
)
FP8 = f"{TP} --fp8-format hybrid"
LINEARS = {"attention: linear_qkv", "attention: linear_proj", "MLP: linear_fc1", "MLP: linear_fc2"}
EXPERTS = {"experts: dispatch and combine", "experts: GEMMs in one kernel with them"}


def cluster(nodes: int = 1, device: str = "h100") -> Cluster:
    return Cluster(profile_named(device), nodes, 8, network_named("ib-400"))


def predicted(words: str, nodes: int = 1, step_ms: float | None = None) -> Prediction:
    return predict(read_job(words.split()), cluster(nodes), FEATURES, step_ms)


def step_us(words: str, nodes: int = 1) -> dict[str, float]:
    estimates = estimate_step(read_job(words.split()), cluster(nodes))
    return {name: times.native_us for name, times in estimates.items()}


def test_each_feature_gains_where_it_has_something_to_do() -> None:
    for words, parts in (
        (TP, LINEARS | {"output_layer"}),
        (EP, EXPERTS),
        (SP, {"attention: QKV projection with its exchange", "attention: output projection with its exchange"}),
        (GATHERED, {GATHERS}),
        (f"{DENSE} --pipeline-model-parallel-size 4", {"messages between stages"}),
        (f"{DENSE} --optimizer muon", {"Newton-Schulz steps of matrices"}),
    ):
        found = predicted(words)
        assert found.parts.keys() == parts, words
        assert found.gain > 1 and found.between[0] < found.gain < found.between[1]
        assert all(fused < native for native, fused in found.parts.values())


def test_the_gain_is_out_of_the_step_that_the_user_states() -> None:
    rough = predicted(TP)
    stated = predicted(TP, step_ms=2 * rough.step_ms)
    saved = sum(native - fused for native, fused in rough.parts.values())
    assert rough.is_rough and not stated.is_rough and stated.parts == rough.parts
    assert stated.gain == pytest.approx(2 * rough.step_ms / (2 * rough.step_ms - saved))
    with pytest.raises(SettingError, match="is it a step of this job"):
        predicted(TP, step_ms=1.0)


@pytest.mark.parametrize(
    ("words", "native"),
    [
        (f"{TP} --tp-comm-overlap", LINEARS),
        (f"{FP8} --fp8-recipe mxfp8", LINEARS),
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
        (
            f"{EP} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            {"experts: dispatch and combine"},
        ),
        (f"{EP} --moe-token-dispatcher-type flex", {"experts: GEMMs in one kernel with them"}),
        (f"{EP} --cuda-graph-impl local", {"experts: dispatch and combine"}),
        (f"{EP} --overlap-moe-expert-parallel-comm", {"experts: GEMMs in one kernel with them"}),
        (f"{SP} --attention-dropout 0.1", {"attention: exchanges"}),
        (f"{DENSE} --context-parallel-size 8 --cp-comm-type p2p", {"attention: exchanges"}),
        (f"{GATHERED} --attention-dropout 0.1", {GATHERS}),
    ],
)
def test_what_runs_natively_gains_nothing_for_the_doctors_reason(words: str, native: set[str]) -> None:
    found = predicted(words)
    reasons = {part.name: part.native_because for part in examine_job(words.split()).parts}
    assert native <= found.native.keys() and not native & found.parts.keys()
    for name in native:
        assert found.native[name] == reasons[name] is not None


def test_movement_during_another_microbatch_counts_and_its_products_do_not() -> None:
    found, other = predicted(f"{EP} --overlap-moe-expert-parallel-comm"), predicted(EP)
    assert list(found.parts) == ["experts: dispatch and combine"] and 1 < found.gain < other.gain
    assert any("--overlap-moe-expert-parallel-comm: movement counts as without it" in line for line in found.idle)


def test_a_window_takes_attention_away() -> None:
    name, windowed = "attention itself", f"{DENSE} --window-size 1024,0"
    whole, near = (step_us(words)[name] for words in (DENSE, windowed))
    assert near < 0.5 * whole
    mixed = step_us(f"{windowed} --window-attn-skip-freq 2")[name]
    assert mixed == pytest.approx((whole + near) / 2, rel=1e-6)
    exchanged, gathered = (
        step_us(f"{windowed} --context-parallel-size 2 --cp-comm-type {kind}")[name] for kind in ("a2a", "all_gather")
    )
    assert exchanged == pytest.approx(near, rel=0.02)  # half the heads, twice the microbatches
    assert exchanged < gathered < whole  # kernels compute the corners of each chunk


def test_gradients_and_the_optimizer_follow_their_options() -> None:
    name = "gradients over replicas"
    full = step_us(DENSE)[name]
    assert step_us(f"{DENSE} --grad-reduce-in-bf16")[name] < 0.7 * full
    assert step_us(f"{DENSE} --main-grads-dtype bf16 --use-precision-aware-optimizer")[name] < 0.7 * full
    assert step_us(f"{DENSE} --overlap-grad-reduce")[name] < 0.5 * full
    shared = step_us(f"{DENSE} --use-distributed-optimizer")["optimizer"]
    assert shared < 0.2 * step_us(DENSE)["optimizer"]
    assert any("offload" in line for line in predicted(f"{DENSE} --optimizer-cpu-offload").idle)


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


def test_the_rows_of_the_table_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--device", "h100", "--", *TP.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [re.findall(r"(?<= )\d+\.\d(?= |$)", line) for line in lines if re.search(r"\d\.\d  +\d+\.\d$", line)]
    values = [[float(cell) for cell in row] for row in rows]
    for column in range(3):
        assert sum(row[column] for row in values[:-1]) == pytest.approx(values[-1][column], abs=0.11)


def test_one_gpu_has_no_exchange_and_no_gain() -> None:
    found = predict(read_job(DENSE.split()), Cluster(profile_named("h100"), 1, 1, network_named("ib-400")), FEATURES)
    assert found.gain == 1 and not found.parts and found.between == (1, 1)


def test_gathers_of_keys_and_values_take_time() -> None:
    gathered = step_us(GATHERED)
    ring = step_us(f"{DENSE} --context-parallel-size 8 --cp-comm-type p2p")
    native, fused = predicted(GATHERED).parts[GATHERS]
    windowed_native, windowed = predicted(f"{GATHERED} --window-size 128,0").parts[GATHERS]
    assert 0 < windowed < fused < native == windowed_native
    assert gathered[GATHERS] > 0 and sum(gathered.values()) > sum(ring.values())


def test_groups_across_nodes_are_not_estimated() -> None:
    found = predicted(f"{EP} --expert-model-parallel-size 16", nodes=2)
    assert found.native["experts: dispatch and combine"].startswith("its group spans nodes")
    assert found.gain == 1


def test_published_steps_of_h100s_are_within_what_the_page_says() -> None:
    """Megatron-MoE-ModelZoo, TFLOP/s or seconds of a step on InfiniBand; nothing is fitted to them."""
    base = (
        "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --swiglu --bf16 "
        "--disable-bias-linear --micro-batch-size 1 --position-embedding-type rope --group-query-attention "
        "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --seq-length 4096 --expert-tensor-parallel-size 1 "
        "--expert-model-parallel-size 8 --untie-embeddings-and-output-weights"
    )
    mixtral = (
        f"{base} --num-experts 8 --moe-router-topk 2 --num-query-groups 8 --vocab-size 32000 --global-batch-size 256"
    )
    large = (
        f"{mixtral} --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 7"
    )
    small = (
        f"{mixtral} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 8"
    )
    qwen = (
        f"{base} --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 "
        "--kv-channels 128 --num-query-groups 4 --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8 "
        "--vocab-size 151936 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 32 --num-virtual-stages-per-pipeline-rank 3 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --global-batch-size 2048"
    )
    published = ((large, 16, 4.27), (f"{large} --fp8-format e4m3 --fp8-recipe blockwise", 16, 3.54),
                 (small, 8, 2.98), (qwen, 32, 24.2))  # fmt: skip
    errors = [predicted(words, nodes).step_ms / 1e3 / seconds - 1 for words, nodes, seconds in published]
    assert [round(100 * error) for error in errors] == [-3, -14, -10, -22]


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
