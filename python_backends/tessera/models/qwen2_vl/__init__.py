"""Qwen2-VL: pictures near their own size, patches merged four to a row."""
