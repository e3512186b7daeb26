"""Settings that differ between ranks: one error on all of them where Megatron makes its groups, instead of a job that
stands still."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from tests.support.model_parallel import destroy_groups
from tests.support.processes import run_workers

pytest.importorskip("megatron.core")


def _apply_with(
    variables: dict[str, str], of_ranks: list[int], early: bool, features: tuple[str, str]
) -> tuple[str, float]:
    """What a rank hears, and after how many seconds; ``variables`` and the second one of ``features`` are of some
    ranks alone."""
    import ditron_train.megatron as plugin
    from ditron_train.megatron.plugin import job_start as rendezvous
    from tests.support.model_parallel import model_parallel

    is_other = dist.get_rank() in of_ranks
    begun_s = time.monotonic()
    try:
        with mock.patch.dict(os.environ, variables if is_other else {}):
            if early:  # as the launcher does
                plugin.apply(features=features[is_other])
            with model_parallel(tensor_model_parallel_size=dist.get_world_size()):
                if not early:  # as wrap_model_provider does
                    plugin.apply(features=features[is_other])
                    rendezvous.rendezvous()
    except SettingError as error:
        return str(error), time.monotonic() - begun_s
    finally:
        plugin.restore()
        destroy_groups()
    return "", 0.0


_TABLE = '{"format": "ditron_train tuning 1", "device": "CPU", "made_with": {}, "rates": null, "choices": {}}'


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "variables, words",
    [
        ({"DITRON_POLICY": "force"}, "DITRON_POLICY: strict on ranks 0 to 1, force on rank 2;"),
        ({"DITRON_PLAN": "plan.json"}, "DITRON_PLAN: unset on ranks 0 to 1, a file on rank 2;"),
        ({"DITRON_TUNING": "table.json"}, "DITRON_TUNING: unset on ranks 0 to 1, table 908799e196b1 on rank 2;"),
        ({"DITRON_EP_RAILS": "on"}, "DITRON_EP_RAILS: auto on ranks 0 to 1, on on rank 2;"),
    ],
    ids=["policy", "plan", "table", "rails"],
)
def test_the_same_words_on_every_rank(early, variables, words, tmp_path):
    (tmp_path / "table.json").write_text(_TABLE)
    variables = {
        name: str(tmp_path / value) if value.endswith(".json") else value for name, value in variables.items()
    }
    logged = run_workers(3, _apply_with, variables, [2], early, ("tp", "tp"))
    for error, seconds in logged:
        assert error == f"ranks differ in {words} set it to one value everywhere" and seconds < 25


def test_features_too():
    for error, _ in run_workers(3, _apply_with, {}, [0, 2], True, ("tp", "tp,pp")):
        words = "pp,tp on 2 ranks from 0 on, tp on rank 1; set it to one value everywhere"
        assert error == f"ranks differ in --ditron (or DITRON): {words}"


def test_what_ranks_may_have_for_themselves(tmp_path):
    variables = {"DITRON_TIMEOUT_S": "50", "DITRON_ARENA_BYTES": "1M", "DITRON_POSTMORTEM": str(tmp_path)}
    assert run_workers(3, _apply_with, variables, [1], True, ("tp", "tp")) == [("", 0.0)] * 3


def _apply_here_and_there() -> str:
    import ditron_train.megatron as plugin
    from tests.support.model_parallel import model_parallel

    try:
        with model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=dist.get_world_size()):
            if dist.get_rank() > 0:
                for features in ("tp", "ep")[: dist.get_rank()]:
                    plugin.apply(features=features)
            return ",".join(plugin.active_features())
    finally:
        plugin.restore()
        destroy_groups()


def test_a_script_may_switch_features_on_for_some_stages():
    """By a call behind Megatron's groups, which waits for nobody."""
    assert run_workers(3, _apply_here_and_there) == ["", "tp", "tp,ep"]
