"""Who keeps count: growing and preallocated stores of one layer."""
