"""Embeddings whose vocabulary is divided over the ranks of a tensor parallel group."""

from ditron_train.embedding.lookup import lookup, unsupported_reason

__all__ = ["lookup", "unsupported_reason"]
