"""Losses over a vocabulary that is divided over the ranks of a tensor parallel group."""

from ditron_train.loss.cross_entropy import cross_entropy, unsupported_reason

__all__ = ["cross_entropy", "unsupported_reason"]
