"""Megatron-core's pipeline schedules with our communicator: the losses and parameters of native, bit for bit.

Native runs with ``overlap_p2p_comm=False``: with overlap megatron-core 0.16.1 frees outputs before they are sent.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_workers, run_workers_once

pytest.importorskip("megatron.core")
sys.path.insert(0, str(Path(__file__).parent))
import pp_workers as workers  # noqa: E402

Case = workers.Case
IN_ORDER = [(False, False)]
ALL_WAYS = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 4),
        Case(2, 1),
        Case(2, 3, forward_only=True),
        Case(2, 4, variable=True, batched=True),
        Case(2, 2, variable=True, batched=True, growth=4),
        Case(2, 2, tied=True, dtype=torch.bfloat16),
        Case(4, 6, batched=True),
        Case(4, 2, variable=True, batched=True),
    ],
    ids=str,
)
def test_1f1b(case):
    counts = run_workers(case.pipeline, workers.equal_to_native, case, IN_ORDER)
    steps = 2 * case.microbatches
    both_ways = 1 if case.forward_only else 2
    inner = [steps * both_ways] * (case.pipeline - 2)
    assert [count for (count,) in counts] == [steps, *inner, 0 if case.forward_only else steps]


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 4, chunks=2),
        Case(2, 6, chunks=2, group_size=4),
        Case(2, 4, chunks=2, forward_only=True),
        Case(4, 8, chunks=2, batched=True),
        Case(4, 14, chunks=2, group_size=7, tied=True),
        Case(4, 8, chunks=2, variable=True, batched=True),
    ],
    ids=str,
)
def test_interleaved(case):
    for counts in run_workers(case.pipeline, workers.equal_to_native, case, ALL_WAYS):
        assert len(set(counts)) == 1 and counts[0] > 0


@pytest.mark.parametrize(
    "case", [Case(4, 5, batched=True), Case(4, 8, chunks=2, variable=True, batched=True)], ids=str
)
def test_two_nodes_on_one_machine(case):
    ways = IN_ORDER if case.chunks is None else ALL_WAYS[:2]
    counts = run_workers(4, workers.equal_across_nodes, case, ways)
    assert all(count > 0 for rank in (0, 2) for count in counts[rank])  # they send to the next stage within their node


@pytest.mark.parametrize("slots", ["1", "4"])
def test_any_number_of_slots(slots):
    case = Case(4, 10, chunks=2, group_size=6, batched=True)
    env = {"DITRON_PP_SLOTS": slots}
    run_workers(4, workers.equal_to_native, case, ALL_WAYS, env=env)


@pytest.mark.parametrize(
    "case", [Case(2, 4), Case(2, 3, variable=True, batched=True), Case(3, 6, chunks=2, batched=True)], ids=str
)
def test_by_kernels(case):
    ways = IN_ORDER if case.chunks is None else ALL_WAYS
    env = {"DITRON_PP_PATH": "kernel"}
    for counts in run_workers(case.pipeline, workers.equal_to_native, case, ways, env=env)[:-1]:
        assert all(count > 0 for count in counts)


def test_inside_data_and_tensor_parallel_groups():
    for case in (Case(2, 3), Case(2, 3, tensor=2)):
        counts = run_workers(4, workers.equal_to_native, case, IN_ORDER)
        assert all(count == [6] for count in counts)


def test_what_is_not_covered_runs_natively():
    assert run_workers(2, workers.falls_back, Case(2, 2), {"reason": "a test says so"}) == [0, 0]
    assert run_workers(2, workers.no_memory, Case(2, 2)) == [0, 0]


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
def test_a_failed_self_check_sends_all_messages_natively(variable):
    """Without the memory and the streams of a context."""
    case = Case(2, 3, variable=variable, batched=variable)
    first, last = run_workers(2, workers.self_check_fails, case)
    failure = "launching a kernel (rank 1: no launch)"
    words = f"the self-check beside triton 3.99.0, other than what was tried, failed: {failure}"
    assert first == last == (0, False, [f"pp: native, {words}"])


@pytest.mark.parametrize("name, variable", [("context.Mailbox", False), ("network.make_group", True)])
def test_an_unforeseen_failure_of_all_stages_to_make_a_context_is_native(name, variable):
    case = Case(2, 3, variable=variable, batched=variable)
    words = "pp: native, the fused path cannot run here: TypeError: no such argument"
    in_a_job = {"DITRON_TEST_RAISES": ""}
    assert run_workers(2, workers.context_cannot_be_made, case, name, env=in_a_job) == [(0, [words])] * 2
    with pytest.raises(TypeError, match="no such argument"):
        run_workers(2, workers.context_cannot_be_made, case, name)


@pytest.mark.parametrize("capped", [(0, 1), (2, 3)], ids=["first_node", "last_node"])
def test_memory_that_is_missing_on_one_node_sends_all_ranks_natively(capped):
    arguments = (Case(4, 2, batched=True), ["4096", "1", None], capped)
    *without, fused = zip(*run_workers(4, workers.no_memory_on_one_node, *arguments))
    steps = ("making room for messages of", "making a pipeline's context")  # no slots, no flags
    for found, step in zip(without, steps, strict=True):
        assert found == found[:1] * 4
        ((count, (line,)), *_) = found
        assert count == 0 and line.startswith(f"pp: native, {step}") and "failed on 2 of 4 ranks" in line
    counts = [count for count, _ in fused]
    assert counts[0] > 0 and counts[2] > 0  # they send to the next stage within their node


def test_the_plan_says_how_messages_of_a_size_go(tmp_path):
    first, last = run_workers(2, workers.a_plan_decides, Case(2, 2), str(tmp_path / "plan.json"))
    assert first == last == [(True, True), (False, True)]


def test_bad_input_is_refused_as_native_does():
    for logged in run_workers(2, workers.bad_input):
        assert "pipeline_dtype" in logged[0] and "tensor_shape" in logged[1]


def test_a_communicator_may_be_kept_for_steps_of_other_sizes():
    lengths = [4, 4, 300, 2, 1000]  # what is larger than the first goes natively
    assert run_workers(2, workers.kept_communicator, lengths) == [2 * 3] * 2
    lengths = [0, 4, 300, 2]
    assert run_workers(2, workers.kept_communicator, lengths, True) == [2 * len(lengths)] * 2


@pytest.mark.parametrize(
    "case, path",
    [
        (Case(2, 4, variable=True, batched=True, short_first=True), "auto"),
        (Case(2, 4, variable=True, batched=True, short_first=True), "kernel"),
        (Case(3, 4, variable=True, short_first=True), "auto"),
        (Case(2, 3, variable=True, batched=True, short_first=True, forward_only=True), "auto"),
    ],
    ids=str,
)
def test_slots_grow_to_lengths_that_nobody_says(case, path):
    """They begin with the first message; longer ones go by the network for two steps, then none does."""
    lengths = sorted(len(batch[1][0]) for batch in workers._batches(case, 0))
    assert lengths[0] < lengths[-1]
    env = {"DITRON_PP_PATH": path}
    of_ranks = run_workers(case.pipeline, workers.lengths_that_nobody_says, case, 4, env=env)
    for steps in of_ranks:
        sizes, by_network = zip(*steps)
        assert sizes[0] == sizes[1] < sizes[2] == sizes[3] >= 4 * 32 * workers.BATCH * lengths[-1]
        assert by_network[0] == by_network[1] > 0 and by_network[2:] == (0, 0)
    assert len({tuple(size for size, _ in steps) for steps in of_ranks}) == 1


def test_slots_that_cannot_grow_send_all_messages_natively():
    """From then on, on all ranks alike."""
    case, env = Case(2, 4, variable=True, batched=True, short_first=True), {"DITRON_ARENA_BYTES": "24000"}
    first, last = run_workers(2, workers.lengths_that_nobody_says, case, 4, env=env)
    assert first == last
    sizes, by_network = zip(*first)
    assert sizes[0] == sizes[1] > 0 == sizes[2] == sizes[3]
    assert by_network[0] == by_network[1] > 0 and by_network[2:] == (0, 0)


def test_slots_stay_as_they_are_where_a_rank_lacks_memory_for_more():
    """Messages that fit go on through them, the others by the network."""
    case = Case(2, 4, variable=True, batched=True, short_first=True)
    first, last = run_workers(2, workers.lengths_that_nobody_says, case, 4, 1)
    sizes, by_network = zip(*first)
    assert first == last and len(set(sizes)) == 1 and sizes[0] > 0 and min(by_network) > 0


def test_messages_of_several_sizes_in_a_step():
    """Stages come to the second size at different times: nothing about it may be agreed on by all of them."""
    assert run_workers(3, workers.several_sizes_in_a_step) == [2, 4, 2]


def test_stages_that_are_late_in_the_first_step_one_after_another():
    """None is as late as the deadline, which the last one's wait passes: natively nothing happens."""
    outcomes = run_workers_once(3, workers.slow_first_step, Case(3, 2), 6.0, env={"DITRON_TIMEOUT_S": "9"})
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(True, None)] * 3


