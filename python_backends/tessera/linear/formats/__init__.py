"""Quantized forms of weights, one file each."""
