"""Triton kernels (the kernel language) of the vision towers; importing any of them imports triton.

:mod:`tessera.vision.kernels.reference` holds each one's readable twin in torch.
"""
