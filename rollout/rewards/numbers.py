"""Numbers as people and models write them, read exactly.

In English notation: 1,234.50, also 1 234 and 1'234, -$5, 3/4, \\frac{3}{4}, 2 1/2, 2\\frac12, 2½, 7.2e1,
7.2 \\times 10^1, 7.2 × 10¹, 0.1\\overline{6}.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

LONGEST = 100  # most characters of a fraction
MINUS = "-\u2013"
ASCII = str.maketrans(  # hyphens, minus signs, and what East Asian text writes at full width
    "\u2010\u2011\u2212\ufe63\uff0d\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17\uff18\uff19\uff05\uff0b\uff0f\uff1d\uff04",
    "-----0123456789%+/=$",
)
_WHOLE = "[0-9]{1,3}(?:[ ,][0-9]{3}){1,30}|[0-9]{1,20}"  # bounded, since it is tried at each group of digits
_DIGITS = r"(?:[0-9]{1,3}(?:[,'_\u2019\u00a0\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# Not the 2 in m2, nor the minus in 5-3 or of a bullet, nor 18th; but 1/8th.
NUMBER = re.compile(
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)"
    rf"(?P<sign>(?<![\w)\]])[{MINUS}])?(?:[$\u20ac\u00a3\u00a5]\s?)?"
    rf"(?:(?P<whole>{_WHOLE})\s+(?:and\s+)?(?=[0-9]+/[0-9]+(?![0-9.,/])))?"
    rf"(?P<digits>{_DIGITS})(?P<power>[eE][-+]?[0-9]{{1,3}}(?![A-Za-z0-9]))?"
    rf"(?:/(?P<under>{_DIGITS})|(?!(?:st|nd|rd|th)\b|[0-9]))"
)
SPACED = re.compile(r"(?<![\w.,])[0-9]{1,3}(?: [0-9]{3})+(?![\w/])")  # 1 234
_PART = r"\s*(?:\{\s*([-+0-9.,]+)\s*\}|([0-9]))"
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True))
_POWER = rf"10(?:\s*\^\s*[{{(]?\s*([-+{MINUS}]?[0-9]{{1,3}})\s*[)}}]?|([{''.join(_RAISED)}]+))"
_TIMES = r"\\times|\\cdot|[x*\u00d7\u00b7\u22c5]"
_GAP = r"(?:(?<!\s)\s+)?"
VULGAR = re.compile(_GAP + r"([\u00bc-\u00be\u2150-\u215e])")
_MIXED = re.compile(
    rf"(?<![\w.,^/)}}\]])({_WHOLE})[ \t\u00a0\u2009\u202f]+([0-9]{{1,20}})\s?/\s?([0-9]{{1,20}})"
    r"(?![\w/!]|\s*\^|[.,][0-9])"
)
_FRACTION = r"\\[dt]?frac(?![A-Za-z])(?:\s*\{\s*([0-9]{1,20})\s*\}|\s*([0-9]))(?:\s*\{\s*([0-9]{1,20})\s*\}|([0-9]))"
_MIXED_LATEX = re.compile(rf"(?<![\w.,^/)}}\]])({_WHOLE})[ \t]?{_FRACTION}")
_SCIENTIFIC = re.compile(r"(?<![\w.])[0-9]+(?:\.[0-9]+)?[eE][-+]?[0-9]{1,3}(?!\w|\s*\^|\.[0-9])")
_TIMES_TEN = re.compile(rf"(?<![\w.^{{_])([0-9]+(?:\.[0-9]+)?)\s*(?:{_TIMES})\s*{_POWER}(?![\w^!]|\.[0-9])")
REPEATING = re.compile(rf"([{MINUS}])?([0-9]{{1,50}})\.([0-9]{{,50}})\\(?:overline|bar)\s?\{{?([0-9]{{1,50}})\}}?")
REWRITE: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [  # LaTeX and other notations to plain text
    (re.compile(r"\\[,!]|\{,\}"), lambda m: "," if m[0] == "{,}" else ""),  # thin spaces: 1\,234
    (re.compile(r"\\[;: ]|~"), lambda m: " "),
    (re.compile(r"\\(?=\$)|(?<![A-Za-z0-9_])_+(?=[-$]?[0-9])"), lambda m: ""),  # \$5, and _5_ of Markdown
    (
        re.compile(r"(?<=[0-9])(?:\^|\\textsuperscript|<sup>|-)?\{?(?:\\(?:text|mathrm)\s*\{)?\s?(st|nd|rd|th)\b"),
        lambda m: m[1],
    ),
    (re.compile(rf"{_GAP}\\[cdt]?frac(?![A-Za-z]){_PART}{_PART}"), lambda m: _apart(m, m[1] or m[2], m[3] or m[4])),
    (VULGAR, lambda m: _vulgar(m)),
    (re.compile(rf"(?<=[0-9])\s*(?:{_TIMES})\s*{_POWER}"), lambda m: "e" + _power(m[1], m[2])),
    (re.compile(rf"(?<![\w.]){_POWER}"), lambda m: "1e" + _power(m[1], m[2])),
    (re.compile(r"(?<=[A-Za-z})])\^\{?[0-9]+\}?"), lambda m: ""),  # the exponent of a unit: cm^2
    (re.compile(r"(?<=[0-9])[ \t]*[/\u2044][ \t]*(?=[0-9])"), lambda m: "/"),
]
_SIGNED = re.compile(rf"(=|:|\bis:?)[^\S\n]*[{MINUS}][^\S\n]+(?=[0-9.$])")  # is - 5, but no bullet


def plain(text: str) -> str:
    """The text with its numbers in plain characters, as NUMBER finds them."""
    text = text.translate(ASCII)
    for pattern, by in REWRITE:
        text = pattern.sub(by, text)
    return _SIGNED.sub(r"\1 -", text)


def value(found: re.Match[str]) -> Decimal | Fraction | None:
    """The value of a NUMBER; None for a division by zero or a fraction of more than LONGEST characters."""
    digits, under = (re.sub("[^0-9.]", "", found[name] or "") for name in ("digits", "under"))
    sign = "-" if found["sign"] else ""
    if not under:
        return Decimal(sign + digits + (found["power"] or ""))
    if len(found[0]) > LONGEST or not Fraction(under):
        return None
    size = int(re.sub("[ ,]", "", found["whole"] or "0")) + Fraction(
        Decimal(digits + (found["power"] or ""))
    ) / Fraction(under)
    return -size if sign else size


def read(text: str) -> tuple[Decimal | Fraction, bool] | None:
    """(value, whether in percent) of a text that is one number and nothing else; None of any other."""
    text = plain(text).strip(" \n$").removesuffix(".")
    if found := REPEATING.fullmatch(text):
        sign, whole, fixed, period = found.groups()
        scale = 10 ** len(fixed)
        repeating = Fraction(int(whole + fixed), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
        return (-repeating if sign else repeating), False
    percent = next((mark for mark in (r"\%", "%", "percent", "percentage", "pct") if text.endswith(mark)), "")
    text = re.sub(rf"^(?:\+\s*|([{MINUS}])\s+)", r"\1", text.removesuffix(percent).rstrip())
    found = NUMBER.fullmatch(SPACED.sub(lambda m: m[0].replace(" ", ""), text)) if "and" not in text else None
    size = value(found) if found else None
    return None if size is None else (size, bool(percent))


def as_latex(text: str) -> str:
    """The text with what LaTeX has no notation for, mixed numbers, e-3, × 10⁻³ and ½, as fractions and decimals."""
    text = VULGAR.sub(_vulgar, text.translate(ASCII).replace("\u2044", "/"))
    text = _MIXED_LATEX.sub(_improper, _MIXED.sub(_improper, _SIGNED.sub(r"\1 -", text)))
    text = _TIMES_TEN.sub(lambda m: m[1] + "e" + _power(m[2], m[3]), text)
    return _SCIENTIFIC.sub(lambda m: format(Decimal(m[0]), "f"), text)


def _improper(found):
    whole, over, under = (int(re.sub("[ ,]", "", part)) for part in found.groups() if part)
    return rf"\frac{{{whole * under + over}}}{{{under}}}"


def _vulgar(found):
    return _apart(found, *unicodedata.normalize("NFKC", found[1]).split("\u2044"))


def _apart(found, over, under):
    """over/under, with a space in between if a digit stands before."""
    before = found.string[max(found.start() - 1, 0) : found.start()]
    return f"{' ' if found[0][0].isspace() or before.isdigit() else ''}{over}/{under}"


def _power(plain, raised):
    return (plain or "".join(_RAISED[character] for character in raised)).replace("\u2013", "-")
