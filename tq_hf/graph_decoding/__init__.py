"""A decoding loop for `generate(custom_generate=...)`, whose step is one CUDA graph."""
