"""The method in torch: codebook, rotation, channel scales, packing, and the reference of all kernels."""
