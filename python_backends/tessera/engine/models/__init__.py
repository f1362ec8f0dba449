"""The text models, one architecture a file, and the table from checkpoint names to them."""
