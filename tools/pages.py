"""Pages with a part that a tool writes."""


def with_part(page: str, begin: str, end: str, new: str) -> str:
    """``page`` with the text from the first ``begin`` to the next ``end`` replaced.

    Raises:
        ValueError: the page has no such part.
    """
    at = page.index(begin)
    return page[:at] + new + page[page.index(end, at) :]
