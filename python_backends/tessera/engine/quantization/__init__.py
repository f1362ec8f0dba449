"""How a linear layer stores and applies its weights: one scheme a file."""
