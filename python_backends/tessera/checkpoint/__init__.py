"""What a checkpoint folder holds: its configuration, its weight names and its tensors. Knows no device."""
