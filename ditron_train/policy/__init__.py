"""Decides for each op and shape whether the fused path or Megatron's runs: proven equal, measured faster, agreed by
all.

`spec` says what an op is, `gate` is asked at every call; the rest is how a decision is made and kept. No op is
imported here.
"""

from ditron_train.policy.decide import Decision, check_plan, decide, forget_plans
from ditron_train.policy.gate import Answer, Gate, gate, log_native
from ditron_train.policy.late_host import LateHost
from ditron_train.policy.probe import Run
from ditron_train.policy.spec import Cost, Function, ModelSizes, OpSpec, Pass, Place, Shape, Trial, results
from ditron_train.policy.switches import add_switch, switches

__all__ = [
    "Answer",
    "Cost",
    "Decision",
    "Function",
    "Gate",
    "LateHost",
    "ModelSizes",
    "OpSpec",
    "Pass",
    "Place",
    "Run",
    "Shape",
    "Trial",
    "add_switch",
    "check_plan",
    "decide",
    "forget_plans",
    "gate",
    "log_native",
    "results",
    "switches",
]
