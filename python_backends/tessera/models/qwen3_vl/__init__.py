"""Qwen3-VL: as Qwen2-VL, and rows of several of the tower's layers go into the first layers of the language model."""
