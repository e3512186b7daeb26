"""What every benchmark refuses before it launches anything, the same on every rank."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import pytest
import torch

from ditron_train.runtime.errors import SettingError
from ditron_train.tools.arguments import add_common_arguments, check_folder, choose_models
from ditron_train.tools.results import RESULTS
from tests.support.processes import run_workers

REFUSED = [
    ("tp", "--repetitions 0", "--repetitions has to be above 0"),
    ("sp", "--warmup -1", "--warmup has to be 0 or more"),
    ("tp", "--output /proc/nowhere", "cannot write into /proc/nowhere"),
    ("tp", "--model GPT-9", "unknown model GPT-9; there are LLaMA3-7B"),
    ("sp", "--model GPT-9", "unknown model GPT-9; there are attention layer, weak scaling"),
    ("muon", "--model GPT-9", "unknown model GPT-9; there are square"),
    ("tp", "--shape 8 0 8", "--shape 8 0 8: sizes have to be above 0"),
    ("sp", "--shape 8 0 0 8", "--shape 8 0 0 8: sizes"),
    ("sp", "--shape 2 8 8 8", "an attention of seqlen 2, heads 8, groups 8, head_size 8 does not divide over 2 ranks"),
    ("tp", "--shape 9 8 8", "ag_gemm 9x8x8 does not divide over 2 ranks: M and N have to"),
    ("tp", "--shape 8 8 9", "gemm_rs 8x8x9 does not divide over 2 ranks: M and K have to"),
    ("ep", "--shape 8 8 8 8 0", "--shape 8 8 8 8 0: sizes"),
    ("ep", "--shape 8 8 8 3 2", "3 experts do not divide over 2 ranks"),
    ("ep", "--shape 8 8 8 4 8", "there are no 8 experts to choose among 4"),
    ("pp", "--mb -1", "--mb -1.0: sizes"),
    ("pp", "--mb nan", "--mb nan: sizes"),
    ("pp", "--mb inf", "--mb inf: sizes"),
    ("gemm", "--model GPT-9", "unknown model GPT-9; there are LLaMA3-7B"),
    ("gemm", "--shape 8 0 8", "--shape 8 0 8: sizes"),
    ("gemm", "--tp 0", "--tp 0: sizes"),
    ("muon", "--shape 8 0", "--shape 8 0: sizes"),
    ("muon", "--layers -1", "--layers -1: sizes"),
]


def _refusals() -> list[str]:
    found = []
    for room, words, _ in REFUSED:
        module = importlib.import_module(f"ditron_train.tools.bench.{room}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        try:
            module.run(parser.parse_args(words.split()))
            found.append("accepted")
        except SettingError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    pytest.importorskip("megatron.core")
    first, second = run_workers(2, _refusals)
    assert first == second
    for message, (room, words, beginning) in zip(first, REFUSED):
        assert message.startswith(beginning), f"bench {room} {words}: {message}"


def test_one_rank_has_nobody_to_dispatch_to() -> None:
    pytest.importorskip("megatron.core")
    from ditron_train.tools.bench import ep

    parser = argparse.ArgumentParser()
    ep.add_arguments(parser)
    with pytest.raises(SettingError, match="bench ep takes 2 ranks or more"):
        run_workers(1, ep.run, parser.parse_args([]))


@pytest.mark.parametrize(("room", "words"), [("pp", "--model some")])
def test_options_that_nothing_reads_are_not_taken(room: str, words: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"ditron_train.tools.bench.{room}").add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())


def test_models_in_the_order_they_are_named() -> None:
    assert choose_models(None, ["a", "b", "a"]) == ["a", "b"]
    assert choose_models(["b", "a", "b"], ["a", "b", "c"]) == ["b", "a"]


def test_where_results_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_gpu, writes, expected in ((True, True, RESULTS), (True, False, None), (False, True, None)):
        monkeypatch.setattr("torch.cuda.is_available", lambda on_gpu=on_gpu: on_gpu)
        parser = argparse.ArgumentParser()
        add_common_arguments(parser, writes_results=writes)
        assert parser.parse_args([]).output == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(SettingError, match="cannot write into"):
            check_folder(folder)


def test_help_says_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference page is made from it, on a machine without a GPU."""
    from ditron_train.cli import command_parsers

    texts = []
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        texts.append({name: parser.format_help() for name, parser in command_parsers().items()})
    assert texts[0] == texts[1] and "timed calls (default 15, without a GPU 3)" in texts[0]["bench tp"]
