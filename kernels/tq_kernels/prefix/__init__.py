"""Attention of many queries over a packed history."""
