"""The doctor's report, for people and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ditron_train.tools.doctor.checks import Finding, find_problems
from ditron_train.tools.doctor.facts import Facts, collect_facts
from ditron_train.tools.doctor.features import FeatureState, judge_features
from ditron_train.tools.text import aligned


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
        """The report in one sentence: a machine may be healthy, and nothing be faster on it."""
        if not self.healthy:
            return "not healthy: see the errors above"
        states = {feature.state for feature in self.features}
        if "fused" in states:
            return "healthy"
        if "interpreted" in states:
            return "healthy, to try the features: without GPUs they are interpreted, and slower than native"
        return "healthy, but no feature can run here: all of Megatron runs natively, as without --ditron"

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

    def to_text(self) -> str:
        """Returns the report for people; a fix is one line, to be pasted."""
        rows: list[tuple[str, str, str]] = []
        topic = None
        for finding in self.findings:
            rows.append(("" if finding.topic == topic else finding.topic, finding.level, finding.text))
            rows += [("", "", f"fix: {finding.fix}")] if finding.fix else []
            topic = finding.topic
        lines = [aligned(rows), ""]
        rows = []
        for feature in self.features:
            rows.append((f"--ditron {feature.name}", feature.state, f"{feature.about}: {feature.why}"))
            rows += [("", "", f"fix: {feature.fix}")] if feature.fix else []
            rows += [("", "", f"ops: {', '.join(feature.ops)}")] if feature.ops else []
        if rows:
            lines += ["what each feature would do here", aligned(rows), ""]
        return "\n".join([*lines, self.verdict])


def examine(facts: Facts | None = None) -> Report:
    """Judges this machine, or the one that ``facts`` describe."""
    facts = facts or collect_facts()
    return Report(facts, find_problems(facts), judge_features(facts))
