"""The series that `overhead.py` measures, each in a file of its name."""
