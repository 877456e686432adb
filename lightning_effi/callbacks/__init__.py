"""Lightning callbacks over what the other rooms can do."""

from lightning_effi.callbacks.health import HealthCheck

__all__ = ["HealthCheck"]
