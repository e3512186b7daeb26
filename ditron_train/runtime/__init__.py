"""Floor 0: device facts, errors, logging, settings, supported versions."""

from ditron_train.runtime.device import is_interpreter, kernel_target, num_sms
from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.logs import get_logger, log_once
from ditron_train.runtime.settings import get_settings

__all__ = ["DitronError", "get_logger", "get_settings", "is_interpreter", "kernel_target", "log_once", "num_sms"]
