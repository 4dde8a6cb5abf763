"""The CUDA backend in Triton: attention over the paged pool, the writing of keys and values, products with packed
weights, norms and gates, sampling.

On a machine without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), which is how they are tested. Nothing but
this package imports triton.
"""
