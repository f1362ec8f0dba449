"""Products in 8-bit floating point (e4m3): what the vision towers and the language model share of them."""
