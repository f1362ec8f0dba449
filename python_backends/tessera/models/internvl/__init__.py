"""InternVL: tiles of one size, InternViT and its projector."""
