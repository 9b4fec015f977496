"""The method in torch: codebook, rotation, packing, and the oracle."""
