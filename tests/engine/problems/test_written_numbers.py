"""What the verifier `numeric` reads, as a table: a text, and what a person reads as its last number."""

import time

import pytest

from engine.problems.verifiers import numeric
from engine.problems.written_numbers import bare_number, last_number

# A text, and the number that a person reads there.
READ = [
    ("5", "5"), ("+5", "5"), ("-5", "-5"), ("−5", "-5"), ("–5", "-5"), ("x=-5", "-5"), ("= - 5", "-5"),
    ("答案是-5", "-5"), ("It is minus 5.", "-5"), ("negative 7", "-7"), ("1, -2", "-2"), ("5.", "5"),
    ("It is 5.5.", "5.5"), (".5", "0.5"), ("-.5", "-0.5"), ("7.0", "7"), ("007", "7"),
    ("1,234.5", "1234.5"), ("1,234,567", "1234567"), ("1 000 000", "1000000"),
    ("1\u00a0000\u00a0000", "1000000"), ("1\u2009000", "1000"), ("1\u202f000", "1000"), ("1'000", "1000"),
    ("1’000’000", "1000000"), ("1_000", "1000"), ("12,34,567", "1234567"), ("1.234.567", "1234567"),
    ("1.234,56", "1234.56"), ("1 234,56", "1234.56"), ("1.234", "1.234"), ("1 2 3 456", "456"),
    ("1,2345", "2345"), ("either 1,2", "2"), ("3, 4 and 5", "5"), ("3 or 5", "5"), ("1/2", "0.5"),
    ("-3 / 4", "-0.75"), ("1 1/2", "1.5"), ("½", "0.5"), ("1½ cups", "1.5"), ("1⁄4", "0.25"),
    ("1e5", "100000"), ("1.5E-3", "0.0015"), ("1.5 × 10^3", "1500"), ("1.5 x 10^3", "1500"),
    ("1.5x10^3", "1500"), ("3·10⁻⁴", "0.0003"), ("2*10**3", "2000"), ("10^6", "1000000"), ("2^10", "1024"),
    ("5²", "25"),
    (r"9{,}500", "9500"), (r"1\,000\,000", "1000000"), (r"\frac{1}{2}", "0.5"), (r"-\frac12", "-0.5"),
    (r"\dfrac{-3}{4}", "-0.75"), (r"2\frac{1}{2}", "2.5"), (r"\frac{10^{3}}{2}", "500"),
    (r"1.5 \times 10^{-3}", "0.0015"), (r"\[ x = 5 \]", "5"), ("$$5$$", "5"), (r"90^{\circ}", "90"),
    (r"\boxed{9{,}500}", "9500"), (r"\boxed{\frac{1}{2}} as in step 7", "0.5"),
    (r"\boxed{4} no, \boxed{5}", "5"), (r"\boxed{5", "5"), (r"$\boxed{5\text{ m}^2}$", "5"), ("**5**", "5"),
    ("**Answer:** -3", "-3"), ("`5`", "5"), ("#### 7", "7"), ("- 5", "5"), ("3\n* 5", "5"),
    ("3 + 1 = 4", "4"), ("10 minus 5 is 5", "5"), ("2×3=6", "6"), ("$5", "5"), ("-$5", "-5"),
    ("US$1,234.50", "1234.5"), ("5 €", "5"), ("€5", "5"), ("5 km", "5"), ("5km/h", "5"), ("5 m^2", "5"),
    ("5 m²", "5"), ("10 m/s^2", "10"), ("90°", "90"), ("2 atoms of H2O", "2"), ("x_1 = 3", "3"),
    ("5 for GPT-4", "5"), ("It is 5!", "5"), ("１２３", "123"), ("٣", "3"),
    # An earlier line is not before a number.
    ("The answer is\n-5", "-5"), ("so\n**-5**", "-5"), ("= 5\n-3", "-3"), ("Temperature (°C)\n-5", "-5"),
    ("10 %\n-5", "-5"), ("-5\n-7", "-7"), ("so\n$$-5$$", "-5"), ("2x\n5", "5"), ("3 *\n5", "5"),
    ("x\n- 5", "5"), ("y =\r\n-5", "-5"),
    ("The answer is *42*", "42"), ("So she has *42* apples.", "42"), ("*x* is *12*", "12"),
    ("***42***", "42"), ("It is ** 42 **.", "42"), ("_42_", "42"), ("*-5*", "-5"),
    ("*The answer is 42.*", "42"), ("3\n* *4*", "4"),
    ("RM12.50", "12.5"), ("It costs CHF5.", "5"), ("USD1,234.50", "1234.5"), ("EUR1.234,56", "1234.56"),
    ("Rs5,000", "5000"), ("Rs.500", "500"), ("kr99.90", "99.9"), ("-USD5", "-5"), ("USD-5", "-5"),
    ("USD.50", "0.5"), ("5 for ABC1,234", "5"), ("5 for GPT-3.5", "5"), ("5 for Llama3.1", "5"),
    ("5 in v2.0", "5"), ("5 in v2.0.1", "5"), ("5 at x_1.5", "5"), ("No.42", "42"), ("Fig.3", "3"),
    ("The total is.42", "42"), ("x=.5", "0.5"), (r"\boxed{- 5}", "-5"), ("$- 5$", "-5"),
    (r"\boxed{-\frac{1}{2}}", "-0.5"), (r"$$- \frac{1}{2}$$", "-0.5"), (r"\(- 5\)", "-5"),
    ("f(2) = 5", "5"), ("(5)", "5"), ("It is 5 (five)", "5"), ("the total (5)", "5"), ("A: 5", "5"),
    ("The answer - 5", "5"), ("In 3 years (-5)", "-5"), ("growth of 5% in 3 years", "3"),
    ("the sum is 5", "5"), ("f(x) is 5", "5"), ("5 = f(x)", "5"), (r"5\,\min", "5"),
    ("The answer - (5)", "5"),
]  # fmt: skip
# Nothing is read: no number, or a part of a date, a time, a name, a range, a root or arithmetic.
UNREAD = [
    "", "none", "-", "H2O", "GPT-4", "0x1F", "12:30", "3:4", "2024-05-01", "12/05/2024", "1.2.3",
    "192.168.1.1", "3-5", "3 - 5", "3–5", "2 + 2", "2*3", "1920x1080", "2 x 3", "7 minus 2", "5x + 3",
    "(x+1)^2", "x/2", "2π", r"2\pi", "√16", r"\sqrt{16}", r"\sqrt[3]{8}", r"\frac{\sqrt{3}}{2}",
    r"\frac{\pi}{2}",
    r"\frac{1+2}{3}", "5 ± 0.1", r"5 \pm 1", "1/0", "0^-1", "3 10/2", "1e999999999", "9" * 5000,
    "1e" + "9" * 5000, "NaN", "∞", r"\boxed{} 5",
    "ABC1,234", "GPT-3.5", "Llama3.1", "v2.0", "x_1.5", r"0.\overline{3}", r"0.1\bar{6}", r"0.\dot3",
    "0.(3)", "0.3\u0305", "2 ** 3", "y ** 2", "y - 5", "-(5)", "7 - (5)", "2(5)", "(2)(5)", "5 % 3", "5%3",
    "10^(3)", "sqrt(16)", "max(3, 5)", "f(2)", "log_2(8)", r"\log_{2} 8", r"\sin 30", r"\ln(2)",
    r"\max(3, 5)", r"17 \bmod 5",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), READ)
