"""Qwen2.5-VL: Qwen2-VL with a tower that attends within windows in most of its layers."""
