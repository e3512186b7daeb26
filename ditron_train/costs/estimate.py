"""What an op takes, natively and fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """Estimated times in us; they add up.

    Attributes:
        native_us: native.
        ditron_us: The fused path.
        compute_us: The computation alone, as stock Megatron runs it.
        exchange_us: Megatron's exchanges alone.
    """

    native_us: float
    ditron_us: float
    compute_us: float
    exchange_us: float = 0.0

    @classmethod
    def alike(cls, compute_us: float) -> Estimate:
        """What both run alike, without an exchange."""
        return cls(compute_us, compute_us, compute_us)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.native_us + other.native_us,
            self.ditron_us + other.ditron_us,
            self.compute_us + other.compute_us,
            self.exchange_us + other.exchange_us,
        )

    def __mul__(self, times: float) -> Estimate:
        return Estimate(
            self.native_us * times, self.ditron_us * times, self.compute_us * times, self.exchange_us * times
        )

    def natively(self) -> Estimate:
        """Both natively."""
        return Estimate(self.native_us, self.native_us, self.compute_us, self.exchange_us)
