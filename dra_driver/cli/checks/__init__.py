"""The checks of `doctor`. Each function checks one thing and returns what it found."""
