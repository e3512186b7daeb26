"""What an op takes, natively and fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """Estimated times in us of the native and the fused path; they add up."""

    native_us: float
    ditron_us: float

    @classmethod
    def alike(cls, time_us: float) -> Estimate:
        """What both paths run alike."""
        return cls(time_us, time_us)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.native_us + other.native_us, self.ditron_us + other.ditron_us)

    def __mul__(self, times: float) -> Estimate:
        return Estimate(self.native_us * times, self.ditron_us * times)

    def natively(self) -> Estimate:
        """Both natively."""
        return Estimate.alike(self.native_us)
