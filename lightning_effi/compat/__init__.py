"""Every private name of torch and Lightning that the package relies on, behind functions of our own.

Checked with torch 2.13 and 2.14 and Lightning 2.6. ``tests/test_compat.py`` exercises each function, so that a
release that changes one of them fails there, with the name, and not in the middle of somebody's run.
"""
