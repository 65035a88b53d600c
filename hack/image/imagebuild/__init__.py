"""Building the driver's container image without a registry or a daemon."""
