"""The --ditron argument group."""

import argparse
import io
import json

import pytest
import torch

from ditron_train.megatron.plugin.arguments import (
    FEATURES,
    Options,
    add_ditron_args,
    options_from_args,
    options_from_argv,
    options_of,
    parse_features,
)
from ditron_train.megatron.plugin.record_trace import TraceRequest
from ditron_train.policy import check_plan, forget_plans
from ditron_train.policy.plan import fingerprint
from ditron_train.runtime.errors import SettingError


def _parser():
    return add_ditron_args(argparse.ArgumentParser(allow_abbrev=False))


def test_defaults_ask_for_nothing():
    assert options_from_args(_parser().parse_args([])) == Options()
    assert Options().environment() == {}


def test_values():
    args = _parser().parse_args(["--ditron", "tp", "--ditron-transport", "shm", "--ditron-timeout-s", "2.5"])
    options = options_from_args(args)
    assert options == Options(("tp",), "shm", 2.5)
    assert options.environment() == {"DITRON_TRANSPORT": "shm", "DITRON_TIMEOUT_S": "2.5"}


def test_a_checkpoint_holds_plain_values():
    """Megatron's checkpoints hold the arguments, and torch reads no other classes from them."""
    words = "--ditron tp,sp --ditron-transport shm --ditron-timeout-s 2 --ditron-policy bits --ditron-plan plan.json"
    args = _parser().parse_args([*words.split(), "--ditron-record", "steps", "--ditron-record-trace", "15,3"])
    assert not [name for name, value in vars(args).items() if value is None]
    written = io.BytesIO()
    torch.save(args, written)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(io.BytesIO(written.getvalue())) == args
    assert options_from_args(args).record_trace == TraceRequest(15, 3)


def test_sizes_of_groups_are_known_from_megatrons_arguments():
    args = _parser().parse_args(["--ditron", "tp,pp,sp"])
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size = 4, 1, 8
    assert options_from_args(args).sizes == {"tp": 4, "pp": 1}


def test_a_plan_of_experts_that_are_split_is_taken_again(tmp_path, monkeypatch):
    """Four ranks, two that share the experts times two slices, have decided about the movement together."""
    entry = dict(use_ditron=True, reason="", bits_equal=True, native_us=2.0, ditron_us=1.0)
    decisions = {"ep 8 tokens x 16, top-2 of 4, torch.bfloat16 on 4 ranks (strict)": entry}
    content = {"format": "ditron_train plan 3", "made_with": fingerprint(), "decisions": decisions}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    monkeypatch.setenv("DITRON_PLAN", str(tmp_path / "plan.json"))
    forget_plans()
    args = _parser().parse_args(["--ditron", "ep"])
    args.expert_model_parallel_size, args.tensor_model_parallel_size = 2, 2
    for slices in (None, 2):  # None: not given, as many as of other layers
        args.expert_tensor_parallel_size = slices
        check_plan(options_from_args(args).deciding_sizes)
    args.expert_tensor_parallel_size = 1
    with pytest.raises(SettingError, match="on 4 ranks, here it is 2 ranks"):
        check_plan(options_from_args(args).deciding_sizes)


def test_a_plan_of_exchanges_around_rings_is_taken_again():
    """They are decided by parts of the context parallel group, whose size is another."""
    args = _parser().parse_args(["--ditron", "sp"])
    args.context_parallel_size = 4
    for kind, sizes in (("a2a", {"sp": 4}), (["a2a"], {"sp": 4}), ("a2a+p2p", {}), (["a2a", "a2a+p2p"], {})):
        args.cp_comm_type = kind
        assert options_from_args(args).deciding_sizes == sizes


def test_what_has_no_effect_is_said():
    args = _parser().parse_args(["--ditron-policy", "force", "--ditron-timeout-s", "5"])
    assert options_from_args(args).idle() == [
        f"--ditron-{name} has no effect: --ditron names no feature" for name in ("timeout-s", "policy")
    ]
    args = _parser().parse_args(["--ditron", "pp,tp,muon"])
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = 4, 1
    for optimizer in ("adam", "dist_muon"):
        args.optimizer = optimizer
        muon = ["muon: nothing to accelerate where --optimizer is adam"] * (optimizer == "adam")
        assert options_from_args(args).idle() == [
            "pp: nothing to accelerate where --pipeline-model-parallel-size is 1",
            *muon,
        ]


