"""Tools for tests and for machines without a GPU; imported by nothing in the floors above.

``interpreter``   repairs bf16 (and newer NumPy) in Triton's interpreter.
``processes``     runs a function on N processes joined by gloo.
``megatron_cpu``  lets megatron-core run on CPU tensors.
"""
