"""A small GPT trained on the sources of Python's standard library; run by ``make demo``."""
