"""Encoded pictures to uint8 tiles, and requests to everything the vision stage and the language model need."""
