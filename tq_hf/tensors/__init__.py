"""Tensors of a layer: packed blocks, dense sinks and residual, pages, and the views that attention reads."""
