"""What two runs of the same training have in common, and what not; as table, picture and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from byte_gpt import StepResult
from rich.console import Console
from rich.table import Table

__all__ = ["Comparison", "median_time_ms", "plot_losses", "print_table", "write_json"]

Difference = tuple[int, str]  # step, and "loss" or a parameter's name


def _differences(left: Sequence[StepResult], right: Sequence[StepResult]) -> set[Difference]:
    """Where two runs differ on any rank (the same answer on every rank)."""
    found: set[Difference] = set()
    for step, (a, b) in enumerate(zip(left, right)):
        if a.loss != b.loss:
            found.add((step, "loss"))
        found.update((step, name) for name in a.gradients if a.gradients[name] != b.gradients[name])
    everywhere: list[set[Difference]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return set().union(*everywhere)


class Comparison:
    """Ditron_train's run against the native one, given that the native run itself may not repeat.

    Attributes:
        unstable: Losses and gradients in which two native runs differ: named, and left out of the verdict.
        different: Losses and gradients that native repeats and ditron_train does not give bit for bit.
        largest: Largest difference of a loss.
    """

    def __init__(
        self, native: Sequence[StepResult], again: Sequence[StepResult] | None, ditron: Sequence[StepResult]
    ) -> None:
        """Collective: every rank gives its own results."""
        unstable = _differences(native, again) if again is not None else set()
        self.unstable = sorted({name for _, name in unstable})
        # Once a gradient is not repeated, the weights after that step are not either: compare up to there only.
        first = min((step for step, _ in unstable), default=len(native))
        compared = {entry for entry in _differences(native, ditron) if entry[0] <= first and entry not in unstable}
        self.compared_steps = min(first + 1, len(native))
        self.different = sorted(compared)
        self.largest = max(abs(a.loss - b.loss) for a, b in zip(native, ditron))


def median_time_ms(results: Sequence[StepResult]) -> float:
    """Median over the steps (the first ones, which compile and warm up, left out) of the slowest rank's time."""
    times: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(times, [result.time_ms for result in results])
    slowest = [max(step) for step in zip(*times)]
    return statistics.median(slowest[min(3, len(slowest) - 1) :])


def print_table(
    console: Console,
    native: Sequence[StepResult],
    ditron: Sequence[StepResult],
    times_ms: tuple[float, float],
    note: str,
) -> None:
    """Losses side by side (at most 20 rows), and the time per step, with ``note`` behind it."""
    table = Table(title="loss of every step, same seed, same data")
    for title in ("step", "native", "ditron_train", "difference"):
        table.add_column(title, justify="right")
    stride = max(1, len(native) // 20)
    for step, (a, b) in enumerate(zip(native, ditron)):
        if step % stride == 0 or step == len(native) - 1:
            difference = "0" if a.loss == b.loss else f"{b.loss - a.loss:+.1e}"
            table.add_row(str(step + 1), f"{a.loss:.6f}", f"{b.loss:.6f}", difference)
    console.print(table)
    console.print(
        f"time per step: native {times_ms[0]:.1f} ms, ditron_train {times_ms[1]:.1f} ms{note}", soft_wrap=True
    )


def plot_losses(path: Path, native: Sequence[StepResult], ditron: Sequence[StepResult], title: str) -> None:
    """Writes the two loss curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=140)
    steps = range(1, len(native) + 1)
    axes.plot(steps, [r.loss for r in native], color="#9aa5b1", linewidth=5, label="native Megatron-core")
    axes.plot(steps, [r.loss for r in ditron], color="#c0392b", linewidth=1.4, label="with ditron_train")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def write_json(
    path: Path, summary: dict[str, Any], native: Sequence[StepResult], ditron: Sequence[StepResult]
) -> None:
    """Writes the losses of both runs and `summary`."""
    content = {**summary, "native_loss": [r.loss for r in native], "ditron_loss": [r.loss for r in ditron]}
    path.write_text(json.dumps(content, indent=1) + "\n")
