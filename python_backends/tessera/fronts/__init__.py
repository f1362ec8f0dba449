"""Thin models in front of the ensemble, for clients it cannot serve itself.

They reach the ensemble as any client does, over gRPC on this machine. Calls between models from Python (BLS) are not
used: in tritonserver 2.51 a decoupled one, with several under way in one process, corrupts that process's memory or
blocks the language model's responses for ever.
"""
