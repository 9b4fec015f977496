"""Who keeps count: growing and preallocated stores of one layer, and the ticket by which attention reads them."""
