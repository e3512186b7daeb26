"""Floor 4: decides for each op and shape whether ours or the native path runs: proven equal, measured faster, agreed
by all."""

from ditron_train.policy.decide import Decision, check_plan, decide, forget_plans
from ditron_train.policy.switches import add_switch, switches

__all__ = ["Decision", "add_switch", "check_plan", "decide", "forget_plans", "switches"]
