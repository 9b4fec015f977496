"""Attention over blocks in torch: on devices without kernels, and of calls that no kernel computes."""
