"""Shared by all kernels: launcher, unpacking, schedule, softmax."""
