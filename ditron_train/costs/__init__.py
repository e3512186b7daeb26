"""What parts of a step take, from the rates of a machine: GEMMs, attention, passes over memory, exchanges.

The cost models of the parallelisms put them together; choices of ways to run an op, and ``predict``, use them.
"""
