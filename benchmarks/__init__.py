"""Benchmarks of lightning_effi against stock Lightning and hand-written torch loops."""
