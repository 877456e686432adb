"""Tensor parallelism on modules nobody prepared: trace → plan → apply → probe."""
