"""Numbers as people write them: the rule of the verifier `numeric`, as docs/concepts.md lists it.

The last thing with digits in a text decides. Where it is a date, a time, a root or arithmetic, nothing is
read, rather than a part of it. What stands in an earlier line is no part of it. A change of the rule is a new
version of it in `RULES` of `engine/problems/verifiers.py`.
"""

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction

# More digits, or a larger exponent, are no number that a person writes, and would cost time and memory.
LONGEST = 300
# Numbers that are not whole are equal within this share.
TOLERANCE = Fraction(1, 10**6)

# Minus signs and dashes, spaces inside numbers, and points, commas and operators of other scripts.
SPELLINGS = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2010\u2011\u2012\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u3000\t~", " ")
    | dict.fromkeys("\u200b\u2060\ufeff", "")
    | dict.fromkeys("·⋅∙", "×")
    | {"＋": "+", "．": ".", "٫": ".", "，": ",", "٬": ",", "％": "%", "⁄": "/", "∕": "/", "’": "'"}
)
SUPERSCRIPT = re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
VULGAR = re.compile(r"(\d?) ?([¼-¾⅐-⅞])")
INDEX = re.compile(r"([\^_]) ?\{ ?([-+]?\d+) ?\}")
FRACTION = re.compile(r"(\d?) ?\\[dt]?frac ?(?:\{([^{}]*)\}|(\d)) ?(?:\{([^{}]*)\}|(\d))")
# Functions: their arguments are no numbers of their own. LaTeX's need no parentheses.
FUNCTIONS = "ln|log|exp|sin|cos|tan"
CALLS = f"{FUNCTIONS}|sqrt|cbrt|abs|floor|ceil|round|max|min|gcd|lcm|mod|sum"
# What stands before an amount without a space: any other letters with a number are a name.
CURRENCIES = (
    r"(?:(?:Fr|[Kk]r|Rp|Rs)\.(?=\d)|(?:AED|AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|HKD|HUF|IDR|ILS|INR|JPY|KRW|MXN"
    r"|MYR|NOK|NZD|PHP|PKR|PLN|RM|RMB|SAR|SEK|SGD|THB|TRY|TWD|USD|VND|ZAR|Fr|[Kk]r|Rp|Rs)(?=[-+]?\.?\d))"
)
# Applied in order: LaTeX's spellings, then marks of currency and of Markdown.
MARKS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\[,;: \\]", " "),
        (r"\\([%$])", r"\1"),
        (r"\\(?:left|right)(?![A-Za-z])|\\!", ""),
        # A repeating decimal, as `0.(3)`.
        (r"\\(?:overline|bar|dot) ?(?:\{ ?(\d+) ?\}|(\d))", r"(\1\2)"),
        (r"\\(?:cdot|times)(?![A-Za-z])", "×"),
        (r"\\div(?![A-Za-z])", "÷"),
        (r"\\pm(?![A-Za-z])", "±"),
        (r"\\pi(?![A-Za-z])", "π"),
        (r"\\sqrt ?(?:\[[^][]*\])?", "√"),
        (rf"\\({CALLS})(_\d+)? ?\(", r"\1\2("),
        (rf"\\(?:{FUNCTIONS}|[bp]?mod)(?![A-Za-z])(?:_\d+)? ?", "√"),
        (r"\^ ?\{? ?\\circ", "°"),
        (r"\\[A-Za-z]+", " "),
        # A formula's sign may have a space behind it: there is no list.
        (r"(?<=[$({[]) *- (?=[\d.$])", "-"),
        # What is left of a fraction with braces inside.
        (r"\} ?\{", "/"),
        (r"[{}]", ""),
        (r"(?<=\d)\*\*(?=[-+\d])", "^"),
        (r"(?:(?<=[\d)])|(?<=\b[A-Za-z])) \*\* (?=[-+(\w])", " ^ "),
        (r"(?<=[A-Za-z])(?:[$€£¥₹`]|\*\*|__)+", " "),
        (r"[€£¥₹] ?|[$`]|\*\*|__", ""),
        (rf"(?<=[-+]){CURRENCIES}", ""),
        (rf"\b{CURRENCIES}", " "),
        (r"(?<![\d)] )(?<![\w)*\\])\*(?=[^\s*])([^*\n]*+)(?<!\s)\*(?![\w*])", r"\1"),
    )
)

