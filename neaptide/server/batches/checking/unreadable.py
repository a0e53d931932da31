"""Why a line of a batch file cannot be read, and where."""

import json

from neaptide.server.http.errors import InvalidRequestError

_PREFIX = "This line is not parseable as valid JSON"
_STARTS = (
    (b"\xff\xfe", "the file is UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "the file is UTF-16; save it as UTF-8"),
    (b"\x1f\x8b", "the file is compressed with gzip; upload it uncompressed"),
    (b"PK\x03\x04", "the file is a zip archive; upload the file inside"),
    (b"\x28\xb5\x2f\xfd", "the file is compressed with zstd; upload it uncompressed"),
)


def unreadable(content: bytes, error: InvalidRequestError) -> str:
    """One sentence for the caller.

    Args:
        content: the line.
        error: what the parser said.
    """
    for start, reason in _STARTS:
        if content.startswith(start):
            return f"{_PREFIX}: {reason}."
    if b"\0" in content:
        return f"{_PREFIX}: there is a NUL at byte {content.index(0) + 1}; UTF-16 has many, save the file as UTF-8."
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as found:
        return f"{_PREFIX}: byte {found.start + 1} is not UTF-8; save the file as UTF-8."
    if "\r" in text.strip():
        return f"{_PREFIX}: its line ends are CR alone; save the file with LF or CRLF."
    try:
        json.loads(text)
    except RecursionError:
        pass
    except json.JSONDecodeError as found:
        is_cut = found.pos >= len(text.rstrip()) or found.msg.startswith("Unterminated string")
        if is_cut or text.strip() in ("{", "["):
            return f"{_PREFIX}: it ends too early; a request is one line, not JSON over several lines."
        return f"{_PREFIX}: {found.msg}, at character {found.pos + 1}."
    except ValueError:
        pass
    # It is JSON, but not as every reader takes it: the parser says what is wrong.
    return f"{_PREFIX}: {error.message}"
