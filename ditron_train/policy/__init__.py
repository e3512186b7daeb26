"""Floor 4: decides for each op and shape whether ours or the native path runs: proven equal, measured faster, agreed by all."""

from ditron_train.policy.decide import Decision, check_plan, decide, forget_plans

__all__ = ["Decision", "check_plan", "decide", "forget_plans"]
