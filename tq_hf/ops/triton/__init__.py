"""The kernels of `tq_kernels`, called with what this package holds: `blocks` of a cache, `pages` of many requests."""
