"""Settings of every test."""

import torch

# Tests are small and run side by side; threads that wait for each other made them fifty times slower.
torch.set_num_threads(1)
