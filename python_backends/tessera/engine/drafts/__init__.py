"""Tokens that an answer is likely to have next, for the model to verify several in a step."""