def test_mlps_of_the_operation_fuser_are_said_to_be_native(monkeypatch):
    monkeypatch.setattr("ditron_train.runtime.versions.find_version", lambda entry: "0.19.0")
    args = _parser().parse_args(["--ditron", "tp"])
    assert options_from_args(args).idle() == []
    args.use_transformer_engine_op_fuser = True
    (line,) = options_from_args(args).idle()
    assert line.startswith("--use-transformer-engine-op-fuser:") and "computes the MLPs" in line
    for name, value in (("num_experts", 8), ("hybrid_layer_pattern", "M-"), ("transformer_impl", "local")):
        changed = argparse.Namespace(**{**vars(args), name: value})
        assert options_from_args(changed).idle() == []
    monkeypatch.setattr("ditron_train.runtime.versions.find_version", lambda entry: "0.18.2")
    assert options_from_args(args).idle() == [], "not given to it yet"
    monkeypatch.undo()
    args.ditron = ("pp",)
    assert options_from_args(args).idle() == []


@pytest.mark.parametrize(
    ("dispatcher", "slices", "is_idle"),
    [("allgather", None, False), ("allgather", 2, False), ("allgather", 1, True), ("alltoall", None, True)],
)
def test_experts_of_one_rank_are_gathered_over_their_slices(dispatcher, slices, is_idle):
    args = _parser().parse_args(["--ditron", "ep"])
    args.expert_model_parallel_size, args.tensor_model_parallel_size = 1, 2
    args.moe_token_dispatcher_type, args.expert_tensor_parallel_size = dispatcher, slices
    words = ["ep: nothing to accelerate where --expert-model-parallel-size is 1"] * is_idle
    assert options_from_args(args).idle() == words


def test_sizes_that_a_checkpoint_brings_are_not_known():
    """It is read behind the arguments, and its parallel sizes take the place of theirs."""
    args = _parser().parse_args(["--ditron", "tp,pp"])
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = 1, 2
    args.use_mp_args_from_checkpoint_args = True
    options = options_from_args(args)
    assert options.sizes == {} and options.idle() == [] and options.deciding_sizes == {}


def test_adding_twice_changes_nothing_and_help_names_every_feature(capsys):
    parser = add_ditron_args(_parser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())  # lines are broken anywhere
    assert text.count("--ditron-timeout-s SECONDS") >= 1
    for name in FEATURES:
        assert f"{name}: " in text


@pytest.mark.parametrize("text", ["tp,warp", "", "tp tp", "TP"])
def test_unknown_names_are_an_error_that_lists_the_known_ones(text, capsys):
    with pytest.raises(SystemExit) as caught:
        _parser().parse_args(["--ditron", text])
    assert caught.value.code == 2
    assert "tp" in capsys.readouterr().err
    with pytest.raises(SettingError, match="comma-separated list of: tp"):
        parse_features(text)


@pytest.mark.parametrize("value", [None, 3, ["tp", 3], {"tp"}])
def test_what_are_no_names_of_features(value):
    with pytest.raises(SettingError, match="features are names"):
        parse_features(value)


def test_features_come_in_a_fixed_order_without_repetition():
    names = tuple(FEATURES)
    assert parse_features(",".join(reversed(names)) + f",{names[0]}") == names
    assert parse_features(["tp", "tp"]) == ("tp",)


@pytest.mark.parametrize("words", [["--ditron-transport", "carrier-pigeon"], ["--ditron-timeout-s", "-3"]])
def test_bad_settings(words):
    with pytest.raises(SystemExit):
        _parser().parse_args(words)


def test_a_yaml_file_names_features(monkeypatch):
    """Megatron's namespace is then the file's; without our name in it the command line counts."""
    for given in ("pp,tp", ["tp", "pp"], ("tp", "pp")):
        args = argparse.Namespace(ditron=given, ditron_policy="force", ditron_record_trace=15)
        assert options_of(args) == Options(("tp", "pp"), policy="force", record_trace=TraceRequest(15, 0))
    for given in ("warp", argparse.Namespace(tp=True)):
        with pytest.raises(SettingError):
            options_of(argparse.Namespace(ditron=given))
    assert options_of(argparse.Namespace(ditron=None)) == Options()
    monkeypatch.setattr("sys.argv", ["train.py", "--yaml-cfg", "job.yaml", "--ditron", "tp"])
    assert options_of(argparse.Namespace(yaml_cfg="job.yaml")) == Options(("tp",))


def test_our_words_among_those_of_a_script():
    words = ["--num-layers", "2", "--ditron", "tp", "--bf16", "--ditron-timeout-s", "7"]
    assert options_from_argv(words) == Options(("tp",), None, 7.0)
