"""Draws a predicted step as a PNG: two bars, natively and with ours, by component."""

from __future__ import annotations

from pathlib import Path

from ditron_train.tools.predict.cluster import Cluster
from ditron_train.tools.predict.megatron_arguments import Job
from ditron_train.tools.predict.step import Step

_COLORS = {
    "GEMMs": "#2a6fb0", "attention": "#6aa9d9", "passes": "#b9d4ea", "exchanges": "#c0392b", "bubbles": "#e8b4ae",
    "gradients": "#d98e3f", "optimizer": "#7a9e5a", "host": "#9a9a9a", "clock": "#5b4b8a",
}  # fmt: skip
_LEAST_SHARE = 0.03  # of the step: thinner parts have no room for a number


def draw_step(job: Job, cluster: Cluster, step: Step, path: Path) -> None:
    """Writes the picture; needs matplotlib (extra ``bench``)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, times in enumerate((step.ditron, step.native)):
        left = 0.0
        for kind, us in times.items():
            label = kind if place == 1 else None
            axis.barh(place, us / 1e3, left=left, height=0.6, color=_COLORS.get(kind, "#555555"), label=label)
            if us > _LEAST_SHARE * step.native_us:
                axis.text(left + us / 2e3, place, f"{us / 1e3:.0f}", ha="center", va="center", fontsize="x-small")
            left += us / 1e3
        axis.text(left, place, f" {left:.0f} ms", va="center", fontsize="small")
    axis.set_yticks([0, 1], ["with ours", "Megatron"])
    axis.set_xlim(0, 1.1 * step.native_us / 1e3)
    axis.set_xlabel("ms a step, predicted")
    axis.set_title(
        f"{cluster.world_size} x {cluster.profile.machine.device}, {job.num_layers} layers of {job.model.hidden}, "
        f"TP {job.tp} PP {job.pp} CP {job.cp} EP {job.ep}: {step.speedup:.3f}x",
        fontsize="medium",
    )
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(_COLORS), fontsize="x-small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
