"""Properties of everything that reads bytes which others wrote: `make fuzz`."""
