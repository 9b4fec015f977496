"""What all kernels share: the launcher, unpacking, numbers."""
