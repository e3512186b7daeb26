"""A predicted step: what it is made of, how it changes, and the command that shows it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ditron_train.cli import main
from ditron_train.megatron.plugin.arguments import Options
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.profiles import network_named, profile_named, read_profile, shipped_profiles
from ditron_train.tools.predict.cluster import Cluster
from ditron_train.tools.predict.layers import FEATURES
from ditron_train.tools.predict.megatron_arguments import Job, parse_job
from ditron_train.tools.predict.memory import memory_bytes
from ditron_train.tools.predict.otherwise import estimated_otherwise
from ditron_train.tools.predict.predictor import by_degree, scaled, useful_features
from ditron_train.tools.predict.step import predict_step

LAYERS = (
    "--num-layers 8 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --global-batch-size 32 --swiglu --sequence-parallel --bf16 "
    "--position-embedding-type rope"
)
H200 = profile_named("h200")


def job(words: str) -> Job:
    return parse_job(f"{LAYERS} {words}".split())


def cluster(nodes: int = 1, per_node: int = 8) -> Cluster:
    return Cluster(H200, nodes, per_node, network_named("ib-400"))


def test_components_add_up_and_both_run_the_same_computation() -> None:
    step = predict_step(job("--tensor-model-parallel-size 8"), cluster())
    assert step.native_us == pytest.approx(sum(step.native.values()))
    differing = {kind for kind in step.ditron if step.native.get(kind) != step.ditron[kind]}
    assert differing <= {"exchanges", "host", "clock"} and "exchanges" in differing
    assert 1.05 < step.speedup < 1.4 and step.hidden[1] > step.hidden[0]


def test_a_feature_that_is_off_runs_by_megatrons_path() -> None:
    step = predict_step(job("--tensor-model-parallel-size 8"), cluster(), frozenset())
    assert step.native == step.ditron


@pytest.mark.parametrize(
    ("words", "best"),
    [
        ("--tensor-model-parallel-size 8", "tp"),
        ("--context-parallel-size 8 --cp-comm-type a2a", "sp"),
        ("--num-experts 64 --moe-ffn-hidden-size 2048 --moe-router-topk 8 --expert-model-parallel-size 8", "ep"),
        ("--optimizer dist_muon", "muon"),
        ("--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 1", "pp"),
    ],
)
def test_what_to_switch_on(words: str, best: str) -> None:
    useful = useful_features(job(words), cluster())
    assert next(iter(useful)) == best and all(gain > 1 for gain in useful.values())


EXPERTS = "--num-experts 16 --moe-ffn-hidden-size 2048 --moe-token-dispatcher-type"


@pytest.mark.parametrize("words", ["", f"{EXPERTS} alltoall", f"{EXPERTS} allgather --optimizer sgd"])
def test_what_the_job_itself_would_call_idle_gains_nothing(words: str) -> None:
    alone = job(words)
    sizes = {"tp": alone.tp, "sp": alone.cp, "ep": alone.ep, "pp": alone.pp}
    idle = Options((*sizes, "muon"), sizes=sizes, optimizer=alone.optimizer).idle()
    assert {line.partition(":")[0] for line in idle} == FEATURES
    for feature in FEATURES:
        assert predict_step(alone, cluster(), {feature}).speedup == 1.0
    assert useful_features(alone, cluster()) == {}


@pytest.mark.parametrize(
    ("words", "gains"),
    [
        ("alltoall --expert-model-parallel-size 4", True),
        ("alltoall --tensor-model-parallel-size 4", False),  # which splits every expert, and EP is 1
        ("allgather --tensor-model-parallel-size 4", True),
        ("allgather --tensor-model-parallel-size 4 --expert-tensor-parallel-size 1", False),
        ("flex --expert-model-parallel-size 4", False),
    ],
)
def test_ep_gains_where_it_moves_tokens(words: str, gains: bool) -> None:
    assert (predict_step(job(f"{EXPERTS} {words}"), cluster(), {"ep"}).speedup > 1) == gains


def test_ulysses_alone_gains_by_sp() -> None:
    assert "sp" not in useful_features(job("--context-parallel-size 8"), cluster())  # a ring of keys and values


@pytest.mark.parametrize("words", ["", "--fp8-format hybrid"])
def test_tensor_parallel_across_nodes_is_slower_and_goes_along_rails_in_16_bits(words: str) -> None:
    words += " --tensor-model-parallel-size 8"
    inside, across = predict_step(job(words), cluster()), predict_step(job(words), cluster(2, 4))
    assert across.native_us > inside.native_us
    assert across.ditron_us == across.native_us if "fp8" in words else 1.02 < across.speedup < inside.native_us


@pytest.mark.parametrize(
    "words",
    [
        "--tensor-model-parallel-size 8",
        "--context-parallel-size 8 --cp-comm-type a2a",
        "--num-experts 64 --moe-ffn-hidden-size 2048 --moe-router-topk 8 --expert-model-parallel-size 8",
    ],
)
def test_rails_gain_more_where_the_network_is_slower_and_never_lose(words: str) -> None:
    gains = []
    for rate in ("2000", "50", "5"):
        where = Cluster(H200, 2, 4, network_named(rate))
        step = predict_step(job(words), where)
        gains.append(step.native_us - step.ditron_us)
    assert min(gains) >= 0 and gains[2] > 0
    assert gains == sorted(gains) or "context" in words  # whose bytes inside the node lie beside the others natively


def test_waits_that_are_covered_gain_less_where_the_power_limits_the_step() -> None:
    words, slow = "--tensor-model-parallel-size 2", dataclasses.replace(H200.rates, gemm_power=1.6)
    steps = [
        predict_step(job(words), Cluster(dataclasses.replace(H200, rates=rates), 1, 8))
        for rates in (dataclasses.replace(H200.rates, gemm_power=0.8), slow)
    ]
    assert "clock" not in steps[0].native and steps[1].ditron["clock"] > steps[1].native["clock"] > 0
    saved = [step.native_us - step.ditron_us for step in steps]
    # What a wait draws; a few launches less beside it save the half of that.
    assert saved[1] == pytest.approx(0.6 * saved[0], rel=0.01)


def test_more_stages_have_bubbles_that_virtual_stages_shorten() -> None:
    words = "--pipeline-model-parallel-size 4"
    one = predict_step(job(words), cluster())
    two = predict_step(job(f"{words} --num-layers-per-virtual-pipeline-stage 1"), cluster())
    assert one.native["bubbles"] == pytest.approx(2 * two.native["bubbles"], rel=0.01)
    assert "bubbles" not in predict_step(job(""), cluster()).native


def test_stages_are_farthest_apart_but_where_replicas_lie_around_them() -> None:
    """On two nodes of eight, four stages of four ranks: with the mapping the four replicas are on both nodes."""
    usual, mapped = "--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 4 --use-tp-pp-dp-mapping"
    for words, slower, as_ever in ((usual, "exchanges", "gradients"), (mapped, "gradients", "exchanges")):
        quick, slow = (
            predict_step(job(words), Cluster(H200, 2, 8, network_named(rate))).native for rate in ("400", "4")
        )
        assert slow[slower] > 1.5 * quick[slower] and slow[as_ever] == quick[as_ever]


@pytest.mark.parametrize("words", ["", "--use-tp-pp-dp-mapping"])
def test_the_order_of_ranks_is_nothing_to_one_node(words: str) -> None:
    stages = job(f"--pipeline-model-parallel-size 4 {words}")
    assert predict_step(stages, cluster()) == predict_step(stages, Cluster(H200, 1, 8, network_named("4")))


def test_a_job_grows_to_128_gpus_with_its_batch() -> None:
    sizes = scaled(job("--tensor-model-parallel-size 8"), cluster())
    found = dict(sizes)
    assert list(found) == [16, 32, 64, 128]
    assert found[128].native["GEMMs"] == found[16].native["GEMMs"]
    assert found[128].native["gradients"] > found[16].native["gradients"] > 0


def test_the_gain_grows_with_ranks_of_a_node_and_shrinks_behind_it() -> None:
    found = by_degree(job("--tensor-model-parallel-size 2"), cluster(2, 8))["TP"]
    assert 1 < found[2] < found[4] < found[8] > found[16] > 1.0
    assert by_degree(job(""), cluster()) == {}


@pytest.mark.parametrize(
    "words",
    ["--num-experts 6 --expert-model-parallel-size 4", "--expert-model-parallel-size 2", "--context-parallel-size 3"],
)
def test_groups_that_do_not_divide_are_refused(words: str) -> None:
    with pytest.raises(SettingError, match="not divide"):
        predict_step(job(words), cluster())


RING = "--num-attention-heads 32 --tensor-model-parallel-size 8 --context-parallel-size 8 --cp-comm-type"


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a+p2p --hierarchical-context-parallel-sizes 4 2"])
def test_a_ring_needs_no_head_for_each_rank(kind: str) -> None:
    more, fewer = (
        predict_step(job(f"{RING} {kind} {words}"), cluster(8)) for words in ("", "--num-attention-heads 64")
    )
    assert 0 < more.native["attention"] < 2 * fewer.native["attention"]
    inside = f"{RING.replace('size 8 --context', 'size 4 --context')} p2p"
    assert predict_step(job(inside), cluster(4)).native["attention"] > more.native["attention"]


def test_ulysses_needs_a_head_for_each_rank() -> None:
    for kind in ("a2a", "a2a+p2p --hierarchical-context-parallel-sizes 8 1"):
        with pytest.raises(SettingError, match="32 heads and FFN 28672 do not divide over TP 8 x CP 8"):
            predict_step(job(f"{RING} {kind}"), cluster(8))
    with pytest.raises(SettingError, match="--hierarchical-context-parallel-sizes takes one number, not two"):
        job(f"{RING} a2a+p2p --hierarchical-context-parallel-sizes two 4")


@pytest.mark.parametrize(("tp", "used_gib"), [(2, 62.7), (4, 33.2)])
def test_memory_is_what_the_committed_steps_used(tp: int, used_gib: float) -> None:
    """docs/measurements/index.md: six layers of LLaMA-70B."""
    words = f"{LAYERS} --num-layers 6 --global-batch-size 4 --vocab-size 128 --tensor-model-parallel-size {tp}"
    used = sum(memory_bytes(parse_job(words.split()), tp).values()) / 2**30
    assert used == pytest.approx(used_gib, rel=0.1)


def test_a_distributed_optimizer_shares_its_state() -> None:
    alone, shared = (
        job("--tensor-model-parallel-size 2"),
        job("--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    )
    assert memory_bytes(alone, 8)["optimizer"] == pytest.approx(4 * memory_bytes(shared, 8)["optimizer"])


@pytest.mark.parametrize("words", ["", "--num-experts 8 --moe-ffn-hidden-size 14336 --expert-model-parallel-size 2"])
def test_both_spellings_of_muon_over_replicas_are_one_job(words: str) -> None:
    words = f"{words} --tensor-model-parallel-size 2 --optimizer"
    old, new = job(f"{words} dist_muon"), job(f"{words} muon --use-distributed-optimizer")
    assert predict_step(old, cluster()) == predict_step(new, cluster())
    assert memory_bytes(old, 8) == memory_bytes(new, 8)
    alone = job(f"{words} muon")
    assert predict_step(alone, cluster()).native["optimizer"] > predict_step(old, cluster()).native["optimizer"]
    assert memory_bytes(alone, 8)["optimizer"] > memory_bytes(old, 8)["optimizer"]


def test_muons_matrices_have_one_momentum() -> None:
    words = "--vocab-size 128 --make-vocab-size-divisible-by 1"
    adam, muon = (
        memory_bytes(job(words), 1)["optimizer"],
        memory_bytes(job(f"{words} --optimizer muon"), 1)["optimizer"],
    )
    assert muon == pytest.approx(adam * 8 / 12, rel=1e-3)  # a small vocabulary has both of Adam's


@pytest.mark.parametrize("name", shipped_profiles())
def test_every_profile_of_the_package_predicts(name: str) -> None:
    step = predict_step(job("--tensor-model-parallel-size 8"), Cluster(profile_named(name), 1, 8, None))
    assert step.native_us >= step.ditron_us > 0


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    mine = dataclasses.replace(H200, rates=dataclasses.replace(H200.rates, link_gbps=123.0))
    mine.save(tmp_path / "mine.json")
    assert read_profile(tmp_path / "mine.json") == mine == profile_named(str(tmp_path / "mine.json"))


@pytest.mark.parametrize("content", ["", "{}", '{"format": "ditron_train profile 1", "rates": {"links": 1}}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(SettingError, match="mine.json is no profile"):
        read_profile(tmp_path / "mine.json")


@pytest.mark.parametrize(
    "change",
    [{"num_sms": 0}, {"num_sms": -132}, {"num_sms": True}, {"num_sms": 10**400}, {"target": "sm_10"}, {"device": 5},
     {"memory_gib": float("nan")}, {"memory_gib": 10**400}, {"about": None}, {"made_with": {"torch": 2}},
     {"rates": {"link_gbps": 10**400}}, {"rates": {"gemm_tflops": 1e-320}}],
)  # fmt: skip
def test_a_profile_that_nothing_can_be_estimated_with_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    content = json.loads(H200.to_text())
    rates = {**content["rates"], **change.pop("rates", {})}
    (tmp_path / "mine.json").write_text(json.dumps({**content, **change, "rates": rates}))
    with pytest.raises(SettingError, match="mine.json is no profile"):
        read_profile(tmp_path / "mine.json")


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(SettingError, match="nvidia-h200"):
        profile_named("h2000")
    for name in ("pigeons", "nan", "inf", "-1", "0"):
        with pytest.raises(SettingError, match="ib-400"):
            network_named(name)
    assert network_named("12.5").gpu_gbps == 12.5


def test_the_command_needs_no_megatron(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "megatron", None)  # an import of it raises
    picture = tmp_path / "step.png"
    words = ["predict", "--", "pretrain_gpt.py", *LAYERS.split(), "--tensor-model-parallel-size", "8", "--lr", "1e-4"]
    assert main([*words, "--device", "h200", "--nodes", "2", "--picture", str(picture)]) == 0
    said = capsys.readouterr().out
    for part in ("16 x NVIDIA H200", "GEMMs", "attention", "exchanges", "memory:", "fits", "--ditron tp:", "--lr"):
        assert part in said
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_job_without_a_global_batch_is_estimated_on_any_number_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = LAYERS.replace("--global-batch-size 32 ", "").split()
    assert main(["predict", "--nodes", "2", "--", *words, "--tensor-model-parallel-size", "8"]) == 0
    assert "32 GPUs, as many sequences each" in capsys.readouterr().out


def test_experts_that_are_split_take_their_part_of_memory() -> None:
    words = (
        "--num-experts 8 --moe-ffn-hidden-size 14336 --tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
        "--use-distributed-optimizer --moe-token-dispatcher-type alltoall"
    )
    split = memory_bytes(job(words), 8)
    whole = memory_bytes(job(f"{words} --expert-tensor-parallel-size 1"), 8)
    expert = 3 * 8192 * 14336 * 8  # parameters of one, in all layers
    assert whole["weights"] - split["weights"] == pytest.approx(2 * expert)  # two of each rank, or their halves
    assert whole["optimizer"] == pytest.approx(
        split["optimizer"]
    )  # two ranks share what twice as many parameters need
    with pytest.raises(SettingError, match="EP 8 with experts split over 2 does not divide"):
        predict_step(job(words.replace("size 4", "size 8")), cluster())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_sequence_parallelism_what_is_slower_is_megatrons(ranks: int) -> None:
    words = LAYERS.replace(" --sequence-parallel", "") + f" --tensor-model-parallel-size {ranks}"
    step = predict_step(parse_job(words.replace("8192 ", "4096 ").split()), cluster())
    assert step.speedup >= 1


@pytest.mark.parametrize(
    ("words", "argument", "says"),
    [
        ("--tp-comm-overlap", "--tp-comm-overlap", "userbuffers"),
        ("--multi-latent-attention", "--multi-latent-attention", "whole projections"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp", "whole on each replica"),
        ("--recompute-granularity selective", "--recompute-granularity selective", "counts as none"),
        ("--context-parallel-size 2", "--cp-comm-type p2p", "counts as covered"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "--cp-comm-type a2a+p2p", "the exchanges of heads"),
        (
            "--num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type flex",
            "--moe-token-dispatcher-type flex",
            "--ditron ep leaves this one alone",
        ),
        (
            "--num-experts 8 --tensor-model-parallel-size 2",
            "--expert-tensor-parallel-size 2",
            "each expert counts as on one rank",
        ),
    ],
)
def test_what_is_estimated_otherwise_is_said(
    words: str, argument: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in estimated_otherwise(job(words))[argument]
    assert main(["predict", "--", *LAYERS.split(), *words.split(), "--lr", "1"]) == 0
    said = capsys.readouterr().out
    assert argument in said and "not looked at: --lr\n" in said


def test_of_a_usual_job_nothing_is_estimated_otherwise() -> None:
    assert estimated_otherwise(job("--tensor-model-parallel-size 8 --lr 1e-4")) == {}
    assert "without --bf16 or --fp16" in estimated_otherwise(parse_job(LAYERS.replace("--bf16", "").split()))


def test_the_command_refuses_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--device", "h200", "--", "--num-layers", "8"]) == 2
    assert "the job's arguments lack --hidden-size" in capsys.readouterr().err
