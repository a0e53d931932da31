"""String formats as patterns, where the compiler's own are too loose or too strict.

Strings that no pattern can describe at a reasonable cost are excluded. So an answer may have fewer forms, but is never
wrong. Excluded are host names with encoded labels, whose rules apply to the decoded form, and leap seconds in zones
other than UTC, which would take several times as long to compile.
"""

from typing import Any

from neaptide.server.structured.notations import MAX_SAFE

_MONTHS_31, _MONTHS_30 = "(0[13578]|1[02])", "(0[469]|11)"
_ANY_DAY = f"({_MONTHS_31}-(0[1-9]|[12][0-9]|3[01])|{_MONTHS_30}-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_FOURTHS = "(0[48]|[2468][048]|[13579][26])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""Excludes year 0, which many calendar libraries do not have."""
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)"
_DATE = f"({_YEAR}-{_ANY_DAY}|{_LEAP_YEAR}-02-29)"

_HOURS_MINUTES = "([01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(\.[0-9]+)?"
_COMMON_TIME = f"{_HOURS_MINUTES}:[0-5][0-9]{_FRACTION}([zZ]|[+-]{_HOURS_MINUTES})"
_LEAP_SECOND = f"23:59:60{_FRACTION}([zZ]|[+-]00:00)"
_TIME = f"({_COMMON_TIME}|{_LEAP_SECOND})"
_DATE_TIME = f"({_DATE}[tT]{_COMMON_TIME}|{_YEAR}-(06-30|12-31)[tT]{_LEAP_SECOND})"

_LETTER, _INNER = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
# Two hyphens in the third and fourth place mark encoded names.
_LABEL = (
    f"({_LETTER}|{_LETTER}{_LETTER}|{_LETTER}{_INNER}{_LETTER}"
    f"|{_LETTER}{_INNER}({_LETTER}{_LETTER}|-{_LETTER})|{_LETTER}{_INNER}({_LETTER}{_INNER}|-{_LETTER})"
    f"{_INNER}{{0,58}}{_LETTER})"
)

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
_LAST = rf"({_GROUP}:{_GROUP}|{_OCTET}(\.{_OCTET}){{3}})"
"""32 bits, which may be written as an IPv4 address."""


def _ipv6() -> str:
    """Pattern of RFC 3986, section 3.2.2: eight groups, or fewer around one gap."""
    forms = [f"({_GROUP}:){{6}}{_LAST}", f"::({_GROUP}:){{5}}{_LAST}"]
    forms += [f"{_up_to(count)}::({_GROUP}:){{{5 - count}}}{_LAST}" for count in range(1, 6)]
    return "|".join([*forms, f"{_up_to(6)}::{_GROUP}", f"{_up_to(7)}::"])


def _up_to(count: int) -> str:
    return f"(({_GROUP}:){{0,{count - 1}}}{_GROUP})?"


_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_PLAIN, _ESCAPED = r"[ !#-\[\]-~]", r"\\[ -~]"
# At most 64 characters (section 4.5.3.1). An exact count takes a second pattern, and with a caller's own as the third
# the compiler gives up. So the longest names with several dots or escapes are excluded.
_DOTTED = rf"({_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}|{_ATOM}(\.?{_ATOM}){{0,31}})"
_QUOTED = f'"({_PLAIN}{{0,62}}|({_PLAIN}|{_ESCAPED}){{0,31}})"'
_DOMAIN = rf"{_LETTER}({_INNER}{{0,61}}{_LETTER})?(\.{_LETTER}({_INNER}{{0,61}}{_LETTER})?)*"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_EMAIL = rf"({_DOTTED}|{_QUOTED})@({_DOMAIN}|\[({_IPV4}|IPv6:({_ipv6()}))\])"
"""RFC 5321, section 4.1.2. The whole has at most 254 characters, because a path has two more."""

_HEX = "[0-9a-fA-F]"
_BASE64, _BASE64_URL = "[A-Za-z0-9+/]", "[A-Za-z0-9_-]"


def _uuid(version: int) -> str:
    """Pattern of RFC 9562 for one version."""
    return f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"


def _base64(letter: str) -> str:
    """Pattern of RFC 4648 with padding and zero spare bits: 4 letters can end a group of one byte, 16 one of two."""
    ends = ("[AQgw]==", f"{letter}[AEIMQUYcgkosw048]=")
    return f"^({letter}{{4}})*({letter}({'|'.join(ends)}))?$"


_POINTER = "(/([^/~]|~[01])*)*"

WRITTEN_OUT: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "date-time": {"pattern": f"^{_DATE_TIME}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "email": {"pattern": f"^{_EMAIL}$", "maxLength": 254},
    "hostname": {"pattern": rf"^{_LABEL}(\.{_LABEL})*$", "maxLength": 253},
    "ipv6": {"pattern": f"^({_ipv6()})$", "maxLength": 45},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(0|[1-9][0-9]*)(#|{_POINTER})$"},
    # Formats of OpenAPI and pydantic, which JSON Schema lacks.
    "ipvanyaddress": {"pattern": f"^({_IPV4}|{_ipv6()})$", "maxLength": 45},
    "base64": {"pattern": _base64(_BASE64)},
    "byte": {"pattern": _base64(_BASE64)},
    "base64url": {"pattern": _base64(_BASE64_URL)},
    **{f"uuid{version}": {"pattern": _uuid(version), "maxLength": 36} for version in range(1, 9)},
    **{name: {} for name in ("binary", "password", "path")},
}
"""Schema of each format; empty if any string matches."""

INTEGERS: dict[str, tuple[int, int]] = {}
for _bits in (8, 16, 32, 64):
    _half = 1 << _bits - 1
    INTEGERS[f"int{_bits}"] = (max(-_half, -MAX_SAFE), min(_half - 1, MAX_SAFE))
    INTEGERS[f"uint{_bits}"] = (0, min(2 * _half - 1, MAX_SAFE))
"""Bounds of OpenAPI's integer formats, within the integers that every JSON reader represents exactly."""
