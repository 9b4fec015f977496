"""What is held: packed blocks, the dense residual, and what a call reads of them."""
