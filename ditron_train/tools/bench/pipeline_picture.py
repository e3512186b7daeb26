"""The picture of a pipeline step: when each stage computes which microbatch, natively and with our communicator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ditron_train.symm.exchange import exchange

_COLOURS = {"forward": "#2a6fb0", "backward": "#e0a030"}


@dataclass(frozen=True)
class Span:
    """One forward or backward of one microbatch on one stage.

    Attributes:
        kind: ``forward`` or ``backward``.
        microbatch: Counted in the order in which the stage computes them.
        start_us, end_us: Since all stages began, on the device's clock.
    """

    kind: str
    microbatch: int
    start_us: float
    end_us: float


@dataclass
class _Recorder:
    device: torch.device
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)

    def now(self) -> Any:
        """An event on the current stream; on the CPU the time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with a mark before and after each call."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = function(*args, **kwargs)
            self.marks.append((kind, start, self.now()))
            return result

        return marked

    def spans(self, begin: Any) -> list[Span]:
        """What was marked, counted from ``begin``."""
        counts = dict.fromkeys(_COLOURS, 0)
        found = []
        for kind, start, end in self.marks:
            if self.device.type == "cuda":
                times = [1e3 * begin.elapsed_time(event) for event in (start, end)]
            else:
                times = [1e6 * (moment - begin) for moment in (start, end)]
            found.append(Span(kind, counts[kind], *times))
            counts[kind] += 1
        return found


@contextmanager
def _marked_schedules(recorder: _Recorder) -> Iterator[None]:
    from megatron.core.pipeline_parallel import schedules

    native = schedules.forward_step, schedules.backward_step
    schedules.forward_step = recorder.around("forward", native[0])
    schedules.backward_step = recorder.around("backward", native[1])
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = native


def record_step(step: Callable[[int], object], device: torch.device) -> list[list[Span]]:
    """Runs ``step`` three times on all ranks and returns what each rank computed when in the last, by rank
    (collective).

    The stages begin together, behind a barrier on the device.
    """
    barrier = torch.zeros(1, device=device)
    for index in range(3):
        recorder = _Recorder(device)
        if device.type == "cuda":
            torch.cuda._sleep(1_000_000)
        dist.all_reduce(barrier)
        begin = recorder.now()
        with _marked_schedules(recorder):
            step(index)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    told = exchange(dist.group.WORLD, [astuple(span) for span in recorder.spans(begin)])  # type: ignore[arg-type]
    return [[Span(*span) for span in spans] for spans in told]


def draw_steps(title: str, steps: Mapping[str, Sequence[Sequence[Span]]], path: Path) -> None:
    """Writes a panel for each step, a row for each stage; needs matplotlib (extra ``bench``). All share the time
    axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.2 + 1.8 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, stages) in zip(axes, steps.items()):
        for stage, spans in enumerate(stages):
            for span in spans:
                start_ms, length_ms = span.start_us / 1e3, (span.end_us - span.start_us) / 1e3
                axis.broken_barh(
                    [(start_ms, length_ms)], (stage - 0.4, 0.8), color=_COLOURS[span.kind], edgecolor="white"
                )
                axis.text(
                    start_ms + length_ms / 2,
                    stage,
                    str(span.microbatch),
                    ha="center",
                    va="center",
                    fontsize="xx-small",
                )
        end_ms = max(span.end_us for spans in stages for span in spans) / 1e3
        busy_ms = [sum(span.end_us - span.start_us for span in spans) / 1e3 for spans in stages]
        idle = ", ".join(f"{end_ms - busy:.1f}" for busy in busy_ms)
        axis.set_title(f"{name}: {end_ms:.1f} ms; stages wait {idle} ms", fontsize="small", loc="left")
        axis.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))], fontsize="x-small")
        axis.invert_yaxis()
    axes[-1].set_xlabel("ms")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()],
        loc="outside lower center",
        ncols=2,
    )
    figure.suptitle(title, fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