@pytest.mark.parametrize("case, leases", [(Case(2, 6, forward_only=True), None), (Case(4, 6), "0")], ids=str)
def test_a_stage_waits_for_slots_as_long_as_the_next_one_compiles(case, leases):
    """It has none left when the second stage is later than a deadline: natively nothing happens. Of an evaluation the
    first stage may be calls ahead."""
    env = {"DITRON_TIMEOUT_S": "15"} | ({"DITRON_PP_LEASES": leases} if leases is not None else {})
    outcomes = run_workers_once(case.pipeline, workers.slow_first_step, case, 18.0, 1, env=env)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(True, None)] * case.pipeline


@pytest.mark.parametrize(
    "across_nodes, newer",
    [(False, []), (False, ["triton 3.99.0"]), (True, [])],
    ids=["first_step", "self_check", "new_size_between_nodes"],
)
def test_stages_that_meet_on_the_host_wait_two_deadlines_a_stage(across_nodes, newer):
    """The first one comes when it has compiled its whole forward."""
    _, logged = run_workers(2, workers.first_stage_never_comes, across_nodes, newer)
    assert "an agreement of all ranks" in logged and "rank 1 waited 2 s for rank 0" in logged


def test_a_kept_communicator_waits_for_long_in_its_first_step_only():
    assert run_workers(3, workers.deadlines, Case(3, 5), [True, False, False], True) == [[[6], [6], [1]]] * 3


