"""Pages of which a part is written by a tool."""


def with_part(page: str, begin: str, end: str, new: str) -> str:
    """``page`` with what stands from the first ``begin`` up to the next ``end`` replaced.

    Raises:
        ValueError: it has no such part.
    """
    at = page.index(begin)
    return page[:at] + new + page[page.index(end, at) :]
