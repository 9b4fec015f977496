"""Decode attention: up to 16 queries a sequence over a packed cache."""
