"""The task level: a layer as queues of tasks in one persistent kernel, held together by a scoreboard.

A *queue* is a tile function, the number of its tasks and their order. A kernel is a sequence of queues: each of its
programs serves one after the other (``serve``), drawing tasks until the queue is empty; which programs skip a queue,
or serve it first, decides how many multiprocessors a kind of work gets. A *dependency* is a counter of the scoreboard:
the task that produces adds to it (``complete``), the task that consumes waits for an amount (``need``). Counters only
grow; the board is filled anew before every launch.

    @triton.jit
    def _add_tile(task, x, y, board, control, TARGET: tl.constexpr):
        need(board + COUNTERS + task, 1, control, task, TARGET)  # what the queue in front has made
        ...

    serve(board, num_tasks, _make_tile, (x, board, TARGET))      # every program makes tiles until there are none left,
    serve(board + 32, num_tasks, _add_tile, (x, y, board, control, TARGET))  # then adds

The arguments stand in the call itself: a tuple with a name would lose its constants.

It cannot deadlock as long as a task waits only for tasks of earlier queues, for earlier tasks of its own queue, or for
what another rank's tasks do under the same rule: whichever programs are resident draw all tasks, in order. So nothing
waits for a program that finds no multiprocessor. In the interpreter one program serves all queues.
"""

import triton
import triton.language as tl

import ditron_train.lang as dl


@triton.jit
def draw(head):
    """The next task of a queue (int32); ``head`` is its word, 0 before the launch."""
    return tl.atomic_add(head, 1, sem="relaxed", scope="gpu")


@triton.jit
def serve(head, num_tasks, TASK: tl.constexpr, args):
    """Calls ``TASK(task, *args)`` for tasks drawn from the queue until ``num_tasks`` have been; the next one is drawn
    while this one runs."""
    task = draw(head)
    while task < num_tasks:
        following = draw(head)
        TASK(task, *args)
        task = following


@triton.jit
def need(counter, amount, control, task, TARGET: tl.constexpr):
    """Waits (acquire, bounded) until ``*counter >= amount``; before descriptor loads add ``dl.fence_async_proxy``.

    ``task`` names what was waited for in the record of a wait that ends at its deadline.
    """
    dl.wait(counter, amount, control, dl.rank(control), task, TARGET)


@triton.jit
def complete(counter, amount, TARGET: tl.constexpr):
    """Adds to a counter of the board what this task has finished; all stores of the program before it are released.

    Descriptor stores need ``dl.bulk_store_wait`` before. Returns what the counter held before.
    """
    tl.debug_barrier()
    return tl.atomic_add(counter, amount, sem="acq_rel", scope="sys")


@triton.constexpr_function
def _is_cuda(target):
    return target.startswith("sm_")


@triton.jit
def complete_stored(counter_address, TARGET: tl.constexpr):
    """Counts a tile whose descriptor stores were issued a while ago; nothing for address 0 (an int64).

    Adds 1 for each warp (elsewhere than on NVIDIA: 1), since the stores of a tile are issued by several warps: each
    waits for its own, then its first lane releases (fence) and counts. No block barrier, which would drain the
    pipeline of the loop that this stands in.
    """
    if _is_cuda(TARGET):
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred counts, first;
                .reg .b32 lane;
                cp.async.bulk.wait_group 0;
                bar.warp.sync 0xffffffff;
                mov.u32 lane, %laneid;
                setp.ne.s64 counts, $1, 0;
                setp.eq.and.u32 first, lane, 0, counts;
                @first fence.acq_rel.gpu;
                @first red.relaxed.gpu.global.add.s32 [$1], 1;
                mov.u32 $0, 0;
            }
            """,
            "=r,l",
            [counter_address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        if counter_address != 0:
            complete(counter_address.to(tl.pointer_type(tl.int32)), 1, TARGET)
