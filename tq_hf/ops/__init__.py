"""How attention, encoding and dequantising are computed: dispatch, and the backends."""
