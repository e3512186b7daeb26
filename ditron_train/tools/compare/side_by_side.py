"""Shows the jobs of a comparison side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from rich.table import Table

from ditron_train.tools.compare.memory import memory_gib, memory_sentence
from ditron_train.tools.compare.steps import PARAMETERS, Difference, Job, Runs, Step, count_figures
from ditron_train.tools.tables import terminal

_SHOWN = 12


def spread_of(times: Sequence[float]) -> float:
    """Between the least and the most of them, relative to their mean."""
    return (max(times) - min(times)) / mean(times)


def means_of(runs: Runs, figure: Callable[[Job], float | None]) -> tuple[float, float] | None:
    """The mean of a figure over the native jobs and over the fused ones; None if no job of a kind has it."""
    native, fused = ([value for job in jobs if (value := figure(job)) is not None] for jobs in runs)
    return (mean(native), mean(fused)) if native and fused else None


def show(runs: Runs, found: Sequence[Difference], own: Sequence[Difference], skip: int) -> bool:
    """Prints losses, times and the verdict.

    Args:
        runs: The jobs; the first native one is what all others are compared with.
        found: Where the fused ones differ from it.
        own: Where native ones do.
        skip: Steps that are not timed.

    Returns:
        Whether all have as many steps, and all is equal up to the one from which native does not repeat itself.
    """
    console, native = terminal(), runs.native[0]
    console.print(_table(native, runs.fused[0]))
    console.print(_times(runs, skip), highlight=False)
    clocks = means_of(runs, lambda job: job.clock_mhz(skip))
    if clocks is not None:
        console.print(f"clock of the multiprocessors: {clocks[0]:.0f} MHz, {clocks[1]:.0f} MHz", highlight=False)
    joules = means_of(runs, lambda job: job.step_joules(skip))
    if joules is not None:
        watts = (mean(job.power_w(skip) or 0.0 for job in jobs) for jobs in runs)
        words = (f"{energy:.0f} J, {power:.0f} W" for energy, power in zip(joules, watts))
        console.print(f"energy and power of a step on a GPU: {'; '.join(words)}", highlight=False)
    memory = memory_gib(runs)
    if memory is not None:
        console.print(memory_sentence(memory), highlight=False, soft_wrap=True)
    first_own = min((difference.step for difference in own), default=None)
    counted = [difference for difference in found if first_own is None or difference.step < first_own]
    uneven = _uneven(runs)
    is_equal = not counted and uneven is None
    if not is_equal or any(runs.fused_calls.values()):  # native beside native says nothing
        console.print(_verdict(runs, uneven, counted, own), highlight=False, markup=False)
    return is_equal


def _times(runs: Runs, skip: int) -> str:
    times = runs.times_ms(skip)
    if times is None:
        return f"no step behind the first {skip} was timed: train longer, or set --skip"
    native_ms, fused_ms = map(mean, times)
    lines = [
        f"time of a step, behind the first {skip}: natively {native_ms:.1f} ms, with ditron_train {fused_ms:.1f} ms: "
        f"{native_ms / fused_ms:.3f}x"
    ]
    if len(times[0]) + len(times[1]) > 2:
        each = (f"{', '.join(f'{ms:.1f}' for ms in jobs)} (spread {100 * spread_of(jobs):.1f} %)" for jobs in times)
        lines.append("means of the jobs natively {}, with ditron_train {}".format(*each))
    return "\n".join(lines)


def _uneven(runs: Runs) -> str | None:
    """How many steps the first job has that has not as many as the first native one; None if all have."""
    steps = len(runs.native[0])
    for jobs, words in ((runs.fused, "with ditron_train"), (runs.native, "natively the next time")):
        others = [len(job) for job in jobs if len(job) != steps]
        if others:
            return f"{steps} steps natively, {others[0]} {words}"
    return None


def _verdict(runs: Runs, uneven: str | None, counted: Sequence[Difference], own: Sequence[Difference]) -> str:
    if counted:
        more = f" and {len(counted) - 1} more" if len(counted) > 1 else ""
        return f"DIFFERENT: {_words(counted[0])}{more}"
    if uneven is not None:
        return f"DIFFERENT: {uneven}"
    if own:
        return (
            f"native does not repeat itself: {_words(own[0])}; all before that is equal. Its deterministic "
            "settings change "
            "that: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, NCCL_ALGO=Ring, CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    native = runs.native[0]
    what, missing = _digests((native, *runs.fused))
    return (
        f"equal: all {count_figures((native, runs.fused[0]))} figures of {len(native)} steps on {len(native.ranks)} "
        f"ranks (losses, gradient norms{what}){missing}"
    )


def _digests(jobs: Sequence[Job]) -> tuple[str, str]:
    """After which steps every rank of all jobs has a digest of its parameters; and a warning if the last has none,
    as in a job that ended before the step that Megatron was told is the last."""
    steps = list(zip(*(steps for job in jobs for steps in job.ranks)))
    noted = [one[0].number for one in steps if all(PARAMETERS in step.figures for step in one)]
    after = f"step{'s' if len(noted) > 1 else ''} {', '.join(map(str, noted))}"
    what = f", digests of the optimizer's parameters after {after}" if noted else ""
    last = steps[-1][0].number
    missing = f"; parameters after the last step, {last}, were NOT compared: the jobs ended before they noted a digest"
    return what, "" if last in noted else missing


def _words(difference: Difference) -> str:
    one, other = (_decimal(value) for value in difference.values)
    return f"{difference.name} of step {difference.step} on rank {difference.rank}: {one}, {other}"


def _decimal(text: str | None) -> str:
    """A hexadecimal float in decimal digits; a digest as it is."""
    if text is None:
        return "-"
    return f"{float.fromhex(text):.9g}" if not text.isalnum() or text in ("inf", "nan") else text


def _table(native: Job, fused: Job) -> Table:
    """Some of the steps, evenly spread, on the last rank: the one that has losses in a pipeline, too."""
    steps = list(zip(native.ranks[-1], fused.ranks[-1]))
    stride = -(-len(steps) // _SHOWN)
    kept = [pair for index, pair in enumerate(steps) if index % stride == 0 or index == len(steps) - 1]
    names = list(dict.fromkeys(name for a, _ in steps for name in a.figures if name != PARAMETERS))
    table = Table(title=f"{len(native.ranks)} ranks, {len(steps)} steps", title_justify="left")
    for column in (
        "step",
        *(f"{name}, {kind}" for name in names for kind in ("native", "fused")),
        "equal",
        "ms",
        "ms, fused",
    ):
        table.add_column(column, justify="right")
    for a, b in kept:
        figures = [_decimal(step.figures.get(name)) for name in names for step in (a, b)]
        table.add_row(str(a.number), *figures, "yes" if a.figures == b.figures else "NO", _ms(a), _ms(b))
    return table


def _ms(step: Step) -> str:
    return "-" if step.seconds is None else f"{step.seconds * 1e3:.1f}"
