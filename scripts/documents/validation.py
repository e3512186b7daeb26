"""How far `predict` is from what was measured: every committed step of a training job, measured and estimated."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ditron_train.data.device_profiles import network_named, profile_named
from ditron_train.tools.fp8.recipes import fp8_format
from ditron_train.tools.job import read_job
from ditron_train.tools.predict.estimates import Cluster
from ditron_train.tools.predict.predictor import Prediction, predict
from ditron_train.tools.results import TRAINING_STEP, Row, measurement_files, read_results

_PROFILES = {"H200": "h200", "H100-80GB-HBM3": "h100"}


@dataclass(frozen=True)
class Checked:
    """A committed step: the folder of its file, its row, and what ``predict`` says with its native step stated."""

    folder: str
    row: Row
    prediction: Prediction

    @property
    def gain(self) -> float:
        """The measured one."""
        return self.row.native_us / self.row.ditron_us


def check_steps(root: Path) -> list[Checked]:
    """Every committed step on H200s and H100s whose row has its command; steps of Muon are not estimated."""
    found = []
    for path in measurement_files(root):
        device = path.parent.name.rpartition("x")[0]
        for row in read_results(path)[1] if device in _PROFILES else ():
            features = row.op.removeprefix(TRAINING_STEP).split(",")
            if row.op.startswith(TRAINING_STEP) and row.command is not None and "muon" not in features:
                recipe = [] if row.fp8 is None else ["--fp8-recipe", row.fp8, "--fp8-format", fp8_format(row.fp8)]
                job = read_job([*shlex.split(row.command), *recipe], allow_unknown=True)
                cluster = Cluster(profile_named(_PROFILES[device]), 1, row.world_size, network_named("ib-400"))
                prediction = predict(job, cluster, features, row.native_us / 1e3)
                found.append(Checked(path.parent.name, row, prediction))
    return found


def middle(values: Iterable[float], share: float = 0.9) -> tuple[float, float]:
    """Between what the middle ``share`` of the values is."""
    ordered = sorted(values)
    left_out = round((1 - share) / 2 * len(ordered))
    return ordered[left_out], ordered[len(ordered) - 1 - left_out]


def document_part(root: Path) -> str:
    """The table of docs/guides/predict.md."""
    lines = ["| step | trained | on | native | gain: measured, estimated |", "| --- | --- | --- | --- | --- |"]
    for one in check_steps(root):
        row = one.row
        model = row.model if row.fp8 is None else f"{row.model}, FP8 {row.fp8}"
        gains = f"{row.native_us / 1e3:.0f} ms | {one.gain:.3f}x, {one.prediction.gain:.3f}x"
        lines.append(f"| `{row.op.removeprefix(TRAINING_STEP)}` | {model} | {one.folder} | {gains} |")
    return "\n".join(lines)
