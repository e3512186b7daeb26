"""A group that this rank is not in is refused by name, on the ranks that are not in it alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ditron_train.ep import get_ep_context
from ditron_train.pp import get_pipeline_context
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.groups import check_member
from ditron_train.sp import get_sp_context
from ditron_train.symm import get_arena
from ditron_train.symm.exchange import exchange
from ditron_train.tp import get_tp_context as tp_context
from tests.support.processes import run_workers

CPU = torch.device("cpu")


def _contexts_of_others() -> list[str]:
    """What each subpackage says to a group of rank 0 alone; rank 0 is in it, and asks nothing of the others."""
    group = dist.new_group([0])
    makers = (
        lambda: tp_context(group, CPU), lambda: get_sp_context(group, CPU), lambda: get_ep_context(group, CPU, 4, 2),
        lambda: get_pipeline_context(group, CPU), lambda: get_arena(group, CPU), lambda: exchange(group, "word"),
    )  # fmt: skip
    words = []
    for make in makers:
        try:
            make()
            words.append("made")
        except NotSupportedError as error:
            words.append(str(error))
    return words


def test_a_group_of_others_is_refused_by_every_room() -> None:
    member, other = run_workers(2, _contexts_of_others)
    assert member.count("made") >= 5  # a pipeline of one stage is none
    assert other == ["this rank is not in the process group: only its members may use it"] * 6


@pytest.mark.parametrize(
    "group, words", [(None, "init_process_group"), (5, "5 is no process group"), ("tp", "'tp' is no")]
)
def test_what_is_no_group_is_refused(group: object, words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        check_member(group)
