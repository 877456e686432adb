"""Precision: Lightning's flags carried out on shards, and loss scaling on which all ranks agree."""

from lightning_effi.precision.plugin import EffiPrecision, PrecisionName

__all__ = ["EffiPrecision", "PrecisionName"]
