"""Layer 3: pipeline parallelism. Messages between neighbouring stages, moved by copy engines (no SM) if ``paths``
finds that possible."""

from ditron_train.pp.context import PipelineContext, close_pipeline_contexts, get_pipeline_context
from ditron_train.pp.ops import Handle, exchange

__all__ = ["Handle", "PipelineContext", "close_pipeline_contexts", "exchange", "get_pipeline_context"]
