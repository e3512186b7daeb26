"""The doctor's judgement of machines that are described, and of this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ditron_train.tools.doctor.examination import Report, examine
from ditron_train.tools.doctor.facts import Facts, Gpu, collect_facts, parse_topology, read_nccl_files

GOOD_VERSIONS = {
    "python": "3.12.3",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "numpy": "2.3.5",
    "megatron-core": "0.16.1",
    "nvshmem4py": "0.4.1",
    "nvidia-nvshmem": "3.4.5",
    "transformer-engine": "2.10.0",
}
H200 = Gpu("NVIDIA H200", 140 << 30, (9, 0), 132)
TOPOLOGY = """
\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0
GPU2\tSYS\tNV18\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def machine(**changes: object) -> Facts:
    """Two well-connected H200s."""
    values = dict(
        versions=GOOD_VERSIONS,
        gpus=(H200, H200),
        driver="580.1",
        nccl="2.28.9",
        peer_access=((True, True), (True, True)),
        links={"0-1": "NV18"},
        multicast=False,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        shared_memory=(64 << 30, 60 << 30, True),
        compiler="/usr/bin/gcc",
        has_cuda_bindings=True,
        nvshmem_library="/lib/libnvshmem_host.so.3",
        interfaces=("eth0", "ib0"),
        infiniband=("mlx5_0",),
    )
    return Facts(**{**values, **changes})


def findings(report: Report, level: str) -> list[tuple[str, str]]:
    return [(finding.topic, finding.text) for finding in report.findings if finding.level == level]


def state(report: Report, name: str) -> tuple[str, str]:
    feature = next(feature for feature in report.features if feature.name == name)
    return feature.state, feature.why


def test_good_machine() -> None:
    report = examine(machine())
    assert report.healthy
    assert findings(report, "error") == findings(report, "warning") == []
    assert state(report, "tp")[0] == "fused"


@pytest.mark.parametrize(
    ("changes", "topic", "words"),
    [
        ({"versions": {**GOOD_VERSIONS, "triton": "3.5.1"}}, "versions", "triton 3.5.1"),
        ({"versions": {**GOOD_VERSIONS, "torch": "2.15.0+cu132"}}, "versions", "a mix that no index gives"),
        ({"versions": {**GOOD_VERSIONS, "triton": None}}, "versions", "triton is not installed"),
        ({"peer_access": ((True, False), (False, True))}, "peer access", "0-1"),
        ({"libraries": {"nccl": ("/a/libnccl.so.2", "/b/libnccl.so.2")}}, "copies", "/b/libnccl.so.2"),
        ({"shared_memory": None}, "shared memory", "/dev/shm"),
        ({"shared_memory": (1 << 30, 1 << 30, False)}, "shared memory", "not writable"),
        ({"compiler": None}, "tools", "no C compiler"),
        ({"gpus": (Gpu("NVIDIA V100", 32 << 30, (7, 0), 80),)}, "GPUs", "compute capability 7.0"),
    ],
)
def test_errors_make_it_unhealthy_and_have_a_fix(changes: dict, topic: str, words: str) -> None:
    report = examine(machine(**changes))
    assert not report.healthy
    (finding,) = [finding for finding in report.findings if finding.level == "error"]
    assert finding.topic == topic and words in finding.text and finding.fix


