"""The checks of `doctor`: functions that look at one thing each and return what they saw."""
