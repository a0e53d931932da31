"""Reasoning as the opaque text that OpenAI calls encrypted: some clients send only that back.

Nothing is secret here, since the same reply has the reasoning in plain text. The text holds all that is needed, so the
server keeps nothing.
"""

import base64
import binascii

_PREFIX = "plain_"
"""Tells our texts from those of other servers, which cannot be read."""


def seal(text: str) -> str:
    """The opaque text of some reasoning."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str:
    """The reasoning in an opaque text; empty if another server made it."""
    if not sealed.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
