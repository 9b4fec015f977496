"""What is held: packed blocks, the dense window, and what a call reads of them."""
