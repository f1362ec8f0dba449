"""What computes a tower's forward: onnxruntime, torch, CUDA graphs."""
