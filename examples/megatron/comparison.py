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

Difference = tuple[int, str]  # step, and "loss", "gradient norm" or a parameter's name


def _differences(left: Sequence[StepResult], right: Sequence[StepResult]) -> set[Difference]:
    """Where two runs differ on any rank (the same answer on every rank)."""
    found: set[Difference] = set()
    for step, (a, b) in enumerate(zip(left, right)):
        if a.loss != b.loss:
            found.add((step, "loss"))
        if a.gradient_norm != b.gradient_norm:
            found.add((step, "gradient norm"))
        found.update((step, name) for name in a.gradients if a.gradients[name] != b.gradients[name])
    everywhere: list[set[Difference]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return set().union(*everywhere)


class Comparison:
    """The fused run against the native run, given that the native run itself may not repeat.

    Attributes:
        num_steps: Steps of each run.
        unstable: Losses, norms and gradients in which two native runs differ: named, and left out of `different`.
        different: Losses, norms and gradients that the native run repeats and the fused run does not give bit for bit.
        equal: Of "loss" and "gradient norm", in how many steps the fused run has the bits of the native run.
    """

    def __init__(
        self, native: Sequence[StepResult], again: Sequence[StepResult] | None, fused: Sequence[StepResult]
    ) -> None:
        """Collective: every rank gives its own results."""
        unstable = _differences(native, again) if again is not None else set()
        self.num_steps = len(native)
        self.unstable = sorted({name for _, name in unstable})
        # Once a gradient is not repeated, the weights after that step are not either: compare up to there only.
        first = min((step for step, _ in unstable), default=self.num_steps)
        found = _differences(native, fused)
        self.different = sorted(entry for entry in found if entry[0] <= first and entry not in unstable)
        self.equal = {
            kind: self.num_steps - sum(name == kind for _, name in found) for kind in ("loss", "gradient norm")
        }

    @property
    def is_identical(self) -> bool:
        """Whether every loss, every norm and every gradient of every step is."""
        return not self.different and all(count == self.num_steps for count in self.equal.values())

    def verdict(self, num_fused_calls: int, note: str) -> str:
        """The last line: what is identical, and by how many fused calls.

        Args:
            num_fused_calls: Of rank 0.
            note: How the CPU computed, or the speed on GPUs.
        """
        losses, norms = self.equal.values()
        counts = f"{losses} of {self.num_steps} losses, {norms} of {self.num_steps} gradient norms"
        words = "BITWISE IDENTICAL" if self.is_identical else "NOT IDENTICAL"
        return f"{words}: {counts}; {num_fused_calls} fused calls{note}"


def median_time_ms(results: Sequence[StepResult]) -> float:
    """Median over the steps (the first ones, which compile and warm up, left out) of the slowest rank's time."""
    times: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(times, [result.time_ms for result in results])
    slowest = [max(step) for step in zip(*times)]
    return statistics.median(slowest[min(3, len(slowest) - 1) :])


def print_table(
    console: Console,
    native: Sequence[StepResult],
    fused: Sequence[StepResult],
    times_ms: tuple[float, float],
    note: str,
) -> None:
    """Losses side by side (at most 20 rows), and the time per step, with ``note`` behind it."""
    table = Table(title="loss of every step, same seed, same data")
    for title in ("step", "native", "fused", "difference"):
        table.add_column(title, justify="right")
    stride = max(1, len(native) // 20)
    for step, (a, b) in enumerate(zip(native, fused)):
        if step % stride == 0 or step == len(native) - 1:
            difference = "0" if a.loss == b.loss else f"{b.loss - a.loss:+.1e}"
            table.add_row(str(step + 1), f"{a.loss:.6f}", f"{b.loss:.6f}", difference)
    console.print(table)
    console.print(f"time per step: native {times_ms[0]:.1f} ms, fused {times_ms[1]:.1f} ms{note}", soft_wrap=True)


def plot_losses(path: Path, native: Sequence[StepResult], fused: Sequence[StepResult], title: str) -> None:
    """Writes the two loss curves as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=140)
    steps = range(1, len(native) + 1)
    axes.plot(steps, [r.loss for r in native], color="#9aa5b1", linewidth=5, label="native Megatron-core")
    axes.plot(steps, [r.loss for r in fused], color="#c0392b", linewidth=1.4, label="fused (ditron_train)")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def write_json(path: Path, summary: dict[str, Any], native: Sequence[StepResult], fused: Sequence[StepResult]) -> None:
    """Writes the losses of both runs and `summary`."""
    content = {**summary, "native_loss": [r.loss for r in native], "ditron_loss": [r.loss for r in fused]}
    path.write_text(json.dumps(content, indent=1) + "\n")
