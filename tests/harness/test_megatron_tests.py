"""The table of Megatron-LM's tests, on small folders of tests that stand for them."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import json
import string
import textwrap
import time
import types
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

import ditron_train
from ditron_train.megatron.plugin import fused_calls
from ditron_train.runtime.errors import SettingError
from ditron_train.tools.nothing_compared import NothingComparedError
from megatron_tests import campaign, launches, plugin
from megatron_tests.launches import NATIVE, Launcher
from megatron_tests.records import Notes, Suite, read_suite, stop_mark
from megatron_tests.suites import SUITES, fit_expert_sizes, fit_parallelism, fit_sizes, paths_of, suites_of
from megatron_tests.table import NOTHING_ASKED, row_of

_CONFTEST = """
import os

from tests.test_utils.python_scripts.download_unit_tests_dataset import download_and_extract_asset

try:
    download_and_extract_asset("/opt/data")
    fetched = True
except RuntimeError:
    fetched = False
"""
_TESTS = """
import os

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

IS_FUSED = "DITRON_POLICY" in os.environ


@pytest.fixture(autouse=True)
def groups():
    if not dist.is_initialized():
        dist.init_process_group("nccl")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(4, 2, expert_model_parallel_size=4)
    yield


def test_sizes():
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2, expert_model_parallel_size=4, num_moe_experts=4, pipeline_dtype=torch.float32,
        add_bias_linear=False,
    )
    assert dist.get_world_size() == 2
    made = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    assert made == (config.tensor_model_parallel_size, config.pipeline_model_parallel_size)
    assert made[0] * made[1] == 2
    assert config.expert_model_parallel_size == parallel_state.get_expert_model_parallel_world_size()


def test_muon():
    from megatron.core.optimizer.muon import TensorParallelMuon

    matrix = torch.nn.Parameter(torch.eye(4))
    matrix.grad = torch.ones(4, 4)
    optimizer = TensorParallelMuon([matrix])
    optimizer.step()
    assert type(optimizer).__module__.startswith("ditron_train") == IS_FUSED


def test_fails_everywhere():
    assert False


@pytest.mark.skip(reason="not here")
def test_skipped():
    pass


def test_dies_with_fused():
    if IS_FUSED and dist.get_rank() == 1:
        os._exit(3)


@pytest.mark.parametrize("case", ["a/b", "c d"])
def test_behind_it(case):
    assert torch.ones(1).cuda().device.type == "cpu"

