"""Triton kernels (the kernel language), one and its launcher a file; importing any of them imports triton.

:mod:`tessera.kernels.reference` holds each one's readable twin in torch.
"""
