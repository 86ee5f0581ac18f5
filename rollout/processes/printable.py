"""Texts from files on a terminal."""


def printable(line: str) -> str:
    """A line for a terminal: names from files may have characters that control it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
