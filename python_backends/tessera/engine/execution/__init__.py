"""Runs a scheduled batch through the model and samples its tokens."""