# Thousands by point or space with a decimal comma.
EUROPEAN = r"[1-9]\d{0,2}(?:(?:\.\d{3}){2,99}(?:,\d+)?|(?:\.\d{3}|(?: \d{3}){1,99}),\d{1,2})(?![.,]?\d)"
# By comma, space, apostrophe or underscore.
THOUSANDS = "|".join(
    rf"{before}[1-9]\d{{0,2}}(?:{mark}\d{{3}}){{1,99}}(?!{mark}?\d)"
    for mark, before in ((",", ""), (" ", r"(?<!\d )"), ("'", ""), ("_", ""))
)
# A point behind a letter ends a sentence or an abbreviation: No.42.
POINT = r"(?<![A-Za-z\d.])\.\d+"
DIGITS = rf"(?:{EUROPEAN}|(?:{THOUSANDS}|[1-9]\d?(?:,\d\d){{1,9}},\d{{3}}(?!,?\d)|\d+)(?:\.\d+)?|{POINT})"
NUMBER = (
    r"(?P<sign>[-+]|\b[Mm]inus |\b[Nn]egative )?"
    r"(?:(?P<whole>\d+) (?=\d+ ?/ ?\d))?"
    rf"(?P<digits>{DIGITS})"
    r"(?:[eE](?P<exponent>[-+]?\d+)| ?[×*xX] ?10\^(?P<ten>[-+]?\d+))?"
    r"(?:\^(?P<power>[-+]?\d+))?"
    rf"(?: ?/ ?(?P<under>[-+]?{DIGITS}))?"
    r"(?P<scale> ?%| (?:percent|per cent|thousand|million|billion|trillion)\b)?"
)
# Names, units and indices have digits and are not numbers: H2O, x_1, m^2, GPT-4, v2.0, ABC1,234.
WORD = r"(?P<word>(?!(?:[Mm]inus|[Nn]egative) [\d.])[A-Za-z]++(?:[-_^]{0,2}\d+(?:[.,]\d+)*+[A-Za-z]*+)*+)"
# Functions of numbers, hexadecimal, times and ratios, repeating decimals, dates and versions.
OTHER = (
    rf"(?P<other>(?<![A-Za-z])(?:[A-Za-z]|{CALLS})(?:_?\d{{1,9}})?"
    r"\((?=[^()\n\d]{0,99}\d)[^()\n]{0,199}\)"
    r"|0[xXoObB][\dA-Fa-f]+|\d+(?::\d+)+|\d+\.\d*\(\d+\)"
    rf"|(?!{EUROPEAN})\d+(?P<mark>[-/.])\d+(?:(?P=mark)\d+)+)"
)
TOKEN = re.compile(f"{OTHER}|{WORD}|{NUMBER}")
# An operator or a root before a number, and what continues one behind it: it is a part of an expression.
BEFORE = re.compile(
    r"(?:(?:[\d)π%] ?[-+×÷*xX] ?|[A-Za-z] ?[+×÷*] ?|\b[A-Za-z] ?- ?|[√±^/] ?)\(? ?"
    r"|[-+×÷*\d)]\( ?|[\d)](?:%| % ))\Z"
)
BEHIND = re.compile(r" ?(?:[π√^]|[xX]\d)|[\u0304\u0305\u0307]")
SCALES = {"%": Fraction(1, 100), "percent": Fraction(1, 100), "per cent": Fraction(1, 100)} | {
    word: Fraction(1000**power)
    for power, word in enumerate(("thousand", "million", "billion", "trillion"), start=1)
}


