"""The engine in a process of its own, and what travels to it and back."""
