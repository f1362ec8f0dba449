"""Triton and Gluon kernels beside their twins in torch; Triton is imported by the kernels alone."""
