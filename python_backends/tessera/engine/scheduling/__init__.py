"""Which tokens run in the next step: plain data, no torch."""
