"""What the vision towers compute with; ``add_layer_norm`` is a triton kernel (the language), which imports triton."""
