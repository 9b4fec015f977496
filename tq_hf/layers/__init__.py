"""Layers of a cache, in transformers' layer contract."""
