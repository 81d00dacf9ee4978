"""Types of numbers with a range, which jsonargparse checks."""

from math import inf

from jsonargparse.typing import restricted_number_type

MOST = ("<", 2**31)  # of any count: no machine has more, and torch would overflow

NonNegativeInt = restricted_number_type("Count", int, [(">=", 0), MOST])
PositiveInt = restricted_number_type("AtLeast1", int, [(">=", 1), MOST])
AtLeast2 = restricted_number_type("AtLeast2", int, [(">=", 2), MOST])
Pixels = restricted_number_type("Pixels", int, [(">=", 8), ("<", 2**15)])
Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**32)])
Rate = restricted_number_type("Rate", float, [(">", 0), ("<", inf)])
Finite = restricted_number_type("Finite", float, [(">", -inf), ("<", inf)])
