"""What tools measure: for each op its shapes, sample calls, costs and peers, as a `BenchCase`."""

from ditron_train.tools.cases.case import BenchCase, Cost, ModelSizes, Pass, RunEnvironment, Shape

__all__ = ["BenchCase", "Cost", "ModelSizes", "Pass", "RunEnvironment", "Shape"]
