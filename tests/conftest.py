"""Settings of every test."""

import os

import pytest
import torch

# Tests are small and run side by side; threads that wait for each other made them fifty times slower.
torch.set_num_threads(1)

if os.environ.get("TQ_HF_TARGET"):
    from target_override import install

    install()


@pytest.fixture(autouse=True)
def no_gradients():
    """Generation records none, and steps then take other paths; a test that means gradients turns them on."""
    with torch.no_grad():
        yield
