"""Answers that must match a regular expression, a JSON schema or a list of labels."""
