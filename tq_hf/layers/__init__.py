"""transformers' layer contract."""
