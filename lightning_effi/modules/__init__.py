"""What is this module: its repeated blocks, the units outside them, the parameters they share."""

from lightning_effi.modules.blocks import Block, find_all_blocks, find_blocks, shared_parts
from lightning_effi.modules.parameters import ParameterInfo, describe_parameters

__all__ = ["Block", "ParameterInfo", "describe_parameters", "find_all_blocks", "find_blocks", "shared_parts"]
