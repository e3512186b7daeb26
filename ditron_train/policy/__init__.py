"""Decides for each op and shape whether the fused or the native path runs: proven equal, measured faster, agreed by
all ranks.

``op`` defines what an op is, ``gate`` answers at every call; the other modules make and keep decisions. No op is
imported here.
"""

from ditron_train.policy.answer import Answer, log_native, observed
from ditron_train.policy.cpu_bound import CpuBound
from ditron_train.policy.decide import Decision, check_plan, decide, forget_plans
from ditron_train.policy.gate import Gate, gate
from ditron_train.policy.op import Function, Op, Trial, fused_results, native_results
from ditron_train.policy.plan import add_switch, switches
from ditron_train.policy.probe import Run

__all__ = [
    "Answer",
    "Decision",
    "Function",
    "Gate",
    "CpuBound",
    "Op",
    "Run",
    "Trial",
    "add_switch",
    "check_plan",
    "decide",
    "forget_plans",
    "fused_results",
    "gate",
    "log_native",
    "native_results",
    "observed",
    "switches",
]
