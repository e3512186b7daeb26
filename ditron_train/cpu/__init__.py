"""Tools for tests and for machines without a GPU; imported by nothing in the layers above.

``interpreter``           repairs bf16 (and newer NumPy) in Triton's interpreter.
``exact_arithmetic``      sums of products that do not depend on their order, in torch and in the interpreter.
``megatron_shim``         lets megatron-core run on CPU tensors.
``emerging_optimizers``   stands in for the package that Megatron's Muon needs.
"""
