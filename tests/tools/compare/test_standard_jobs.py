"""The standard jobs: each is what it claims to be, and Megatron takes its arguments."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ditron_train.megatron.plugin.arguments import SIZE_ARGUMENTS, parse_features
from ditron_train.tools.compare.launch import with_launcher
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[3]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jobs", ROOT / "scripts" / "jobs.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["jobs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


jobs = _script()


def _values(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Name of each option, with underscores: its value, True where it has none; but for the vocabulary and the
    number of steps, which replace the common ones, no option stands twice."""
    values: dict[str, Any] = {}
    for word in arguments:
        if word.startswith("--"):
            last = word[2:].replace("-", "_")
            assert last not in values or last in ("vocab_size", "train_iters"), f"{word} stands twice"
            values[last] = True
        else:
            assert values[last] is True, f"a second value of {last}"
            values[last] = word if not word.isdigit() else int(word)
    return values


# name: hidden, FFN of a dense layer, heads, width of a head, tokens of a sequence, experts, width of an expert.
SHAPES = {
    "dense-70b": (8192, 28672, 64, 128, 8192, None, None),
    "dense-32b": (5120, 25600, 64, 128, 8192, None, None),
    "dense-8b": (4096, 14336, 32, 128, None, None, None),
    "ulysses-32k": (4096, 14336, 32, 128, 32768, None, None),
    "ulysses-64k": (4096, 14336, 32, 128, 65536, None, None),
    "gathered-32k": (4096, 14336, 32, 128, 32768, None, None),
    "windowed-64k": (4096, 14336, 32, 128, 65536, None, None),
    "moe-128": (7168, None, 56, 128, 4096, 128, 2048),
    "moe-256": (7168, None, 56, 128, 4096, 256, 2048),
    "moe-30b": (2048, 6144, 32, 128, 4096, 128, 768),
}


