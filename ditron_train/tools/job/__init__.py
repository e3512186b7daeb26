"""One reader of Megatron's arguments: what they describe, which parts a step has, and why a part runs natively."""

from ditron_train.tools.job.arguments import Job, read_job

__all__ = ["Job", "read_job"]
