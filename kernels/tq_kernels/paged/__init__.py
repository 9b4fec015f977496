"""Kernels over the pages of many sequences."""
