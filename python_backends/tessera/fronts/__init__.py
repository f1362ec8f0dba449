"""Thin models in front of the ensemble, for clients it cannot serve itself."""
