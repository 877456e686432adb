"""Stages, boundaries and schedules as values."""
