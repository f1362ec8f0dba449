"""Where keys and values live, and which of them may be reused."""
