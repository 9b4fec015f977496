"""Keys and values of one layer, counted on the host or on the device."""