@pytest.mark.parametrize(
    ("changes", "topic", "words"),
    [
        ({"versions": {**GOOD_VERSIONS, "triton": "3.10.0"}}, "versions", "other than what was tried"),
        ({"links": {"0-1": "SYS"}}, "links", "1 pairs SYS"),
        ({"environment": {"NCCL_ALGO": "Tree"}}, "NCCL", "NCCL_ALGO=Tree"),
        ({"environment": {"NCCL_ALGO": "allreduce:ring;reducescatter:ring,nvls"}}, "NCCL", "another order"),
        ({"environment": {"NCCL_ALGO": "^Ring"}}, "NCCL", "another order"),
        ({"environment": {"NCCL_ALGO": "allreduce:^tree;reducescatter:ring,nvls"}}, "NCCL", "another order"),
        ({"environment": {"NCCL_COLLNET_ENABLE": "1"}}, "NCCL", "COLLNET"),
        ({"multicast": True}, "NCCL", "NVLS"),
        ({"nccl_files": {"NCCL_ALGO": "Tree"}}, "NCCL", "NCCL_ALGO=Tree"),
        ({"environment": {"NCCL_GRAPH_FILE": "/x"}}, "NCCL", "NCCL_GRAPH_FILE"),
        ({"environment": {"NCCL_ALGO": "Ring", "DITRON_TIMOUT_S": "5"}}, "settings", "nothing reads DITRON_TIMOUT_S"),
        ({"nvshmem_library": None}, "NVSHMEM", "libnvshmem_host"),
        ({"environment": {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eth7"}}, "NVSHMEM", "no such interface"),
        ({"shared_memory": (64 << 20, 64 << 20, True)}, "shared memory", "64 MiB"),
        ({"has_cuda_bindings": False}, "tools", "cuda-bindings"),
        ({"distributions": {"nvidia-nccl": ("/a (nvidia-nccl-cu12 2)", "/a (nvidia-nccl-cu13 2)")}}, "copies", "cu12"),
        ({"gpus": (H200, Gpu("NVIDIA A100", 80 << 30, (8, 0), 108))}, "GPUs", "different GPUs"),
    ],
)
def test_warnings_leave_it_healthy_and_have_a_fix(changes: dict, topic: str, words: str) -> None:
    report = examine(machine(**changes))
    assert report.healthy
    (finding,) = [finding for finding in report.findings if finding.level == "warning"]
    assert finding.topic == topic and words in finding.text and finding.fix


def test_ring_silences_the_switch() -> None:
    for setting in ({"NCCL_ALGO": "Ring"}, {"NCCL_NVLS_ENABLE": "0"}):
        assert findings(examine(machine(multicast=True, environment=setting)), "warning") == []


@pytest.mark.parametrize("algorithms", ["allreduce:tree,nvls;reducescatter:ring", "ring", "^nvls"])
def test_settings_under_which_reduce_scatters_add_along_rings(algorithms: str) -> None:
    assert findings(examine(machine(multicast=True, environment={"NCCL_ALGO": algorithms})), "warning") == []


def test_what_is_said_of_all_reduces_alone_says_nothing_of_reduce_scatters() -> None:
    environment = {"NCCL_ALGO": "allreduce:tree"}
    assert findings(examine(machine(environment=environment)), "warning") == []
    ((_, text),) = findings(examine(machine(multicast=True, environment=environment)), "warning")
    assert "NVLS" in text


def test_eight_gpus_in_islands() -> None:
    def report(*islands: tuple[int, ...]) -> Report:
        reach = tuple(
            tuple(any({i, j} <= set(island) for island in islands) or i == j for j in range(8)) for i in range(8)
        )
        return examine(machine(gpus=(H200,) * 8, peer_access=reach))

    assert state(report(tuple(range(8))), "tp")[1].startswith("8 GPUs, where")
    two = report((0, 1, 2, 3), (4, 5, 6, 7))
    assert two.healthy and (
        "peer access",
        "GPUs reach each other's memory in islands only: 0, 1, 2, 3 and 4, 5, 6, 7",
    ) in findings(two, "warning")
    assert (
        state(two, "ep") == ("fused", state(two, "ep")[1])
        and "groups inside GPUs 0, 1, 2, 3 and 4, 5, 6, 7" in state(two, "ep")[1]
    )
    assert (
        "groups inside GPUs 0, 1, 2, 3, 4, 5, 6," in state(report(tuple(range(7))), "tp")[1]
    )  # the eighth reaches none
    ring = report(*((i, (i + 1) % 8) for i in range(8)))  # each reaches its neighbours: no set of more than two
    assert not ring.healthy and state(ring, "tp")[0] == "native"


def test_bootstrap_of_nvshmem() -> None:
    def logged(**changes: object) -> str:
        return " ".join(finding.text for finding in examine(machine(**changes)).findings if finding.topic == "NVSHMEM")

    assert "by unique id over eth0, ib0" in logged()
    assert "by unique id over ib0" in logged(environment={"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "ib0"})
    assert "by unique id over eth0 " in logged(environment={"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "^docker,ib"}) + " "
    assert "by unique id over eth0, ib0" in logged(environment={"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "^=eth,ib"})
    assert "no such interface" in logged(environment={"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "=eth"})
    assert "no such interface" in logged(environment={"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "^eth,ib"})
    assert "NVSHMEM_BOOTSTRAP=MPI is not used" in logged(environment={"NVSHMEM_BOOTSTRAP": "MPI"})
    assert "one node only" in logged(interfaces=()) and "no InfiniBand" in logged(infiniband=())


def test_nccl_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("NCCL_ALGO=Tree\n# NCCL_PROTO=LL\nOTHER=1\nNCCL_DEBUG=INFO # loud\n")
    (tmp_path / "b").write_text("NCCL_ALGO = Ring\n")
    assert read_nccl_files(str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "c")) == {
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG": "INFO",
    }


def test_malformed_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITRON_TIMEOUT_S", "soon")
    assert [topic for topic, _ in findings(examine(machine()), "error")] == ["settings"]


@pytest.mark.parametrize("name", ["DITRON_PLAN", "DITRON_TUNING"])
def test_files_that_no_job_could_read(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    monkeypatch.setenv(name, str(bad))
    ((topic, text),) = findings(examine(machine()), "error")
    assert topic == "settings" and "bad.json" in text


def test_features_say_what_becomes_of_groups_over_nodes() -> None:
    with_all = examine(machine())
    versions = {**GOOD_VERSIONS, "nvshmem4py": None, "transformer-engine": None}
    without = examine(machine(versions=versions, environment={"DITRON_EP_RAILS": "off"}))
    for name, words, words_without in (
        ("tp", "or through NVSHMEM", "gathers along rails where quicker"),
        ("sp", "exchanges along rails", "local attention, as Transformer Engine"),
        ("ep", "along rails where quicker", "native between nodes (DITRON_EP_RAILS=off)"),
        ("pp", "NCCL or, by DITRON_PP_PATH, NVSHMEM", "between nodes through NCCL"),
        ("muon", "every GPU", "every GPU"),
    ):
        assert state(with_all, name)[0] == state(without, name)[0] == "fused"
        assert words in state(with_all, name)[1] and words_without in state(without, name)[1]


def test_features_say_why_they_stay_native() -> None:
    assert state(examine(machine(gpus=(H200,), peer_access=((True,),))), "tp")[0] == "native"
    blocked = examine(machine(peer_access=((True, False), (False, True))))
    assert "reach" in state(blocked, "tp")[1]
    assert "megatron-core" in state(examine(machine(versions={**GOOD_VERSIONS, "megatron-core": None})), "tp")[1]


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}, "torch_cuda": "13.0"}, "warning", "hides them"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "error", "is a build without CUDA"),
        ({"torch_cuda": "13.0"}, "error", "built for CUDA 13.0) cannot use them"),
    ],
)
def test_gpus_that_torch_does_not_see(changes: dict, level: str, words: str) -> None:
    report = examine(machine(gpus=(), **changes))
    (finding,) = [finding for finding in report.findings if finding.topic == "GPUs"]
    assert finding.level == level and words in finding.text and finding.fix
    assert report.healthy == (level == "warning")


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert collect_facts().compiler is None


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = dict(gpus=(), driver=None, nccl=None, peer_access=(), links={}, multicast=None)
    report = examine(machine(**bare, environment={"TRITON_INTERPRET": "1"}))
    assert report.healthy and state(report, "tp")[0] == "interpreted"
    assert state(examine(machine(**bare, environment={})), "tp")[0] == "native"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    report = examine(machine(**bare, environment={}, versions={**GOOD_VERSIONS, "numpy": "2.4.6"}))
    (finding,) = [finding for finding in report.findings if finding.level == "warning"]
    assert (
        "numpy 2.4.6 is too new for Triton's interpreter" in finding.text
        and finding.fix == "pip install 'numpy>=1.26,<2.4'"
    )


def test_topology_is_parsed() -> None:
    assert parse_topology(TOPOLOGY) == {"0-1": "NV18", "0-2": "SYS", "1-2": "NV18"}
    assert parse_topology("no such thing") == {}


def test_this_machine_as_text_and_json() -> None:
    report = examine(collect_facts())
    values = json.loads(report.to_json())
    assert values["healthy"] is report.healthy
    assert values["facts"]["versions"]["triton"] == report.facts.versions["triton"]
    text = report.to_text()
    for finding in report.findings:
        assert finding.text.split()[0] in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "healthy"),
        ({"gpus": (H200,), "peer_access": ((True,),), "links": {},
          "versions": {**GOOD_VERSIONS, "megatron-core": None}},
         "healthy, but no feature can run here"),
        ({"gpus": (), "driver": None, "environment": {}}, "healthy, but no feature can run here"),
        ({"gpus": (), "driver": None, "environment": {"TRITON_INTERPRET": "1"}}, "healthy, to try the features"),
        ({"compiler": None}, "not healthy: see the errors above"),
    ],
)  # fmt: skip
def test_the_verdict_says_what_it_means(changes: dict, words: str) -> None:
    """A machine on which all features stay native works, and trains no faster than without them."""
    report = examine(machine(**changes))
    assert report.verdict.startswith(words) and (words == "healthy") == (report.verdict == "healthy")
    assert json.loads(report.to_json())["verdict"] == report.verdict
    assert report.to_text().endswith(report.verdict)
