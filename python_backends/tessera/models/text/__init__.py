"""Text bodies, one architecture a file."""