"""


@pytest.fixture
def checkout(tmp_path):
    """What stands for a checkout of Megatron-LM: its tests are these."""
    folder = tmp_path / "checkout"
    files = {
        "tests/__init__.py": "",
        "tests/unit_tests/__init__.py": "",
        "tests/unit_tests/conftest.py": _CONFTEST,
        "tests/unit_tests/distributed/test_these.py": _TESTS,
        "tests/unit_tests/distributed/test_cannot_be_imported.py": "import no_such_module",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-x"\n',
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def _names(tests):
    return [test.split("::")[1] for test in tests]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.timeout(580)
def test_what_passes_natively_and_not_with_fused_is_in_the_table(checkout, tmp_path):
    """Real launches, of which one crashes; interrupted in between."""

    def launcher(seconds=500.0, most=8):
        deadline = time.monotonic() + seconds
        return Launcher(checkout, tmp_path / "records", 2, "muon", 120.0, deadline, most_launches=most)

    paths = paths_of(checkout, "distributed")
    native = launcher().run(NATIVE, "distributed", paths)
    assert _names(native.with_outcome("failed")) == ["test_fails_everywhere"], native.why
    assert _names(native.with_outcome("skipped")) == ["test_skipped"]
    passed = native.with_outcome("passed")
    assert len(passed) == 5 and not native.open and native.launches == 1 and not any(native.ran.values())

    first = launcher(most=1).run("bits", "distributed", paths, passed)  # as if the time were over
    assert (
        first.outcomes
        and first.open
        and row_of("bits", 2, {"distributed": (native, first)}).not_run == len(first.open)
    )
    assert launcher(seconds=0).run("bits", "distributed", paths, passed).outcomes == first.outcomes
    fused = launcher().run("bits", "distributed", paths, passed)
    row = row_of("bits", 2, {"distributed": (native, fused)})
    assert {test.split("::")[1]: outcome for test, outcome in row.lost.items()} == {"test_dies_with_fused": "crashed"}
    assert (row.native_passed, row.ours_passed, row.not_run) == (5, 4, 0)
    assert (row.ours_ran, row.calls) == (1, {"muon": 1})
    ((file, why),) = row.uncollected.items()
    assert file.endswith("test_cannot_be_imported.py") and "No module named 'no_such_module'" in why
    assert launcher().run("bits", "distributed", paths, passed).launches == fused.launches, "nothing was left to run"


class _Scripted(Launcher):
    """A launcher whose launches are written down beforehand: what ends each test that is not skipped."""

    script: ClassVar[list[dict[str, str]]]

    def _launch(self, mode, folder, number, paths, skip, only):
        tests = [test for test in ("a", "b", "c", "d") if test not in skip and (only is None or test in only)]
        notes = Notes(folder, 0, number)
        notes.write(collected=tests)
        for test in tests:
            outcome = self.script[number].get(test, "passed")
            notes.write(test=test)
            if outcome == "crashed":
                break
            notes.write(test=test, outcome=outcome)
            if outcome == "hung":
                break
        return read_suite(folder)


def test_what_fails_beside_others_is_run_again_without_them(tmp_path, monkeypatch):
    script = [{"a": "failed", "b": "hung"}, {"c": "crashed"}, {}, {"a": "passed", "b": "hung"}, {"c": "failed"}, None]
    monkeypatch.setattr(_Scripted, "script", script, raising=False)
    launcher = _Scripted(tmp_path, tmp_path, 1, "tp", 1.0, time.monotonic() + 1000)
    fused = launcher.run("strict", "moe", [], ["a", "b", "c", "d"])
    assert fused.outcomes == {"a": "passed", "b": "hung", "c": "failed", "d": "passed"}
    assert fused.again == {"a"} and fused.launches == 5
    assert launcher.run("strict", "moe", [], ["a", "b", "c", "d"]).launches == 5
    native = Suite(["a", "b", "c", "d"], dict.fromkeys("abcd", "passed"))
    row = row_of("strict", 1, {"moe_m": (native, fused)})
    assert row.passed_again == ["a"] and row.lost == {"b": "hung", "c": "failed"}


def test_what_is_lost_is_run_natively_again(tmp_path, monkeypatch):
    """``a`` fails the second time without the fused path: it is unsteady. ``b`` passes each time: it is lost."""
    native_script = [{}, {}, {"a": "failed"}, {}, {}]
    monkeypatch.setattr(_Scripted, "script", native_script, raising=False)
    launcher = _Scripted(tmp_path, tmp_path, 1, "tp", 1.0, time.monotonic() + 1000)
    launcher.run(NATIVE, "moe", [])
    monkeypatch.setattr(_Scripted, "script", [{"a": "failed", "b": "failed"}] * 2)
    fused = launcher.run("bits", "moe", [], ["a", "b", "c", "d"])
    monkeypatch.setattr(_Scripted, "script", native_script)
    native = launcher.repeat_natively("moe", [], ["a", "b"], times=3, at_once=1)
    assert native.launches == 4 and native.unsteady == {"a"}
    row = row_of("bits", 1, {"moe": (native, fused)})
    assert row.lost == {"b": "failed"} and row.unsteady == ["a"] and row.native_passed == 3
    assert launcher.repeat_natively("moe", [], ["a", "b"], times=3, at_once=1).launches == 4, "they were run again"


def test_what_is_lost_is_run_natively_beside_itself(tmp_path, monkeypatch):
    """``a`` fails in one of three launches at once, and passes in the last one: it is unsteady all the same."""
    monkeypatch.setattr(_Scripted, "script", [{}], raising=False)
    launcher = _Scripted(tmp_path, tmp_path, 1, "tp", 1.0, time.monotonic() + 1000)
    launcher.run(NATIVE, "moe", [])
    monkeypatch.setattr(_Scripted, "script", [{"a": "failed", "b": "failed"}] * 2)
    fused = launcher.run("bits", "moe", [], ["a", "b", "c", "d"])
    monkeypatch.setattr(_Scripted, "script", [{}, {}, {"a": "failed"}, {}, *[{}] * 3])
    native = launcher.repeat_natively("moe", [], ["a", "b"], times=6, at_once=3)
    assert native.launches == 7 and native.unsteady == {"a"} and native.latest == {"b"}
    assert native.outcomes["a"] == "passed"
    row = row_of("bits", 1, {"moe": (native, fused)})
    assert row.lost == {"b": "failed"} and row.unsteady == ["a"] and (row.native_passed, row.ours_passed) == (3, 2)


def test_launches_that_die_beside_others_are_asked_for_again(tmp_path, monkeypatch):
    """Of three at once the first leaves no notes: nothing is marked as repeated, and all are run once more."""
    monkeypatch.setattr(_Scripted, "script", [{}] * 9, raising=False)
    launcher = _Scripted(tmp_path, tmp_path, 1, "tp", 1.0, time.monotonic() + 1000)
    launcher.run(NATIVE, "moe", [])
    launch = _Scripted._launch
    with monkeypatch.context() as patched:
        patched.setattr(
            _Scripted, "_launch", lambda self, mode, folder, n, *r: n == 1 or launch(self, mode, folder, n, *r)
        )
        assert launcher.repeat_natively("moe", [], ["b"], times=3, at_once=3).runs["b"] == 3
    assert launcher.repeat_natively("moe", [], ["b"], times=3, at_once=3).runs["b"] == 6
    assert launcher.repeat_natively("moe", [], ["b"], times=3, at_once=3).runs["b"] == 6


@pytest.mark.parametrize(
    "why, is_unsteady", [("AssertionError: value mismatch", True), ("CUDA out of memory.", False)]
)
def test_full_memory_beside_others_excuses_no_loss(tmp_path, why, is_unsteady):
    for launch, outcome in enumerate(("passed", "failed")):
        notes = Notes(tmp_path, 0, launch)
        notes.write(collected=["a"])
        notes.write(test="a", outcome=outcome, why=why if launch else "")
    suite = read_suite(tmp_path)
    assert (suite.unsteady == {"a"}) == is_unsteady and (suite.outcomes["a"] == "failed") == is_unsteady


def test_an_unsteady_test_counts_nowhere(tmp_path):
    """Older records may hold it in another suite, where it passed."""
    unsteady = Suite(["a", "b"], {"a": "passed", "b": "passed"}, unsteady={"a"})
    older = Suite(["a"], {"a": "passed"})
    for policy, outcome in (("strict", "passed"), ("bits", "failed")):
        fused = Suite(["a", "b"], {"a": outcome, "b": "passed"})
        row = row_of(policy, 2, {"moe_a_1": (unsteady, fused), "moe_a_2": (older, Suite(["a"], {"a": outcome}))})
        assert (row.native_passed, row.ours_passed, row.lost) == (1, 1, {}), policy


def test_what_could_not_be_run_natively_again_is_asked_for_again(tmp_path, monkeypatch):
    """A launch that leaves no notes, and one that is cut off in the first of two tests; then all three."""
    monkeypatch.setattr(_Scripted, "script", [{}], raising=False)
    launcher = _Scripted(tmp_path, tmp_path, 1, "tp", 1.0, time.monotonic() + 1000)
    launcher.run(NATIVE, "moe", [])
    with monkeypatch.context() as patched:
        patched.setattr(_Scripted, "_launch", lambda self, mode, folder, number, *others: read_suite(folder))
        assert launcher.repeat_natively("moe", [], ["a", "b"], times=3, at_once=1).launches == 1
    monkeypatch.setattr(_Scripted, "script", [{}, {"a": "hung"}, {}, {}, {}])
    cut = launcher.repeat_natively("moe", [], ["a", "b"], times=3, at_once=1)
    assert cut.launches == 2 and not cut.unsteady and cut.outcomes["a"] == "passed", "a hung test is slow, no more"
    assert launcher.repeat_natively("moe", [], ["b"], times=3, at_once=1).launches == 5
    assert launcher.repeat_natively("moe", [], ["b"], times=3, at_once=1).launches == 5


def test_a_launch_that_gets_nowhere_is_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(_Scripted, "_launch", lambda self, mode, folder, number, *others: read_suite(folder))
    known = _Scripted(tmp_path, tmp_path, 1, "tp", 1.0, time.monotonic() + 1000).run("strict", "moe", [], ["a"])
    assert not known.outcomes


def test_a_test_that_hangs_ends_its_launch(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(plugin.os, "_exit", ended.append)
    monkeypatch.setattr(plugin.faulthandler, "dump_traceback", lambda file: None)
    rank = plugin._Rank(plugin.Job(str(tmp_path), 0, "", test_seconds=0.05))
    with rank._limit("quick"):
        pass
    with rank._limit("slow"):
        time.sleep(0.5)
    assert ended == [1]
    lines = [json.loads(line) for line in (tmp_path / "0.0.jsonl").read_text().splitlines()]
    assert lines == [{"test": "slow", "outcome": "hung", "why": "not done after 0.05 s"}]


def _note(folder, launch, lines, ran={"tp": 1}):  # noqa: B006
    for rank, own in enumerate(lines):
        notes = Notes(folder, rank, launch)
        notes.write(collected=["a", "b", "c"])
        for test, outcome in own:
            notes.write(test=test)
            if outcome:
                notes.write(test=test, outcome=outcome, ran=ran, why="")


def test_a_crash_is_that_of_the_first_test_that_some_rank_did_not_end(tmp_path):
    _note(tmp_path, 0, [[("a", "passed"), ("b", None)], [("a", "passed"), ("b", "passed"), ("c", None)]])
    suite = read_suite(tmp_path)
    assert suite.outcomes == {"a": "passed", "b": "crashed"} and suite.open == ["c"]
    _note(tmp_path, 1, [[("c", "passed")], [("c", "failed")]])
    suite = read_suite(tmp_path)
    assert suite.outcomes["c"] == "failed" and suite.latest == {"c"} and not suite.again
    _note(tmp_path, 2, [[("b", "passed")], [("b", "passed")]])
    suite = read_suite(tmp_path)
    assert suite.outcomes["b"] == "passed" and suite.again == {"b"} and suite.launches == 3


def test_what_ran_when_a_launch_was_stopped_is_not_to_blame(tmp_path):
    _note(tmp_path, 0, [[("a", "passed"), ("b", None)], [("a", "passed")]])
    stop_mark(tmp_path, 0).touch()
    suite = read_suite(tmp_path)
    assert suite.outcomes == {"a": "passed"} and suite.open == ["b", "c"]


def test_a_line_that_was_cut_is_left_out(tmp_path):
    _note(tmp_path, 0, [[("a", "passed")]])
    with (tmp_path / "0.0.jsonl").open("a") as file:
        file.write('{"test": "b", "outc')
    assert read_suite(tmp_path).outcomes == {"a": "passed"}


def test_reasons_for_native_are_counted_without_their_numbers():
    tests = dict.fromkeys("abc", "passed")
    lines = {
        "a": ["tp: native, at (8, 2) x 64 slower", "sp: native, mask"],
        "b": ["tp: native, at (4, 2) x 32 slower"],
    }
    row = row_of("bits", 2, {"moe_m": (Suite([*tests], tests), Suite([*tests], tests, native=lines))})
    assert row.native_because == {"moe_m": {"tp: native, at N slower": 2, "sp: native, mask": 1, NOTHING_ASKED: 1}}


def test_the_largest_folder_is_several_suites():
    parts = suites_of("moe")
    assert len(parts) == 5 and suites_of("gpt") == ["gpt"]
    letters = [path.split("test_")[1] for path in {path for suite in parts for path in SUITES[suite].paths}]
    assert all(sum(fnmatch.fnmatch(f"{letter}x.py", one) for one in letters) == 1 for letter in string.ascii_lowercase)


def _kept(folder, number, names, skip=(), count=3):
    """The tests of a part, where these were collected."""
    items = [types.SimpleNamespace(nodeid=name) for name in names]
    config = types.SimpleNamespace(hook=types.SimpleNamespace(pytest_deselected=lambda items: None))
    job = plugin.Job(str(folder), number, "", skip=skip, part=(number, count))
    plugin._Rank(job).pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items]


def test_the_tests_of_a_long_file_are_dealt_out(tmp_path):
    """Each to one part, whichever others were collected."""
    names = [f"file.py::test[{index}]" for index in range(60)]
    parts = [_kept(tmp_path, number, names, skip=(names[4],)) for number in range(3)]
    assert sorted(sum(parts, [])) == sorted({*names} - {names[4]}) and min(map(len, parts)) > 10
    fewer = [_kept(tmp_path, number, names[7:]) for number in range(3)]
    assert [[name for name in part if name not in names[:7]] for part in parts] == fewer
    for name, part in SUITES.items():
        same = [other for other in SUITES.values() if other.paths == part.paths]
        assert sorted(other.index for other in same) == list(range(part.count)), name


def test_a_launch_is_told_its_part(tmp_path, monkeypatch):
    monkeypatch.setattr(Launcher, "_run_until_deadline", lambda *args: False)
    launcher = Launcher(tmp_path, tmp_path, 2, "tp", 1.0, time.monotonic() + 100)
    for suite, part in (("dist_checkpointing_layer_wise_3", [2, 6]), ("gpt", [0, 1])):
        launcher.run("bits", suite, [])
        assert json.loads((tmp_path / "bits" / suite / "0.job.json").read_text())["part"] == part


def test_a_test_counts_once():
    suite = Suite(["a", "b"], {"a": "passed", "b": "passed"})
    row = row_of("bits", 2, {"moe_a_1": (suite, suite), "moe_m": (suite, suite)})
    assert (row.native_passed, row.ours_passed) == (2, 2)


def test_a_test_that_is_skipped_with_fused_is_lost():
    native = Suite(["a", "b"], {"a": "passed", "b": "passed"})
    fused = Suite(["a", "b"], {"a": "skipped", "b": "passed"}, ran={"a": {"tp": 0}, "b": {"tp": 2, "ep": 1}})
    row = row_of("strict", 4, {"moe_m": (native, fused)})
    assert row.native_because == {"moe_m": {NOTHING_ASKED: 1}}
    assert row.lost == {"a": "skipped"} and row.calls == {"ep": 1, "tp": 2} and row.ours_ran == row.ours_passed == 1


@given(st.integers(0, 3).map(lambda power: 2**power), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=3, max_size=3))
def test_sizes_fit_the_ranks(world_size, sizes):
    fitting = fit_sizes(world_size, *sizes)
    assert fitting[0] * fitting[1] * fitting[2] == min(world_size, sizes[0] * sizes[1] * sizes[2])
    assert all(1 <= one <= wanted for one, wanted in zip(fitting, sizes))
    expert, sliced = fit_expert_sizes(world_size, fitting[1], sizes[2], fitting[0])
    assert expert * sliced * fitting[1] <= world_size


@pytest.mark.parametrize(
    "sizes, fitting",
    [
        ({"TP": 8}, {"TP": 2}),
        ({"EP": 2}, {"EP": 2}),
        ({"TP": 2, "EP": 4}, {"TP": 2, "EP": 1}),
        ({"FSDP": 8, "EP": 4}, {"FSDP": 2, "EP": 2}),
        ({"PP": 2, "VPP": 2}, {"PP": 2, "VPP": 2}),
        ({"TP": 4, "PP": 2, "VPP": 2}, {"TP": 2, "PP": 1}),
    ],
)
def test_cells_of_the_determinism_tests_fit_two_ranks(sizes, fitting):
    fit_parallelism(2, sizes)
    assert sizes == fitting


def test_sizes_that_fit_stay():
    assert fit_sizes(8, 2, 2, 2) == (2, 2, 2)
    assert fit_expert_sizes(8, 2, 4, 1) == (4, 1)
    assert fit_sizes(2, 4, 2, 1) == (1, 2, 1) or fit_sizes(2, 4, 2, 1) == (2, 1, 1)


def test_what_is_counted_beside_transformer_engine_is_there():
    """By its source: without Transformer Engine these modules cannot be imported."""
    package = Path(ditron_train.__file__).parents[1]
    for module, name, _ in fused_calls._TE_DECISIONS:
        tree = ast.parse((package / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        names = [alias.name for node in imports for alias in node.names]
        names += [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        for one in tree.body:
            if isinstance(one, ast.ClassDef):
                names += [f"{one.name}.{node.name}" for node in one.body if isinstance(node, ast.FunctionDef)]
        assert name in names, module


def test_the_suites_are_those_of_megatron_lm(checkout):
    assert paths_of(checkout, "distributed") == ["tests/unit_tests/distributed"]
    assert paths_of(checkout, "moe_m") == []
    assert all(SUITES.values())


@pytest.mark.parametrize("name, words", [(None, "names no checkout"), ("/nowhere", "no folder tests/unit_tests")])
def test_a_checkout_has_to_be_named(name, words, monkeypatch):
    monkeypatch.delenv("MEGATRON_LM", raising=False)
    if name:
        monkeypatch.setenv("MEGATRON_LM", name)
    with pytest.raises(SettingError, match=words):
        campaign._checkout()


def test_every_decision_is_there_to_be_counted():
    """A misspelt one would count nothing: what Megatron-core lacks is passed over."""
    calls = fused_calls.FusedCalls()
    for module, name, _ in (*fused_calls._DECISIONS, *fused_calls._PROBES):
        owner = importlib.import_module(module)
        for part in name.split("."):
            owner = getattr(owner, part)
        assert callable(owner)
    calls.install(())
    assert calls.take() == {}


def test_tests_without_a_fused_call_are_no_comparison(checkout, tmp_path, monkeypatch):
    (checkout / "megatron" / "core").mkdir(parents=True)
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    monkeypatch.setenv("MEGATRON_LM", str(checkout))
    for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    records = tmp_path / "records"
    for mode in (NATIVE, "strict"):
        _note(records / mode / "moe_m", 0, [[("a", "passed")]] * 2, ran={})
    monkeypatch.setattr(launches.Launcher, "_launch", lambda *args: pytest.fail("nothing is to be launched"))
    parser = campaign.argparse.ArgumentParser()
    campaign.add_arguments(parser)
    words = ["--seconds", "0", "--policy", "strict", "--records", str(records), "--output", str(tmp_path / "out")]
    with pytest.raises(NothingComparedError, match="nothing was compared: strict: no fused call ran in any test"):
        campaign.run(parser.parse_args(words))


def test_the_table_is_written(checkout, tmp_path, monkeypatch):
    """What was run before is in it, whatever part was asked for now."""
    (checkout / "megatron" / "core").mkdir(parents=True)
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    monkeypatch.setenv("MEGATRON_LM", str(checkout))
    for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    records = tmp_path / "records"
    _note(records / NATIVE / "moe_m", 0, [[("a", "passed"), ("b", "passed"), ("c", "skipped")]] * 2)
    _note(records / "strict" / "moe_m", 0, [[("a", "passed"), ("b", "failed")]] * 2)
    monkeypatch.setattr(launches.Launcher, "_launch", lambda *args: pytest.fail("nothing is to be launched"))
    parser = campaign.argparse.ArgumentParser()
    campaign.add_arguments(parser)
    words = ["--seconds", "0", "--policy", "strict", "--records", str(records), "--output", str(tmp_path / "out")]
    assert campaign.run(parser.parse_args(words)) == 1
    (path,) = Path(tmp_path / "out").glob("*x2/megatron_tests.json")
    values = json.loads(path.read_text())
    (row,) = values["rows"]
    assert row["lost"] == {"b": "failed"} and row["native_passed"] == row["ours_ran"] == 2 and row["ours_passed"] == 1
    assert values["stamp"]["settings"]["megatron_lm"] == "0.16.1"


def test_a_checkout_of_which_nothing_passes_gives_no_table(checkout, tmp_path, monkeypatch):
    """As where a package is missing that its tests import."""
    monkeypatch.setenv("MEGATRON_LM", str(checkout))
    for name in ("TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    records = tmp_path / "records"
    _note(records / NATIVE / "moe_m", 0, [[("a", "failed")]] * 2)
    monkeypatch.setattr(launches.Launcher, "_launch", lambda *args: pytest.fail("nothing is to be launched"))
    parser = campaign.argparse.ArgumentParser()
    campaign.add_arguments(parser)
    words = ["--seconds", "0", "--records", str(records), "--output", str(tmp_path / "out")]
    with pytest.raises(SettingError, match="no test passes natively"):
        campaign.run(parser.parse_args(words))
    assert not (tmp_path / "out").exists()
