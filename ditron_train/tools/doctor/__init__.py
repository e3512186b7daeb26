"""Tool: says what works on this machine, what does not, and the fix. Reads facts, changes nothing, needs no GPU."""

from ditron_train.tools.doctor.checks import Finding, find_problems
from ditron_train.tools.doctor.examination import Report, examine, show
from ditron_train.tools.doctor.facts import Facts, Gpu, collect_facts
from ditron_train.tools.doctor.features import FeatureState, judge_features

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
