"""Parts of pages that a program writes, between two lines that mark them."""


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """The page with this text between its marks.

    Raises:
      ValueError: it has not each mark once, in this order.
    """
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    if (page.count(begin), page.count(end), rest.count(end)) != (1, 1, 1):
        found = f"{page.count(begin)} and {page.count(end)}"
        raise ValueError(
            f"a page must have {begin.strip()!r} once, and {end.strip()!r} once below, got {found} of them"
        )
    return f"{before}{begin}{text}{end}{after}"
