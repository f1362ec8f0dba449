"""What a model family knows about images and prompts: plans, placeholders, positions, chat to token ids.

numpy, tokenizers and jinja2 only: this package is imported by the engine and the vision stage alike.
"""
