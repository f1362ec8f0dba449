"""Whether a picture's first, cheap cut is enough, and whether that still holds."""
