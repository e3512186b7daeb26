"""Layer 1: primitives between kernels: copies by copy engine, flags written and waited for by streams, deadlines."""

from ditron_train.stream.waits import stream_notify, stream_wait, waits_can_be_released

__all__ = ["stream_notify", "stream_wait", "waits_can_be_released"]
