"""Saving caches to files, and loading them."""
