"""A fuzzer for everything that reads bytes which others wrote: `make fuzz`."""
