"""Which values there are, how one replaces another, and when."""

# ruff: noqa: E501 (a table)
# Three values in turn, by what sort of values a place takes.
VALUES: dict[str, dict[str, tuple[str, str, str]]] = {
    "any": {
        "number": ("2.0", "3.0", "2.5"),
        "types": ("1", "True", "1.0"),
        "zero": ("0.0", "-0.0", "0"),
        "nan": ("2.0", "math.nan", "-math.nan"),
        "nans": ("math.nan", "float('nan')", "2.0"),
        "equal": ("float('2.0')", "float('2.00')", "float('3.0')"),
        "integer": ("2", "3", "300"),
        "large": ("1 << 70", "(1 << 70) + 1", "2"),
        "infinite": ("2.0", "math.inf", "-math.inf"),
        "numpy": ("2.0", "np.float64(2.0)", "np.float64(3.0)"),
        "float32": ("np.float32(2.0)", "np.float32(3.0)", "2.0"),
        "class": ("2.0", "Derived2(3.0)", "Derived2(2.0)"),
        "none": ("2.0", "None", "3.0"),
        "text": ("'2'", "'3'", "'2.5'"),
        "fraction": ("fractions.Fraction(1, 2)", "fractions.Fraction(3, 2)", "0.5"),
        "enum": ("Level.TWO", "Level.THREE", "2"),
        "complex": ("2.0", "complex(2.0, 0.0)", "complex(2.0, -0.0)"),
        "bool": ("True", "False", "None"),
    },
    "number": {
        "number": ("2.0", "3.0", "2.5"),
        "types": ("1", "True", "1.0"),
        "zero": ("0.0", "-0.0", "0"),
        "nan": ("2.0", "math.nan", "math.inf"),
        "equal": ("float('2.0')", "float('2.00')", "float('3.0')"),
    },
    "positive": {"number": ("2.0", "3.0", "2.5"), "integer": ("2", "3", "1")},
    "integer": {"integer": ("2", "3", "1"), "types": ("1", "True", "2"), "equal": ("int('2')", "int('02')", "3")},
    "none": {"number": ("2.0", "3.0", "2.5")},
}

# How often the step is called, and which call comes after a change that is to be seen.
CALLS, AFTER, LATER, LAST = 15, 6, 9, 12

# Statements at a call; `$A`, `$B` and `$C` change the value to the first, the second and the third one.
WHEN: dict[str, str] = {
    "before": "if call == 0:\n    $B",
    "between": "if call == 1:\n    $B\nif call == 2:\n    $C",
    "after": "if call == 6:\n    $B",
    "twice": "if call == 6:\n    $B\nif call == 10:\n    $C",
    "back": "if call == 6:\n    $B\nif call == 9:\n    $A\nif call == 12:\n    $B",
    "every": "if call >= 5:\n    if call % 3 == 0:\n        $A\n    elif call % 3 == 1:\n        $B\n    else:\n        $C",
    "always": "if call % 2:\n    $B\nelse:\n    $A",
    "once": "if call == 6:\n    $B\nif call == 7:\n    $A",
    "thread": "if call == 6:\n    thread = threading.Thread(target=change_b)\n    thread.start()\n    thread.join()",
    "collected": "if call == 6:\n    $B\n    gc.collect()\nif call == 9:\n    $C\n    gc.collect()",
    "inside": "if call in (6, 9):\n    $A",
    "never": "if call == 6:\n    other = [call]",
}
