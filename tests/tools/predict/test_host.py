"""Where the device waits for the host: what a microbatch of parts shows, and a step of jobs whose layers are short."""

from __future__ import annotations

import dataclasses

import pytest

from ditron_train.runtime.profiles import profile_named
from ditron_train.tools.predict.cluster import Cluster
from ditron_train.tools.predict.host import Launched, idle_us
from ditron_train.tools.predict.megatron_arguments import parse_job
from ditron_train.tools.predict.otherwise import estimated_otherwise
from ditron_train.tools.predict.predictor import useful_features
from ditron_train.tools.predict.step import predict_step

H200 = profile_named("h200")
TWO = Cluster(H200, 1, 2)
SHORT = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 2048 "
    "--global-batch-size 4 --swiglu --sequence-parallel --bf16 --tensor-model-parallel-size 2"
)
EXPERTS = (
    "--num-layers 1 --hidden-size 7168 --num-attention-heads 56 --seq-length 4096 --global-batch-size 8 "
    "--swiglu --bf16 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall"
)


def host_ms(words: str, cluster: Cluster = TWO) -> tuple[float, float]:
    step = predict_step(parse_job(words.split()), cluster)
    return step.native["host"] / 1e3, step.ditron["host"] / 1e3


@pytest.mark.parametrize(
    ("parts", "idle"),
    [
        ([Launched(5, 0), Launched(2, 10), Launched(2, 10)], 5),  # late at the beginning alone
        ([Launched(10, 4), Launched(10, 4)], 12),  # late all the time
        ([Launched(1, 20), Launched(10, 4)], 0),  # ahead by what is queued
        ([Launched(1, 20), Launched(10, 4, waits=True)], 6),  # not ahead: it had to wait
        ([Launched(10, 4), Launched(1, 20)], 6),  # what it was late by is not caught up with
    ],
)
def test_how_long_the_device_waits(parts: list[Launched], idle: float) -> None:
    assert idle_us(parts) == pytest.approx(idle)


def test_a_job_of_long_layers_waits_where_a_microbatch_begins_alone() -> None:
    native, _ = host_ms(SHORT.replace("2048", "32768"))
    rates = H200.rates
    assert native == pytest.approx((rates.host_step_us + 4 * rates.host_microbatch_us) / 1e3, rel=0.05)


def test_graphs_and_fused_layers_take_the_host_less_time() -> None:
    eager, attention, whole = (
        host_ms(f"{SHORT} {words}")
        for words in ("", "--cuda-graph-impl transformer_engine --cuda-graph-scope attn", "--cuda-graph-impl local")
    )
    assert eager[0] > attention[0] > whole[0] and eager[1] > attention[1] > whole[1]
    assert eager[0] > eager[1] + 10 and whole[0] < whole[1]  # in graphs the exchanges that native waits for cover it


def test_each_expert_is_a_launch_that_the_host_takes_its_time_for() -> None:
    many, few = host_ms(EXPERTS), host_ms(EXPERTS.replace("experts 256", "experts 32"))
    assert many[0] > 100 > few[0] and many[0] > many[1]
    slower = dataclasses.replace(H200, rates=dataclasses.replace(H200.rates, host_grouped_us=100.0))
    assert host_ms(EXPERTS, Cluster(slower, 1, 2))[0] > many[0] + 60
    assert useful_features(parse_job(EXPERTS.split()), TWO)["ep"] > 1.05


def test_recomputed_layers_are_launched_twice() -> None:
    assert host_ms(f"{SHORT} --recompute-granularity full")[0] > host_ms(SHORT)[0] + 10


def test_graphs_that_are_not_known_are_said() -> None:
    words = "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router"
    assert list(estimated_otherwise(parse_job(f"{SHORT} {words}".split()))) == ["--cuda-graph-scope moe_router"]


def test_layers_beyond_those_that_are_gone_through_count_like_them() -> None:
    few, many = (host_ms(SHORT.replace("layers 8", f"layers {number}"))[0] for number in (256, 1024))
    assert many == pytest.approx(4 * few, rel=0.02)
