"""Makes quantized checkpoints: calibrated on pictures, layer by layer, written as compressed-tensors."""