def last_number(text: str) -> tuple[Fraction, ...]:
    """Return how the last number of a text may be read: nothing without one, two values for 50% or 5 million.

    Where the text has a whole `\\boxed{...}`, the last one is the text.
    """
    plain = _plain(_boxed(text))
    tokens = list(_tokens(plain))
    return _values(plain, tokens[-1]) if tokens else ()


def bare_number(text: str) -> Fraction | None:
    """Return the number that a whole text is; None for other text and for what has two readings."""
    plain = _plain(_boxed(text)).strip().removesuffix(".")
    tokens = list(_tokens(plain))
    values = _values(plain, tokens[0]) if len(tokens) == 1 and tokens[0].group() == plain else ()
    return values[0] if len(values) == 1 else None


def are_equal(one: Fraction, other: Fraction) -> bool:
    """Compare whole numbers exactly, others within a relative `TOLERANCE`."""
    if one.denominator == other.denominator == 1:
        return one == other
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))


def _tokens(plain: str) -> Iterator[re.Match[str]]:
    return (match for match in TOKEN.finditer(plain) if match["word"] is None)


def _boxed(text: str) -> str:
    """Return what the last `\\boxed{...}` of a text holds, in its braces, or the text."""
    start = text.rfind("\\boxed")
    opening = text.find("{", start)
    if start < 0 or opening < 0 or text[start + len("\\boxed") : opening].strip():
        return text
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[opening : at + 1]
    return text


def _plain(text: str) -> str:
    """Return a text in the spellings that `TOKEN` knows."""
    text = text.translate(SPELLINGS).replace("{,}", ",")
    text = SUPERSCRIPT.sub(lambda match: "^" + _folded(match[0]), text)
    text = VULGAR.sub(_vulgar, text)
    text = FRACTION.sub(_fraction, INDEX.sub(r"\1\2", text))
    for pattern, spelling in MARKS:
        text = pattern.sub(spelling, text)
    return text


def _vulgar(match: re.Match[str]) -> str:
    digit, sign = match.groups()
    return (digit and f"{digit} ") + _folded(sign)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).translate(SPELLINGS)


def _fraction(match: re.Match[str]) -> str:
    digit, over, short_over, under, short_under = match.groups()
    return (digit and f"{digit} ") + f"{over or short_over}/{under or short_under}"


def _values(plain: str, match: re.Match[str]) -> tuple[Fraction, ...]:
    """Return the readings of a token; nothing for one that is not a number or a part of an expression."""
    before = plain[max(0, match.start() - 8) : match.start()].rpartition("\n")[2]
    sign = match["sign"] or ""
    joint = r"[A-Za-z\d)%]\Z" if sign in ("-", "+") else r"[\d)%] ?\Z"
    is_joined = sign and re.search(joint, before)
    if match["other"] or is_joined or BEFORE.search(before) or BEHIND.match(plain, match.end()):
        return ()
    value = _value(match)
    if value is None:
        return ()
    # A sign with a space is one behind an equals sign alone: elsewhere it begins an item of a list.
    if sign not in ("", "+") or re.search(r"[=≈] ?- \Z", before):
        value = -value
    scale = (match["scale"] or "").strip()
    return (value, value * SCALES[scale]) if scale else (value,)


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a token without its sign and scale."""
    if len(match.group()) > LONGEST:
        return None
    exponent, power = int(match["exponent"] or match["ten"] or 0), int(match["power"] or 1)
    if max(abs(exponent), abs(power) * len(match["digits"])) > LONGEST:
        return None
    under, over = _decimal(match["under"] or "1"), _decimal(match["digits"]) * Fraction(10) ** exponent
    if not under or (not over and power < 0):
        return None
    part = over**power / under
    if match["whole"] is None:
        return part
    # Two numbers side by side, such as `3 10/2`, are not a mixed fraction.
    return int(match["whole"]) + part if part < 1 else None


def _decimal(digits: str) -> Fraction:
    if re.fullmatch(EUROPEAN, digits.lstrip("+-")):
        digits = digits.replace(".", "").replace(",", ".")
    return Fraction(re.sub(r"[ ,'_]", "", digits))