@pytest.mark.parametrize("name", jobs.job_names())
def test_its_shapes_are_what_it_claims(name: str) -> None:
    job = jobs.read_job(name)
    values = _values(job.arguments)
    model = "-".join(name.split("-")[:2])
    hidden, ffn, heads, width, tokens, experts, expert_width = SHAPES[model]
    assert values["hidden_size"] == hidden and values["num_attention_heads"] == heads
    assert values.get("kv_channels", hidden // heads) == width and values["num_query_groups"] == (
        4 if model == "moe-30b" else 8
    )
    assert ffn is None or values["ffn_hidden_size"] == ffn
    assert values["seq_length"] == values["max_position_embeddings"] and tokens in (None, values["seq_length"])
    assert (values.get("num_experts"), values.get("moe_ffn_hidden_size")) == (experts, expert_width)
    assert ("qk_layernorm" in values) == (model in ("dense-32b", "moe-30b"))
    # The parts of its name are the features, and their groups have ranks.
    features = parse_features(job.ditron)
    assert set(name.split("-")[2:]) - {"interleaved", "graphs", "te", "blockwise", "overlap", "flex"} == set(features)
    assert values.get("cuda_graph_impl") == (
        "transformer_engine" if name.endswith("te") else "local" if "graphs" in name else None
    )
    overlaps = {values.get(option, False) for option in ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")}
    assert overlaps == {name.endswith("overlap")}
    sizes = {feature: values.get(SIZE_ARGUMENTS[feature], 1) for feature in SIZE_ARGUMENTS}
    assert {feature for feature, size in sizes.items() if size > 1} == set(features) - {"muon", "det"}
    assert ("fp8_recipe" in values) == ("fp8_param_gather" in values) == name.endswith("blockwise")
    dispatcher = "flex" if name.endswith("flex") else "alltoall" if "ep" in features else None
    assert values.get("moe_token_dispatcher_type") == dispatcher
    assert ("muon" in features) == (values.get("optimizer") == "dist_muon")
    assert ("det" in features) == ("deterministic_mode" in values) == (job.gpus == 1)
    model_ranks = sizes["tp"] * sizes["sp"] * sizes["pp"]
    assert job.gpus in (1, 2, 4) and job.gpus % model_ranks == 0 and job.gpus % sizes["ep"] == 0
    assert values["num_layers"] % sizes["pp"] == 0
    assert values["global_batch_size"] % (values["micro_batch_size"] * job.gpus // model_ranks) == 0
    assert ("sequence_parallel" in values) == (sizes["tp"] > 1)
    exchange = {"ulysses": "a2a", "gathered": "all_gather", "windowed": "all_gather"}.get(model.split("-")[0])
    assert values.get("cp_comm_type") == exchange and (exchange is not None) == (sizes["sp"] > 1)
    assert values.get("window_size") == ("4096,0" if model.startswith("windowed") else None)
    assert ("num_layers_per_virtual_pipeline_stage" in values) == name.endswith("interleaved")


@pytest.mark.parametrize("name", jobs.job_names())
def test_all_train_as_production_does(name: str) -> None:
    values = _values(jobs.read_job(name).arguments)
    assert "no_gradient_accumulation_fusion" not in values and values["transformer_impl"] == "transformer_engine"
    assert values["bf16"] and values["no_create_attention_mask_in_dataloader"]
    assert values["no_check_for_nan_in_loss_and_grad"] and values["train_iters"] >= 12


def test_a_schedule_on_two_streams_has_several_connections() -> None:
    """Else kernels start in the order of launches, whatever their streams."""
    environments = {name: jobs.read_job(name).environment for name in jobs.job_names()}
    assert environments.pop("moe-128-ep-overlap") == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert not any(environments.values())
    steps = {name: _values(jobs.read_job(name).arguments)["train_iters"] for name in jobs.job_names()}
    assert steps.pop("moe-128-ep-overlap") == 28 and set(steps.values()) == {16}, "the first ten are not timed"
    assert jobs.resized(jobs.read_job("moe-128-ep-overlap"), 4).environment


def test_the_page_lists_each_job_as_it_is() -> None:
    page = (jobs.FOLDER / "README.md").read_text(encoding="utf-8")
    for name in jobs.job_names():
        job = jobs.read_job(name)
        assert f"| `{name}` | `{job.ditron}` | {job.gpus} | {job.about} |" in page
    assert page.count("\n| `") == len(jobs.job_names())


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    job = jobs.read_job("dense-70b-tp")
    command = jobs.command_of(job, script, ["--within", "600"], ["--num-layers", "2"])
    place = command.index("compare")
    assert command[place + 1 : place + 3] == ["--ditron", "tp"] and command[-2:] == ["--num-layers", "2"]
    launched = with_launcher(command[command.index("600") + 1 :])
    assert launched[launched.index(str(script)) - 1] == "ditron_train.megatron.run"
    with pytest.raises(ValueError, match="no standard job 'dense'; there are: dense-32b-tp"):
        jobs.read_job("dense")


def test_simulated_jobs_keep_their_kind() -> None:
    """For bits alone, a job has as few layers and experts as its parallel sizes allow, and is not timed."""
    for name in jobs.job_names():
        job = jobs.read_job(name)
        command = jobs.command_of(job, Path("pretrain_gpt.py"), simulated=True)
        assert "--trace" not in command and command[command.index("--order") + 1] == "AB"
        assert command[command.index("pretrain_gpt.py") - 1] == str(jobs.SHARED) and jobs.SHARED.is_file()
        values, simulated = _values(job.arguments), _values(tuple(jobs.simulated_arguments(job)))
        virtual = 2 if "interleaved" in name else 1
        assert simulated["num_layers"] == values.get("pipeline_model_parallel_size", 1) * virtual
        assert simulated["num_layers"] <= values["num_layers"] and simulated.keys() <= values.keys()
        if "num_experts" in values:
            assert simulated["num_experts"] % (values.get("moe_router_num_groups", 1) * 2) == 0
            assert values["moe_router_topk"] <= simulated["num_experts"] < values["num_experts"]


def _whole_on(num_gpus: int) -> set[str]:
    return {name for name in jobs.job_names() if jobs.read_job(name).gpus <= num_gpus}


def test_what_runs_whole_where() -> None:
    whole = {num: _whole_on(num) for num in (1, 2, 4)}
    assert whole[1] == {"dense-70b-det"} and whole[4] == set(jobs.job_names())
    assert whole[4] - whole[2] == {"dense-70b-tp-pp", "dense-70b-tp-pp-muon", "ulysses-32k-tp-sp"}


PARSES = """
import os, sys, types
import torch
sys.path.insert(0, os.environ["MEGATRON_LM"])
torch.cuda.get_device_capability = lambda *args: (9, 0)
torch.cuda.get_device_properties = lambda *args: types.SimpleNamespace(major=9, minor=0)
from megatron.training import arguments
sys.path.insert(0, "scripts")
import jobs

for name, simulated in ((name, simulated) for name in jobs.job_names() for simulated in (True, False)):
    job = jobs.read_job(name)
    os.environ.update(WORLD_SIZE=str(job.gpus), RANK="0")
    sys.argv = ["pretrain_gpt.py", *job.arguments, *(jobs.simulated_arguments(job) if simulated else ())]
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.apply_rope_fusion = args.moe_permute_fusion = False  # where Transformer Engine is not installed
    config = arguments.core_transformer_config_from_args(args)
    seen = config.gradient_accumulation_fusion, config.num_moe_experts, config.cp_comm_type
    print("SIMULATED" if simulated else "TAKEN", name, *seen)
"""


@pytest.mark.skipif(not os.environ.get("MEGATRON_LM"), reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_megatron_takes_the_arguments() -> None:
    path = os.pathsep.join([str(ROOT), os.environ["MEGATRON_LM"], os.environ.get("PYTHONPATH", "")])
    env = dict(os.environ, PYTHONPATH=path, CUDA_DEVICE_MAX_CONNECTIONS="1")
    command = [sys.executable, "-W", "ignore", "-c", PARSES]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in jobs.job_names():
        experts = name.split("-")[1] if name.startswith("moe") else None
        kind = "a2a" if name.startswith("ulysses") else "p2p"
        assert f"TAKEN {name} True {experts} {kind}" in done.stdout
        assert f"SIMULATED {name} True {experts and jobs.SIMULATED_EXPERTS} {kind}" in done.stdout


def test_jobs_run_in_sequence_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Each takes 100 s, and what one ends with keeps no other from running."""
    now, ran = [0.0], []
    monkeypatch.setattr(jobs.time, "monotonic", lambda: now[0])
    several = [jobs.read_job(name) for name in ("dense-32b-tp", "dense-70b-tp", "moe-128-ep")]

    def run(job: Any, status: int = 0) -> int:
        now[0] += 100.0
        ran.append(job.name)
        return status

    assert jobs.run_in_sequence(several, run, None) == 0 and ran == [job.name for job in several]
    assert (
        jobs.run_in_sequence(several, lambda job: run(job, 1 if "32b" in job.name else 0), 300.0) == 1
        and len(ran) == 6
    )
    logged = capsys.readouterr().out.splitlines()
    assert logged[0].split() == ["dense-32b-tp", "equal,", "100", "s"] and logged[3].endswith("status 1, 100 s")
    assert jobs.run_in_sequence(several, run, 250.0) == 1 and len(ran) == 8
    assert "moe-128-ep                 not begun, no time is left" in capsys.readouterr().out
    assert jobs.run_in_sequence(several[:1], run, 1.0) == 0 and not capsys.readouterr().out


@pytest.mark.parametrize(
    "name, grown",
    [
        ("dense-70b-tp", {"tensor_model_parallel_size": 4}),
        ("ulysses-32k-sp", {"context_parallel_size": 4}),
        ("dense-8b-pp-interleaved", {"pipeline_model_parallel_size": 4, "num_layers": 16}),
        ("moe-128-ep", {"expert_model_parallel_size": 4, "global_batch_size": 32}),
        ("moe-128-tp-ep", {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4}),
        ("dense-8b-muon", {"global_batch_size": 32}),
    ],
)
def test_jobs_on_more_gpus(name: str, grown: dict[str, int]) -> None:
    job = jobs.read_job(name)
    larger = jobs.resized(job, 4)
    before, after = _values(job.arguments), _values(larger.arguments)
    assert larger.gpus == 4 and {key: after[key] for key in after if after[key] != before[key]} == grown
    assert jobs.resized(job, job.gpus) is job
    assert jobs.command_of(larger, Path("pretrain_gpt.py"))[-len(larger.arguments) - 2] == "4"


def test_jobs_that_could_grow_in_several_ways_do_not() -> None:
    with pytest.raises(ValueError, match="dense-70b-tp-pp divides its 4 ranks in several ways"):
        jobs.resized(jobs.read_job("dense-70b-tp-pp"), 8)


def test_jobs_of_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def main(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["jobs.py", *words])
        assert jobs.main() == 0
        return capsys.readouterr().out.splitlines()

    assert len(main("dense-70b-tp", "moe-128-ep", "--show")) == 2
    assert len(main("--all", "2", "--show")) == len(_whole_on(2))
    assert "--nproc-per-node 4 " in main("moe-128-ep", "--gpus", "4", "--show")[0]
    for words in ([], ["dense-70b-tp", "--all", "2"], ["dense"]):
        with pytest.raises(SystemExit):
            main(*words)
    assert "no standard job 'dense'; there are" in capsys.readouterr().err


def test_no_job_is_no_comparison(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["jobs.py", "--all", "0"])
    with pytest.raises(SystemExit) as stopped:
        jobs.main()
    assert stopped.value.code == 2
    assert "nothing was compared: no standard job runs whole on 0 GPUs" in capsys.readouterr().err
