"""Tessera: a tritonserver model repository that serves vision-language models."""

__version__ = "0.1.0"