def test_a_number_is_read_as_a_person_reads_it(text: str, value: str) -> None:
    assert numeric("", value, text), last_number(text)
    assert not numeric("", str(float(value) + 1), text)


@pytest.mark.parametrize("text", UNREAD)
def test_what_is_not_a_number_is_not_read_in_part(text: str) -> None:
    assert last_number(text) == ()
    assert bare_number(text) is None


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("50%", ["50", "0.5"], ["5", "5000"]),
        (r"12.5\%", ["12.5", "0.125"], ["125"]),
        ("50 percent", ["50", "1/2"], ["500"]),
        ("5 million", ["5", "5000000"], ["5000"]),
        ("-2 thousand", ["-2000"], ["2000"]),
    ],
)
def test_percent_and_million_may_be_the_unit_of_the_question(
    text: str, right: list[str], wrong: list[str]
) -> None:
    assert [numeric("", answer, text) for answer in [*right, *wrong]] == [True] * len(right) + [False] * len(
        wrong
    )


@pytest.mark.parametrize(
    ("expected", "text", "is_right"),
    [
        ("1000000", "1000001", False),
        ("1000000", "1,000,000.0", True),
        ("9007199254740993", "9007199254740992", False),
        ("0.333333333", "1/3", True),
        ("1/3", "0.33", False),
        ("0.3", "0.30000000000000004", True),
        ("0", "0.0000001", False),
        ("12", "either 1,2", False),
        ("0", "1 000 000", False),
        ("5", "−5", False),
    ],
)
def test_whole_numbers_are_equal_exactly_and_others_within_a_millionth(
    expected: str, text: str, is_right: bool
) -> None:
    assert numeric("", expected, text) is is_right


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("5", "5"), (" -7\n", "-7"), ("−7", "-7"), ("1,234.5", "1234.5"), ("1 000 000", "1000000"),
        ("1/2", "1/2"), (r"\frac{1}{2}", "1/2"), (r"\boxed{9{,}500}", "9500"), ("1.5e3", "1500"),
        ("$5", "5"), ("5.", "5"), ("1,2", None), ("3,14", None), ("0,5", None), ("50%", None),
        ("5 million", None), ("5 km", None), ("3-5", None), ("12:30", None), ("#### 7", None),
        ("1e400", None), ("true", None), ("", None),
    ],
)  # fmt: skip
def test_an_expected_answer_is_one_number_and_nothing_else(answer: str, value: str | None) -> None:
    assert bare_number(answer) == (None if value is None else bare_number(value))
    assert value is None or numeric("", answer, answer)


@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "1,",
        "1 234",
        "1.234",
        "1,23",
        ",234",
        "-",
        "1-",
        "{",
        "a1",
        "\\frac{",
        "\\boxed{",
        "10^",
        "1/",
        "*1",
        "*a ",
        "f(",
        "f(1",
        "a1.",
        "RM1",
        "[ ",
        "0.(1",
        "sum_1",
        "\\log ",
    ],
)
def test_a_long_text_takes_time_in_proportion(piece: str) -> None:
    """The verifier runs in the training's process without a time limit."""
    began = time.process_time()
    last_number(piece * (20_000 // len(piece)))
    assert time.process_time() - began < 1