def test_a_kept_communicator_waits_for_long_in_its_first_evaluation_too():
    """It is not told where an evaluation ends: the second one, right behind it, has the same deadlines."""
    steps = [False, False, True, True, False, True]
    assert run_workers(3, workers.deadlines, Case(3, 5), steps, True) == [[[6], [1], [6], [6], [1], [1]]] * 3


def test_the_first_step_with_gradients_and_the_first_without_wait_for_long():
    """Each has kernels of its own, which one stage behind the other compiles; an evaluation's stages may be calls
    apart."""
    steps = [False, False, True, True, False]
    assert run_workers(3, workers.deadlines, Case(3, 5), steps, False) == [[[6], [1], [6], [6], [1]]] * 3
    assert run_workers(3, workers.deadlines, Case(3, 5), [True, False, False], False) == [[[6], [6], [1]]] * 3


def test_slots_are_kept_for_leases_only_where_something_is_leased():
    """Else as many messages would be idle, beside torch's memory that they are copied out into."""
    assert run_workers(2, workers.slots_to_lease, {}) == [((4, 3), True)] * 2
    for change in ({"cuda_graph_impl": "local"}, {"fine_grained_activation_offloading": True}):
        assert run_workers(2, workers.slots_to_lease, change) == [((0, 0), True)] * 2
