"""What lies in a directory."""

from pathlib import Path


def names(directory: Path) -> list[str]:
    """The names of all entries, hidden ones too, in order."""
    return sorted(path.name for path in directory.iterdir())
