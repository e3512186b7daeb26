"""The doctor's report, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ditron_train.tools.doctor.checks import Finding, find_problems
from ditron_train.tools.doctor.facts import Facts, collect_facts
from ditron_train.tools.doctor.features import FeatureState, judge_features
from ditron_train.tools.tables import terminal

__all__ = ["Report", "examine", "show"]

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
_STATE_STYLES = {"ours": "green", "interpreted": "cyan", "native": "yellow"}


@dataclass(frozen=True)
class Report:
    """Facts, what they mean, and what each feature would do."""

    facts: Facts
    findings: list[Finding]
    features: list[FeatureState]

    @property
    def healthy(self) -> bool:
        """Whether no finding is an error; warnings and missing optional parts do not make a machine unhealthy."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The report in one sentence: a machine may be healthy, and nothing be quicker on it."""
        if not self.healthy:
            return "not healthy: see the errors above"
        states = {feature.state for feature in self.features}
        if "ours" in states:
            return "healthy"
        if "interpreted" in states:
            return (
                "healthy, to try the features: without GPUs they are interpreted, and slower than Megatron's own path"
            )
        return "healthy, but no feature does anything here: all of Megatron runs its own path, as without --ditron"

    def to_json(self) -> str:
        """Returns everything as one JSON object."""
        values = {
            "healthy": self.healthy,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "features": [asdict(feature) for feature in self.features],
            "facts": asdict(self.facts),
        }
        return json.dumps(values, indent=1)


def examine(facts: Facts | None = None) -> Report:
    """Judges this machine, or the one that ``facts`` describe."""
    facts = facts or collect_facts()
    return Report(facts, find_problems(facts), judge_features(facts))


def show(report: Report, console: Console | None = None) -> None:
    """Prints the report to ``console`` (default: the terminal)."""
    console = console or terminal()  # into a file, too, a fix stays one line, to be pasted
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    topic = None
    for finding in report.findings:
        level = f"[{_STYLES[finding.level]}]{finding.level}[/]"
        text = escape(finding.text) + (f"\n[dim]fix: {escape(finding.fix)}[/]" if finding.fix else "")
        table.add_row("" if finding.topic == topic else f"[bold]{finding.topic}[/]", level, text)
        topic = finding.topic
    console.print(table)
    features = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for feature in report.features:
        text = f"{escape(feature.about)}: {escape(feature.why)}"
        text += f"\n[dim]fix: {escape(feature.fix)}[/]" if feature.fix else ""
        text += f"\n[dim]ops: {escape(', '.join(feature.ops))}[/]" if feature.ops else ""
        features.add_row(
            f"[bold]--ditron {feature.name}[/]", f"[{_STATE_STYLES[feature.state]}]{feature.state}[/]", text
        )
    if report.features:
        console.print("\n[bold]what each feature would do here[/]")
        console.print(features)
    word, rest = ("healthy", "green") if report.healthy else ("not healthy", "bold red")
    console.print(f"\n[{rest}]{word}[/]{escape(report.verdict.removeprefix(word))}")
