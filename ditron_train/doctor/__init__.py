"""Tool: says what works on this machine, what does not, and the fix. Reads facts, changes nothing, needs no GPU."""

from ditron_train.doctor.checks import Finding, find_problems
from ditron_train.doctor.facts import Facts, Gpu, collect_facts
from ditron_train.doctor.features import FeatureState, judge_features
from ditron_train.doctor.report import Report, examine, show

__all__ = [
    "Facts",
    "FeatureState",
    "Finding",
    "Gpu",
    "Report",
    "collect_facts",
    "examine",
    "find_problems",
    "judge_features",
    "show",
]
