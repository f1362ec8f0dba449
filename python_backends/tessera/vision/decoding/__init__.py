"""Pictures that travel encoded, decoded on the GPU."""
