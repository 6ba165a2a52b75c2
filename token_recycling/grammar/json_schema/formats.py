"""Formats of strings as keywords of JSON Schema that llguidance enforces.

llguidance's own formats are used if they admit only valid strings. Dates respect leap years, and times have the seconds
and capital letters that every validator accepts.
"""

from __future__ import annotations

from typing import Any

from .patterns import WRITABLE, others

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
"""Months and days that exist in every year."""
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_PARTIAL_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?"
_TIME = rf"{_PARTIAL_TIME}(?:Z|[+-]{_CLOCK})"
_ANY_UUID = "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
_FOUR = r"[A-Za-z0-9+/]{4}"
_BASE64 = rf"(?:{_FOUR})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{{2}}[AEIMQUYcgkosw048]=)?"
"""The unused bits of the last group are 0, as some decoders require."""

_A, _X = "[0-9A-Za-z]", "[0-9A-Za-z-]"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_BYTE = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _up_to(groups: int) -> str:
    """Return the pattern of up to `groups` groups of an IPv6 address, whose last two may have IPv4 notation."""
    in_hex, mixed = f"{_GROUP}(?::{_GROUP}){{0,{groups - 1}}}", f"(?:{_GROUP}:){{0,{groups - 2}}}{_IPV4}"
    return f"(?:{'|'.join([in_hex, mixed][:groups])})?"


_IPV6 = "|".join(
    [f"{_GROUP}(?::{_GROUP}){{7}}", f"(?:{_GROUP}:){{6}}{_IPV4}", f"::{_up_to(7)}"]
    + [f"{_GROUP}(?::{_GROUP}){{{before - 1}}}::{_up_to(7 - before)}" for before in range(1, 8)]
)
_LABEL = rf"{_A}(?:{_X}?{_A}|{_X}(?:{_A}{_X}|-{_A}){_X}{{0,58}}{_A}|{_X}{_X}{_A})?"
"""A label of a host name without `--` as its third and fourth characters, which mark an encoded label (RFC 5891)."""

_REGISTERED = r"(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
"""A character of a host name."""
_PATH = rf"(?:{_REGISTERED}|[:@])"
_SEGMENTS = f"(?:/{_PATH}*)*"
_AUTHORITY = rf"//(?:(?:{_REGISTERED}|:)*@)?{_REGISTERED}*(?::[0-9]*)?{_SEGMENTS}"
_ABSOLUTE = rf"(?:[A-Za-z][0-9A-Za-z+.-]*:)?(?:{_AUTHORITY}|/(?:{_PATH}+{_SEGMENTS})?)"
_RELATIVE = rf"(?:(?:{_REGISTERED}|@)+{_SEGMENTS})?"
_REFERENCE = rf"(?:{_ABSOLUTE}|{_RELATIVE})(?:\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?"
"""References of RFC 3986, except those with an address in brackets, or with a scheme and no slash."""

_BESIDE_A_PATTERN = ("starts_with", "ends_with", "includes", "uppercase", "lowercase")
"""How zod names the patterns that it writes for such strings."""
_HEX_DIGITS = {"md5": 32, "sha1": 40, "sha256": 64, "sha384": 96, "sha512": 128}

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
    "partial-time": {"pattern": f"^{_PARTIAL_TIME}$"},
    "partial-date-time": {"pattern": f"^{_DATE}T{_PARTIAL_TIME}$"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
    "uri-reference": {"pattern": f"^{_REFERENCE}$"},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "uri")},
    "ipv6": {"pattern": f"^(?:{_IPV6})$"},
    "ipvanyaddress": {"pattern": f"^(?:{_IPV4}|{_IPV6})$"},
    "uuid": {"pattern": _ANY_UUID},
    **{f"uuid{version}": {"pattern": _UUID.format(version)} for version in (1, 3, 4, 5, 6, 7, 8)},
    "base64": {"pattern": f"^{_BASE64}$"},
    "base64url": {"pattern": f"^{_BASE64.replace('+/', '_-')}$"},
    **{name: {} for name in ("binary", "password", "path", "file-path", "directory-path", *_BESIDE_A_PATTERN)},
    "cidrv4": {"pattern": f"^{_IPV4}/(?:[0-9]|[12][0-9]|3[0-2])$"},
    "cidrv6": {"pattern": f"^(?:{_IPV6})/(?:[0-9]|[1-9][0-9]|1[01][0-9]|12[0-8])$"},
    "cuid": {"pattern": "^[cC][0-9A-Za-z]{8,}$"},
    "cuid2": {"pattern": "^[0-9a-z]+$"},
    "e164": {"pattern": r"^\+[1-9][0-9]{6,14}$"},
    "hex": {"pattern": "^[0-9A-Fa-f]*$"},
    **{f"{name}_hex": {"pattern": f"^[0-9A-Fa-f]{{{digits}}}$"} for name, digits in _HEX_DIGITS.items()},
    "ksuid": {"pattern": "^[0-9A-Za-z]{27}$"},
    "mac": {"pattern": "^(?:(?:[0-9A-F]{2}:){5}[0-9A-F]{2}|(?:[0-9a-f]{2}:){5}[0-9a-f]{2})$"},
    "nanoid": {"pattern": "^[0-9A-Za-z_-]{21}$"},
    "ulid": {"pattern": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"},
    "xid": {"pattern": "^[0-9a-v]{20}$"},
}
"""The keywords of each known format: those of JSON Schema, of pydantic (some admit any string), of zod, and of schemars
(`ip`, times without an offset).
"""
_WRITTEN_AS = {"idn-hostname": "hostname", "idn-email": "email", "iri": "uri", "iri-reference": "uri-reference"}
_WRITTEN_AS |= {"byte": "base64", "guid": "uuid", "url": "uri", "ip": "ipvanyaddress"}
"""Internationalized formats, whose outputs are limited to ASCII, and aliases."""
FORMATS |= {name: FORMATS[other] for name, other in _WRITTEN_AS.items()}


def _other_than(characters: str, shortest: int, longest: int) -> str:
    """Return the pattern of strings with a character other than `characters`, or with a length out of range."""
    lengths = f"{WRITABLE}{{0,{shortest - 1}}}|{WRITABLE}{{{longest + 1},}}"
    return f"^(?:{lengths}|{WRITABLE}*{others(characters)}{WRITABLE}*)$"


NO_VALID_STRINGS: dict[str, str] = {
    "date": _other_than("0-9W\\-", 8, 10),
    "ipv4": _other_than("0-9.", 7, 15),
    **dict.fromkeys(("email", "idn-email"), f"^{others('@')}*$"),
    "ipv6": f"^{others(':')}*$",
    "uuid": f"^(?:{WRITABLE}{{0,8}}|{WRITABLE}{{8}}{others('-')}{WRITABLE}*)$",
}
"""For formats that every validator checks, a pattern of strings that all reject: nearly all invalid strings."""
