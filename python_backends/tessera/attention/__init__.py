"""Attention over paged keys and values, behind one small contract."""
