"""The seeded faults: one small change of the package each, and the tests that are expected to fail with it.

Each is a change that a refactoring could make by mistake. `python -m tests.mutations` applies them one at a time to a
copy of the working tree; `test_mutations.py` checks in CI that each can still be applied.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: As after ``--only``.
        kind: What kind of mistake it is.
        file: The file that it changes, from the root of the repository.
        old: Text of that file, which occurs exactly once in it unless ``index`` says which of several is meant.
        new: What replaces it.
        tests: What is given to pytest: files or node ids.
        index: Which occurrence of ``old`` is replaced, from 0; None: it occurs once.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    index: int | None = None

    def applied_to(self, source: str) -> str:
        """The source of ``file`` with the fault.

        Raises:
            ValueError: ``old`` does not occur as often as it should, or the result is not Python.
        """
        parts = source.split(self.old)
        count = len(parts) - 1
        if count != 1 if self.index is None else count <= self.index:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}")
        split = 1 + (self.index or 0)
        mutated = self.old.join(parts[:split]) + self.new + self.old.join(parts[split:])
        try:
            ast.parse(mutated, self.file)
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {self.file} is not Python with it: {error}") from error
        return mutated


LATE = "tests/tp/test_late.py"
TP_OPS = "tests/tp/test_tp_ops.py"
LANG = "tests/lang/test_lang.py"
POLICY = "tests/policy/test_policy.py"
MOVEMENT = "tests/ep/test_movement.py"
SP_OPS = "tests/sp/test_ops.py"
CHANNEL = "tests/pp/test_channel.py"
LAYERS = "tests/native/test_layers.py"

MUTATIONS: tuple[Mutation, ...] = (
    # Tensor parallelism.
    Mutation(
        "rs-ring-reversed",
        "reduction order",
        "ditron_train/tp/reduce_scatter.py",
        "source = (sources.rank + step) % WORLD_SIZE",
        "source = (sources.rank + WORLD_SIZE - step) % WORLD_SIZE",
        (f"{TP_OPS}::test_reduce_scatter_adds_in_ring_order[4-shape1-bfloat16]",),
    ),
    Mutation(
        "rs-starts-at-own-rank",
        "reduction order",
        "ditron_train/tp/reduce_scatter.py",
        "            if step == WORLD_SIZE:",
        "            if step == FIRST:",
        (f"{TP_OPS}::test_reduce_scatter_adds_in_ring_order[4-shape1-bfloat16]",),
    ),
    Mutation(
        "rs-no-rounding-between-hops",
        "rounding skipped",
        "ditron_train/tp/reduce_scatter.py",
        "total = (total + values).to(sources.slots.dtype.element_ty).to(tl.float32)",
        "total = total + values",
        (f"{TP_OPS}::test_reduce_scatter_adds_in_ring_order[4-shape1-bfloat16]",),
    ),
    Mutation(
        "rs-last-block-left-out",
        "mask of the last tile",
        "ditron_train/tp/reduce_scatter.py",
        "range(tl.program_id(0), tl.cdiv(sources.num_elements, BLOCK), tl.num_programs(0))",
        "range(tl.program_id(0), sources.num_elements // BLOCK, tl.num_programs(0))",
        (f"{TP_OPS}::test_reduce_scatter_adds_in_ring_order[2-shape0-bfloat16]",),
    ),
    Mutation(
        "rs-waits-for-one-source-less",
        "dropped wait in a kernel",
        "ditron_train/tp/reduce_scatter.py",
        "        LAST: tl.constexpr = WORLD_SIZE - 1",
        "        LAST: tl.constexpr = WORLD_SIZE - 2",
        (f"{LATE}::test_partial_sums_that_arrive_late_are_waited_for",),
    ),
    Mutation(
        "gemm-rs-epilogue-ring-reversed",
        "reduction order",
        "ditron_train/tp/gemm_rs.py",
        "source = (rank + step) % OP.world_size",
        "source = (rank + OP.world_size + 2 - step) % OP.world_size",
        (f"{TP_OPS}::test_four_ranks",),
    ),
    Mutation(
        "gemm-ar-orders-ignored",
        "reduction order",
        "ditron_train/tp/all_reduce.py",
        "values = _load(partials, tl.load(order + step), offsets, mask, SKIPS_OWN, WORLD_SIZE)",
        "values = _load(partials, (tl.load(order) + step) % WORLD_SIZE, offsets, mask, SKIPS_OWN, WORLD_SIZE)",
        ("tests/tp/test_all_reduce.py::test_gemm_ar_equals_matmul_then_the_simulated_orders",),
    ),
    Mutation(
        "all-reduce-slots-without-parity",
        "buffer reused too early",
        "ditron_train/tp/all_reduce.py",
        "area = tl.cast((epoch & 1) * WORLD_SIZE, tl.int64) * AREA",
        "area = tl.cast(0 * WORLD_SIZE, tl.int64) * AREA",
        (f"{LATE}::test_what_a_late_rank_still_adds_up_is_not_overwritten",),
    ),
    Mutation(
        "largest-slots-without-parity",
        "buffer reused too early",
        "ditron_train/tp/all_reduce.py",
        "area = (epoch & 1) * WORLD_SIZE",
        "area = epoch * 0",
        (f"{LATE}::test_what_a_late_rank_still_compares_is_not_overwritten",),
    ),
    Mutation(
        "ag-gemm-tile-waits-for-one-flag-less",
        "dropped wait in a kernel",
        "ditron_train/tp/ag_gemm.py",
        "range(first // flag_block_rows, last // flag_block_rows + 1)",
        "range(first // flag_block_rows, last // flag_block_rows)",
        (f"{LATE}::test_rows_that_arrive_late_are_waited_for[ag_gemm copy-128]",),
    ),
    Mutation(
        "ag-gemm-straddling-tile-waits-for-its-first-rank",
        "dropped wait in a kernel",
        "ditron_train/tp/ag_gemm.py",
        "high = tl.minimum(last_row, tl.load(gathered.tables.starts + owner + 1) - 1)",
        "high = tl.minimum(row, tl.load(gathered.tables.starts + owner + 1) - 1)",
        (f"{LATE}::test_rows_that_arrive_late_are_waited_for[ag_gemm push-40]",),
    ),
    Mutation(
        "gather-waits-for-one-peer-less",
        "dropped wait in a kernel",
        "ditron_train/tp/gather.py",
        "(rank + step) % WORLD_SIZE, epoch, channel, row_starts_ptr,",
        "(rank + 1) % WORLD_SIZE, epoch, channel, row_starts_ptr,",
        (f"{LATE}::test_rows_that_arrive_late_are_waited_for[all_gather-40]",),
    ),
    Mutation(
        "gather-awaits-the-epoch-before",
        "epoch - 1",
        "ditron_train/tp/gather.py",
        "epoch = dl.last_epoch(channel.tickets + 1) + 1",
        "epoch = dl.last_epoch(channel.tickets + 1)",
        (f"{LATE}::test_rows_that_arrive_late_are_waited_for[consume-40]",),
    ),
    Mutation(
        "gather-flags-of-the-wrong-rank",
        "wrong rank in an exchange",
        "ditron_train/tp/gather.py",
        "dl.symm_at(channel.signals_addresses, peer, tl.int32) + rank * FLAGS_PER_RANK",
        "dl.symm_at(channel.signals_addresses, peer, tl.int32) + peer * FLAGS_PER_RANK",
        (f"{TP_OPS}::test_ag_gemm_equals_gather_then_matmul[counts1-48-40-nn-bfloat16-push]",),
    ),
    Mutation(
        "scatter-into-the-peers-own-slot",
        "wrong rank in an exchange",
        "ditron_train/tp/reduce_scatter.py",
        "        slot = rank * partition.max_count * row_bytes",
        "        slot = (context.world_size - 1 - rank) * partition.max_count * row_bytes",
        (f"{TP_OPS}::test_reduce_scatter_adds_in_ring_order[2-shape0-bfloat16]",),
    ),
    Mutation(
        "abandoned-gather-out-of-step",
        "epoch + 1",
        "ditron_train/stream/op_context.py",
        "channel.tickets[1:2].copy_(channel.tickets[:1])",
        "pass",
        (f"{TP_OPS}::test_an_op_that_all_ranks_abort_in_the_middle_leaves_the_next_ones_right[wgrad]",),
    ),
    Mutation(
        "recorded-though-its-key-says-too-little",
        "stale recording",
        "ditron_train/stream/plan.py",
        "and enqueue() is not False:",
        "and (enqueue(),):",
        (
            "tests/stream/test_recorded_graph.py::test_what_its_key_does_not_name_is_not_recorded",
            f"{TP_OPS}::test_recorded_ops_are_named_by_all_that_they_depend_on",
        ),
    ),
    Mutation(
        "gather-left-open-where-own-rows-fail",
        "dropped abort",
        "ditron_train/tp/gather.py",
        "            except BaseException:\n                self.abort()\n",
        "            except BaseException:\n",
        (f"{TP_OPS}::test_a_copy_of_own_rows_that_fails_leaves_no_open_epoch",),
    ),
    Mutation(
        "bias-inside-added-twice",
        "bias added twice",
        "ditron_train/tp/linear.py",
        "y = y if bias is None or rounds_once else y + bias",
        "y = y if bias is None else y + bias",
        (f"{TP_OPS}::test_a_bias_inside_the_product_is_rounded_with_it[24]",),
    ),
    Mutation(
        "row-wgrad-transposed",
        "swapped operand",
        "ditron_train/tp/linear.py",
        "            grad_weight = ctx.wgrad(total_grad, as_rows(x))",
        "            grad_weight = ctx.wgrad(as_rows(x), total_grad)",
        (f"{TP_OPS}::test_linear_layers_and_all_gradients",),
    ),
    Mutation(
        "uneven-split-off-by-one",
        "off by one in an uneven split",
        "ditron_train/schedule/orders.py",
        "last_row = np.minimum(first_row + block_m, num_rows) - 1",
        "last_row = np.minimum(first_row + block_m, num_rows - 1)",
        ("tests/schedule/test_orders.py",),
    ),
    # Signals inside kernels, symmetric memory.
    Mutation(
        "epochs-begin-at-zero",
        "epoch - 1",
        "ditron_train/lang/waits.py",
        "return ((ticket >> TICKET_UNIT_LOG2) + 1).to(tl.int32)",
        "return (ticket >> TICKET_UNIT_LOG2).to(tl.int32)",
        (f"{LANG}::test_an_all_gather_made_of_primitives[float32-2]",),
    ),
    Mutation(
        "start-signals-of-the-call-before",
        "epoch - 1",
        "ditron_train/lang/start_signals.py",
        "wait(ready_ptr + ((epoch & 1) * WORLD_SIZE + peer) * READY_WORDS, epoch, control_ptr, peer, -1, TARGET)",
        "wait(ready_ptr + ((epoch & 1) * WORLD_SIZE + peer) * READY_WORDS, epoch - 2, control_ptr, peer, -1, TARGET)",
        (f"{TP_OPS}::test_mismatch_is_the_same_error_on_every_rank[known]",),
    ),
    Mutation(
        "signature-compared-from-its-second-field-on",
        "stale signature",
        "ditron_train/lang/start_signals.py",
        "different = tl.sum(((theirs != mine) & (lanes > 0)).to(tl.int32), axis=0)",
        "different = tl.sum(((theirs != mine) & (lanes > 1)).to(tl.int32), axis=0)",
        (f"{LANG}::test_different_signatures_are_one_error_on_every_rank",),
    ),
    Mutation(
        "abort-not-set",
        "abort not set",
        "ditron_train/lang/waits.py",
        "    control[layout.CONTROL_ABORT] = 1\n",
        "",
        (f"{LANG}::test_a_wait_takes_its_deadline_and_later_ones_nothing",),
    ),
    Mutation(
        "deadline-ten-times-as-long",
        "deadline ignored",
        "ditron_train/symm/channel.py",
        "min(int(self.timeout_s * 1e9), 2**62)",
        "min(int(self.timeout_s * 1e10), 2**62)",
        (f"{LANG}::test_a_wait_takes_its_deadline_and_later_ones_nothing",),
    ),
    Mutation(
        "timeout-not-read",
        "setting not read",
        "ditron_train/symm/channel.py",
        "self.timeout_s = get_settings().timeout_s",
        "self.timeout_s = 20.0",
        (f"{LANG}::test_a_wait_takes_its_deadline_and_later_ones_nothing",),
    ),
    Mutation(
        "recorded-failure-not-raised",
        "error swallowed",
        "ditron_train/symm/channel.py",
        "        if self._error is not None:\n            raise self._error",
        "        if self._error is not None:\n            return",
        (f"{LANG}::test_different_signatures_are_one_error_on_every_rank",),
    ),
    Mutation(
        "new-flags-start-at-zero",
        "epoch - 1",
        "ditron_train/symm/channel.py",
        "epoch = self.epoch  # a fresh flag must not be ahead of it after a wrap",
        "epoch = 0",
        ("tests/symm/test_arena.py::test_new_flags_start_at_the_epoch",),
    ),
    Mutation(
        "buffer-sizes-not-compared",
        "skipped comparison",
        "ditron_train/symm/arena.py",
        "if len(set(request[:2] for request in requests)) > 1:",
        "if len(set(request[0] for request in requests)) > 1:",
        ("tests/symm/test_arena.py::test_different_requests_are_the_same_error_on_every_rank",),
    ),
    Mutation(
        "cap-of-own-rank-only",
        "decision on one rank only",
        "ditron_train/symm/arena.py",
        "for rank, (_, _, rank_cap, rank_size) in enumerate(requests):",
        "for rank, (_, _, rank_cap, rank_size) in [(self.rank, requests[self.rank])]:",
        ("tests/symm/test_arena.py::test_a_cap_is_the_same_error_on_every_rank",),
    ),
    Mutation(
        "exchange-forgotten-while-it-is-read",
        "buffer reused too early",
        "ditron_train/symm/exchange.py",
        "self._forget(self._number - 1)  # all have read it: they are here",
        "self._forget(self._number)",
        ("tests/symm/test_exchange.py::test_groups_that_overlap_exchange_in_sequence_and_leave_the_last_values",),
    ),
    # Streams.
    Mutation(
        "calls-on-two-streams-not-ordered",
        "dropped wait of a stream",
        "ditron_train/stream/call_order.py",
        "            stream.wait_stream(last)",
        "            pass",
        ("tests/stream/test_call_order.py",),
    ),
    Mutation(
        "flag-before-its-data",
        "dropped wait of a stream",
        "ditron_train/stream/copies.py",
        "            yield destination, source + offset, num_bytes\n        yield flag, word, 4",
        "            yield flag, word, 4\n            yield destination, source + offset, num_bytes",
        ("tests/stream/test_copies.py",),
    ),
    Mutation(
        "watchdog-takes-the-turns-of-now",
        "deadline ignored",
        "ditron_train/stream/waits.py",
        "timeout_s = entry.turns * entry.channel.timeout_s",
        "timeout_s = entry.channel.turns * entry.channel.timeout_s",
        ("tests/stream/test_waits.py",),
    ),
    Mutation(
        "waits-of-one-turn",
        "deadline ignored",
        "ditron_train/stream/waits.py",
        "deadline_s = time.monotonic() + turns * channel.timeout_s",
        "deadline_s = time.monotonic() + channel.timeout_s",
        (f"{CHANNEL}::test_an_error_names_the_deadline_that_was_waited_for",),
    ),
    Mutation(
        "release-is-not-recorded",
        "error swallowed",
        "ditron_train/stream/waits.py",
        "            self._record(entry, flag.value)\n",
        "",
        ("tests/stream/test_waits.py",),
    ),
    # Ulysses.
    Mutation(
        "heads-of-the-wrong-rank",
        "wrong rank in an exchange",
        "ditron_train/sp/transfer.py",
        "        first_group = source * shape.num_groups",
        "        first_group = rank * shape.num_groups",
        (f"{SP_OPS}::test_exchanges_move_any_bits[2-5]",),
    ),
    Mutation(
        "rows-taken-before-they-arrive",
        "dropped wait in a kernel",
        "ditron_train/sp/transfer.py",
        "dl.wait_many(flags, flags_per_block, epoch, channel.control, source, first_flag, FLAGS, TARGET)",
        "dl.wait_many(flags, flags_per_block, epoch - 1, channel.control, source, first_flag, FLAGS, TARGET)",
        (f"{SP_OPS}::test_rows_that_arrive_late_are_waited_for",),
    ),
    Mutation(
        "rows-multiplied-before-they-arrive",
        "dropped wait in a kernel",
        "ditron_train/sp/a2a_gemm.py",
        "dl.wait_ranks(flags, num_flag_blocks, epoch, channel.control, flag_block, WORLD_SIZE, RANKS_POW2, TARGET)",
        "dl.wait_ranks(flags, num_flag_blocks, epoch - 1, channel.control, flag_block, WORLD_SIZE, RANKS_POW2, "
        "TARGET)",
        (f"{SP_OPS}::test_rows_that_arrive_late_are_waited_for",),
    ),
    Mutation(
        "second-half-of-the-sequence-shifted",
        "off by one in an uneven split",
        "ditron_train/sp/transfer.py",
        "second = (2 * COPY.world_size - 2 - owner) * shape.half_rows + row",
        "second = (2 * COPY.world_size - 1 - owner) * shape.half_rows + row - 1",
        (f"{SP_OPS}::test_exchanges_move_any_bits[2-5]",),
    ),
    Mutation(
        "packed-rows-of-the-next-chunk",
        "off by one in an uneven split",
        "ditron_train/sp/layouts.py",
        "chunk = torch.where(offset < half, rank, 2 * world_size - 2 - rank)",
        "chunk = torch.where(offset < half, rank, 2 * world_size - 1 - rank)",
        (f"{SP_OPS}::test_packed_sequences",),
    ),
    Mutation(
        "packed-sums-begin-with-the-own-rank",
        "reduction order",
        "ditron_train/sp/exchange.py",
        "of_ranks[:, (context.rank + 1 + step) % world]",
        "of_ranks[:, (context.rank + step) % world]",
        (f"{SP_OPS}::test_packed_rows_to_all_ranks_and_sums_back",),
    ),
    Mutation(
        "bias-of-the-first-rank",
        "bias on the wrong rank",
        "ditron_train/sp/functions.py",
        "own = bias.view(context.world_size, layout.num_groups, -1)[context.rank]",
        "own = bias.view(context.world_size, layout.num_groups, -1)[0]",
        (f"{SP_OPS}::test_a_bias_is_that_of_a_ranks_own_heads",),
    ),
    Mutation(
        "borrowed-rows-kept-for-backward",
        "buffer reused too early",
        "ditron_train/sp/functions.py",
        'return_gathered="copy" if keep else "no"',
        'return_gathered="borrow" if keep else "no"',
        ("tests/native/test_sp.py::test_gpt_on_two_ranks[plain]",),
    ),
    # Expert parallelism.
    Mutation(
        "combine-adds-in-ascending-order",
        "reduction order",
        "ditron_train/ep/combine.py",
        "nth = SUM.TOPK - 1 - step if SUM.DESCENDING and not SUM.BY_RANK else step",
        "nth = step",
        (f"{MOVEMENT}::test_two_ranks[random-(9, 6)-e8k5-descending]",),
    ),
    Mutation(
        "ranks-sum-in-ascending-order",
        "reduction order",
        "ditron_train/ep/combine.py",
        "nth = count - 1 - step if SUM.DESCENDING else step",
        "nth = step",
        (f"{MOVEMENT}::test_two_ranks[random-(12, 9)-e12k8-by_rank_descending1]",),
        index=0,
    ),
    Mutation(
        "sums-of-ranks-in-descending-order",
        "reduction order",
        "ditron_train/ep/combine.py",
        "if SUM.DESCENDING and not SUM.BY_RANK else step",
        "if SUM.DESCENDING else step",
        (f"{MOVEMENT}::test_four_ranks[random-(9, 4, 1, 17)]",),
    ),
    Mutation(
        "flex-routes-by-the-map",
        "probs not applied",
        "ditron_train/megatron/ep/flex_dispatcher.py",
        "chosen = torch.topk(expanded.detach(), self._comm_manager.router_topk, dim=-1).indices",
        "chosen = torch.topk(self._initialize_metadata(routing_map, probs)[0].flatten(1).int(), "
        "self._comm_manager.router_topk, dim=-1).indices",
        ("tests/native/test_flex.py::test_layer_equals_deepeps_order[probabilities_of_zero]",),
    ),
    Mutation(
        "combine-rounds-only-at-the-end",
        "rounding skipped",
        "ditron_train/ep/combine.py",
        "                    if SUM.ROUND_EACH and not SUM.BY_RANK:\n"
        "                        total = total.to(dtype).to(tl.float32)\n",
        "",
        (f"{MOVEMENT}::test_two_ranks[random-(6, 3)-e8k6-ascending_rounded]",),
    ),
    Mutation(
        "rows-counted-with-own-ones",
        "missing dispatch count",
        "ditron_train/ep/layout.py",
        "before = tl.sum(tl.where((ranks < rank)[:, None], counts, 0), axis=0)",
        "before = tl.sum(tl.where((ranks <= rank)[:, None], counts, 0), axis=0)",
        (f"{MOVEMENT}::test_two_ranks[random-(12, 12)-e8k2-ascending_rounded]",),
    ),
    Mutation(
        "rows-without-a-probability-copied",
        "probs not applied",
        "ditron_train/ep/dispatch.py",
        "            read = held & (prob != 0.0)",
        "            read = held",
        (f"{MOVEMENT}::test_two_ranks[padded-(7, 7)-e10k1-descending]",),
    ),
    Mutation(
        "probs-without-their-dispatch",
        "probs not applied",
        "ditron_train/ep/dispatch.py",
        "            tl.store(placed.probs + row, prob.to(placed.probs.dtype.element_ty), mask=held)\n",
        "            tl.store(placed.probs + row, (prob != 0.0).to(placed.probs.dtype.element_ty), mask=held)\n",
        (f"{MOVEMENT}::test_two_ranks[random-(12, 12)-e8k2-ascending_rounded]",),
    ),
    Mutation(
        "overflow-of-rows-not-recorded",
        "error swallowed",
        "ditron_train/ep/layout.py",
        "            if rows > row_capacity:\n",
        "            if slots > row_capacity:\n",
        (f"{MOVEMENT}::test_overflow_is_an_error_that_names_expert_rank_and_setting[2-32 rows for slot 0]",),
    ),
    Mutation(
        "chunks-placed-before-they-arrive",
        "dropped wait in a kernel",
        "ditron_train/ep/dispatch.py",
        "            dl.wait(flag, epoch, inbox.control, source, chunk, MOVE.TARGET)",
        "            dl.wait(flag, epoch - 1, inbox.control, source, chunk, MOVE.TARGET)",
        (f"{MOVEMENT}::test_rows_that_arrive_late_are_waited_for",),
    ),
    Mutation(
        "rows-summed-before-they-return",
        "dropped wait in a kernel",
        "ditron_train/ep/combine.py",
        "                dl.wait(flag, epoch, inbox.control, peer, chunk, SUM.TARGET)",
        "                dl.wait(flag, epoch - 1, inbox.control, peer, chunk, SUM.TARGET)",
        (f"{MOVEMENT}::test_rows_that_arrive_late_are_waited_for",),
    ),
    Mutation(
        "expert-wgrad-transposed",
        "transposed gradient",
        "ditron_train/ep/dispatcher.py",
        "grads = ctx.call.weight_grads(grad_rows, h, weights)",
        "grads = ctx.call.weight_grads(h, grad_rows, weights)",
        ("tests/ep/test_fused.py::test_expert_functions_and_their_gradients",),
    ),
    Mutation(
        "expert-wgrad-reads-the-next-experts-rows",
        "mask of the last tile",
        "ditron_train/ep/grouped_gemm.py",
        "        valid = tl.minimum(end - k, GEMM.BLOCK_K)",
        "        valid = tl.minimum(end - first, GEMM.BLOCK_K)",
        ("tests/ep/test_group_gemm.py::test_forward_and_all_gradients_are_exact",),
    ),
    # Pipelines.
    Mutation(
        "lanes-share-a-ring",
        "messages of two lanes mixed",
        "ditron_train/pp/slots.py",
        "return self._bases[rank] + (lane * self.count + message % self.count) * self.num_bytes",
        "return self._bases[rank] + (message % self.count) * self.num_bytes",
        (f"{CHANNEL}::test_a_thousand_messages_each_way",),
    ),
    Mutation(
        "sender-one-message-too-far-ahead",
        "buffer reused too early",
        "ditron_train/pp/endpoints.py",
        "taken = message - self.slots.count + 1",
        "taken = message - self.slots.count",
        (f"{CHANNEL}::test_a_sender_is_never_more_than_the_slots_ahead[1]",),
    ),
    Mutation(
        "messages-copied-out-concurrently",
        "dropped wait of a stream",
        "ditron_train/pp/endpoints.py",
        "            self._events.record(self._copied_on).hold(stream)",
        "            pass",
        ("tests/pp/test_streams.py::test_messages_of_the_ring_are_copied_out_in_sequence",),
    ),
    Mutation(
        "sizes-of-messages-not-compared",
        "skipped comparison",
        "ditron_train/pp/messages.py",
        "return kinds[0] == kinds[1] and math.prod(self.shape) == math.prod(expected.shape)",
        "return kinds[0] == kinds[1]",
        (f"{CHANNEL}::test_neighbours_that_disagree_raise_the_same_error[size-[8, 5] float32]",),
    ),
    Mutation(
        "fault-of-a-peer-not-raised",
        "error swallowed",
        "ditron_train/pp/channel.py",
        "        return super().failed or self.mailbox.failure.is_posted",
        "        return super().failed",
        (f"{CHANNEL}::test_a_failure_of_one_rank_is_known_to_all",),
    ),
    # GEMMs and Muon.
    Mutation(
        "products-summed-in-their-own-type",
        "accumulation in bf16",
        "ditron_train/gemm/kernels.py",
        'acc = tl.dot(a, b, acc, input_precision="ieee", max_num_imprecise_acc=FP8_CHAIN)',
        'acc = tl.dot(a, b, acc, input_precision="ieee", max_num_imprecise_acc=FP8_CHAIN).to(a.dtype).to(tl.float32)',
        ("tests/gemm/test_ops.py::test_sums_are_made_in_fp32",),
    ),
    Mutation(
        "main-grad-takes-a-rounded-product",
        "accumulation in bf16",
        "ditron_train/gemm/main_grad.py",
        "total = torch.mm(grad.t().float(), x.float())",
        "total = torch.mm(grad.t(), x).float()",
        ("tests/gemm/test_main_grad.py",),
    ),
    Mutation(
        "second-halves-of-the-tail-left-out",
        "mask of the last tile",
        "ditron_train/gemm/kernels.py",
        "            col = tile_n * BLOCK_N + (half_id % 2) * (BLOCK_N // 2)",
        "            col = tile_n * BLOCK_N",
        ("tests/gemm/test_ops.py::test_a_halved_tail_covers_every_element_once",),
    ),
    Mutation(
        "addmm-operands-swapped",
        "swapped operand",
        "ditron_train/optim/products.py",
        "return addmm(x, b_matrix, x, alpha=1.0, beta=a, config=of_update)",
        "return addmm(x, b_matrix, x, alpha=a, beta=1.0, config=of_update)",
        ("tests/optim/test_muon.py::test_half_products_give_the_weights_of_whole_tile_products",),
    ),
    Mutation(
        "symmetric-half-not-transposed",
        "symmetric half not mirrored",
        "ditron_train/optim/kernels.py",
        "    c_desc.store([col, row], block.T)",
        "    c_desc.store([col, row], block)",
        ("tests/optim/test_products.py::test_gram_is_exact_and_symmetric",),
    ),
    Mutation(
        "symmetric-half-not-stored",
        "symmetric half not mirrored",
        "ditron_train/optim/kernels.py",
        "    c_desc.store([col, row], block.T)\n",
        "",
        ("tests/optim/test_products.py::test_gram_is_exact_and_symmetric",),
    ),
    Mutation(
        "muon-shards-in-reverse",
        "gathered in the wrong order",
        "ditron_train/optim/muon.py",
        "gathered = torch.cat(shards, dim=dim)",
        "gathered = torch.cat(shards[::-1], dim=dim)",
        ("tests/optim/test_sharding.py::test_duplicated_mode_gives_the_shard_of_the_whole_step[0]",),
    ),
    Mutation(
        "matrix-sent-before-its-step",
        "buffer sent too early",
        "ditron_train/optim/sharding.py",
        "            step_one(index)\n            self.send_round()",
        "            self.send_round()\n            step_one(index)",
        ("tests/optim/test_sharding.py::test_sharded_steps_equal_unsharded_ones_and_momentum_lives_on_one_rank[2]",),
    ),
    # The policy.
    Mutation(
        "other-inputs-not-compared",
        "compared on one input only",
        "ditron_train/policy/probe.py",
        "for pair in ((native, fused), *extra_cases)",
        "for pair in ((native, fused),)",
        (f"{POLICY}::test_one_wrong_bit_or_one_slow_rank_decides_for_all",),
    ),
    Mutation(
        "bits-of-one-mode-not-compared",
        "skipped comparison",
        "ditron_train/policy/decide.py",
        'if mode != "fast" and not seen.bits_equal:',
        'if mode == "strict" and not seen.bits_equal:',
        (f"{POLICY}::test_judgement",),
    ),
    Mutation(
        "sign-of-zero-not-compared",
        "skipped comparison",
        "ditron_train/runtime/values.py",
        "return torch.equal(a.resolve_neg().view(words), b.resolve_neg().view(words))",
        "return torch.equal(a, b)",
        ("tests/runtime/test_values.py",),
    ),
    Mutation(
        "each-rank-judges-its-own-times",
        "decision on one rank only",
        "ditron_train/policy/probe.py",
        "    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)\n",
        "",
        (f"{POLICY}::test_one_wrong_bit_or_one_slow_rank_decides_for_all",),
    ),
    Mutation(
        "each-rank-takes-its-own-plan",
        "decision on one rank only",
        "ditron_train/policy/decide.py",
        "    dist.all_reduce(lowest_and_negated_highest, op=dist.ReduceOp.MIN, group=group)\n",
        "",
        (f"{POLICY}::test_plan_is_written_read_and_overruled_where_ranks_disagree",),
    ),
    Mutation(
        "plan-of-another-policy",
        "plan of another policy accepted",
        "ditron_train/policy/decide.py",
        "key = f\"{key} on {place} ({mode}{'; ' * bool(switches())}{', '.join(switches())})\"",
        "key = f\"{key} on {place} (strict{'; ' * bool(switches())}{', '.join(switches())})\"",
        (f"{POLICY}::test_a_decision_is_of_the_policy_that_it_was_made_under",),
    ),
    Mutation(
        "stale-plan-taken",
        "stale plan accepted",
        "ditron_train/policy/plan.py",
        "             for name in sorted({*here, *there}) if there.get(name) != here.get(name)]  # fmt: skip",
        "             for name in sorted(there) if name in here and there.get(name) != here.get(name)]  # fmt: skip",
        (f"{POLICY}::test_a_plan_is_of_one_environment",),
    ),
    Mutation(
        "memory-check-passes",
        "memory check passes always",
        "ditron_train/policy/probe.py",
        "(missing_bytes,) = _most_of_ranks([float(needed_bytes - free_bytes)], device, group)",
        "(missing_bytes,) = _most_of_ranks([float(min(needed_bytes - free_bytes, 0))], device, group)",
        (f"{POLICY}::test_where_one_rank_has_too_little_memory_no_rank_compares",),
    ),
    Mutation(
        "unsupported-calls-tried",
        "fallback not taken",
        "ditron_train/policy/gate.py",
        "    reason = op.unsupported_reason(call)\n",
        "    reason = None\n",
        ("tests/megatron_plugin/test_switch.py::test_one_log_line_for_each_reason_on_rank_0",),
    ),
    Mutation(
        "fused-path-never-taken",
        "fused path never taken",
        "ditron_train/policy/gate.py",
        "    if decision.use_ditron:\n",
        "    if decision.use_ditron and decision.bits_equal:\n",
        (f"{LAYERS}::test_layers_equal_native[no-bias-2]",),
    ),
    Mutation(
        "an-error-of-one-rank-is-native",
        "error swallowed",
        "ditron_train/policy/gate.py",
        "if not all(str(one).startswith(_FAILED) for one in gathered):",
        "if not any(str(one).startswith(_FAILED) for one in gathered):",
        ("tests/policy/test_specs.py::test_an_error_of_some_ranks_is_raised_if_the_others_exchange_something_else",),
    ),
    Mutation(
        "order-of-nccl-not-asked",
        "fallback not taken",
        "ditron_train/policy/decide.py",
        "        elif order is not None and not order.is_fused:",
        "        elif order is not None and order.reason is None and not order.is_fused:",
        ("tests/policy/test_order.py::test_an_order_that_is_not_fused_stays_native_unprobed",),
    ),
    # Megatron's layers.
    Mutation(
        "restore-leaves-classes-redirected",
        "restore does not restore",
        "ditron_train/megatron/plugin/patching.py",
        "            namespace[key] = native\n    _redirected.clear()",
        "            namespace[key] = native",
        ("tests/megatron_plugin/test_patching.py",),
    ),
    Mutation(
        "restore-leaves-names-replaced",
        "restore does not restore",
        "ditron_train/megatron/plugin/patching.py",
        "        if namespace.get(key) is fused:",
        "        if namespace.get(key) is native:",
        ("tests/megatron_plugin/test_patching.py",),
    ),
    Mutation(
        "a-setting-that-ranks-do-not-compare",
        "decision on one rank only",
        "ditron_train/megatron/plugin/rank_agreement.py",
        '_OWN = ("timeout_s", "arena_bytes", "postmortem", "features")',
        '_OWN = ("timeout_s", "arena_bytes", "postmortem", "features", "policy")',
        ("tests/megatron_plugin/test_agreement.py::test_the_same_words_on_every_rank[policy-True]",),
    ),
    Mutation(
        "main-grad-overwritten",
        "gradient not accumulated",
        "ditron_train/megatron/shared/wgrad.py",
        "            _accumulate(total_input, grad_output, main_grad)",
        "            write_wgrad(main_grad, grad_output, total_input)",
        (f"{LAYERS}::test_wgrad_into_main_grad[flag]",),
    ),
    Mutation(
        "returned-bias-added-too",
        "bias added twice",
        "ditron_train/megatron/tp/layers.py",
        "            return output, self.bias\n",
        "            return (output if self.bias is None else output + self.bias), self.bias\n",
        (f"{LAYERS}::test_layers_equal_native[bias-returned-2]",),
    ),
    Mutation(
        "row-layers-without-sequence-parallelism-native",
        "fused path never taken",
        "ditron_train/megatron/tp/routing.py",
        'if kind == "column" and not sequence_parallel:',
        "if not sequence_parallel:",
        (f"{LAYERS}::test_layers_without_sequence_parallelism_equal_native[2-options0-False]",),
    ),
    Mutation(
        "sharding-setting-not-read",
        "setting not read",
        "ditron_train/megatron/muon/optimizer.py",
        "choice = get_settings().muon_sharding",
        'choice = "auto"',
        ("tests/native/test_muon.py::test_matrices_are_dealt_out_by_cost_where_it_helps",),
    ),
    Mutation(
        "sums-of-an-embedding-rounded-once",
        "rounding skipped",
        "ditron_train/embedding/lookup.py",
        "total = (total + addend.to(tl.float32)).to(sums.dtype.element_ty).to(tl.float32)",
        "total = total + addend.to(tl.float32)",
        ("tests/embedding/test_lookup.py",),
    ),
    Mutation(
        "tokens-of-a-word-in-reverse",
        "reduction order",
        "ditron_train/embedding/lookup.py",
        "token = tl.load(tokens + place)",
        "token = tl.load(tokens + begin + end - 1 - place)",
        ("tests/embedding/test_lookup.py",),
    ),
    Mutation(
        "frozen-embedding-not-native",
        "fallback not taken",
        "ditron_train/megatron/det/embedding.py",
        "torch.is_grad_enabled() and self.weight.requires_grad",
        "torch.is_grad_enabled()",
        ("tests/megatron_plugin/test_embedding.py::test_what_stays_native[frozen]",),
    ),
)
