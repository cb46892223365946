"""A Python module with a number, for tests of what a step finds in other modules."""

SCALE = 2.0


def function() -> None:
    """Its globals are this module's."""
