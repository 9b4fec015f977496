"""Caches in files."""
