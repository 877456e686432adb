"""Comparing a parallel module with the plain one, and saying what differs first."""
