"""How much memory a fused job may take beside a native one.

On GPUs the driver allocates symmetric memory, outside of what torch's allocator has reserved, so the rule has two
parts: the peak of what is reserved grows by `SLACK_GIB` at most, and what is in use of the GPU by `SLACK_GIB` and the
symmetric memory at most. The worst rank of the worst job of each kind counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from ditron_train.tools.compare.steps import Runs

SLACK_GIB = 0.3


def memory_gib(runs: Runs) -> dict[str, float] | None:
    """``memory_gib`` of `ditron_train.tools.results.Row`; None without a GPU, or if the records are older."""
    figures = {"": "reserved_bytes", "_used": "used_bytes", "_symmetric": "symmetric_bytes"}
    gib = {
        f"{kind}{end}": max((job.most(name) or 0) / 2**30 for job in jobs)
        for end, name in figures.items()
        for kind, jobs in (("native", runs.native), ("ditron", runs.fused))
    }
    if not (gib["native"] and gib["ditron"]):
        return None
    reserved, used, symmetric = (gib[f"ditron{end}"] - gib[f"native{end}"] for end in figures)
    gib["excess"] = max(reserved, used - symmetric) - SLACK_GIB
    return {name: round(value, 3) for name, value in gib.items()}


def memory_sentence(memory: Mapping[str, float]) -> str:
    """The numbers and the verdict in one line."""
    verdict = "MEMORY RULE BROKEN by {excess:.2f} GiB" if memory["excess"] > 0 else "memory is within the rule"
    reserved = "peak reserved memory {native:.2f} GiB natively, {ditron:.2f} GiB fused"
    used = "memory in use {native_used:.2f} GiB, {ditron_used:.2f} GiB, {ditron_symmetric:.2f} GiB of it symmetric"
    return f"{verdict}: on the worst rank {reserved}; {used}".format(**memory)
