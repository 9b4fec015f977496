"""How attention, encoding and dequantizing are computed: dispatch, and the backends."""
