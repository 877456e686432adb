"""Small LightningModules as people write them; none knows anything of lightning_effi.

``MODELS`` names each with its module and batches. Both are given by dotted names and imported on use, so that a case
can be pickled, and libraries such as transformers cost only the tests that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import lightning.pytorch as pl


@dataclass(frozen=True)
class ModelCase:
    """A module and data to train it on.

    Attributes:
        name: As in test ids.
        factory: ``package.module:name`` of the LightningModule class or of a function that makes one.
        data: ``package.module:name`` of a function ``(count) -> list`` of whole batches.
        blocks: Name of the list of repeated blocks.
        settings: Further keyword arguments of the factory.
        requires: Packages without which the case is skipped.
    """

    name: str
    factory: str
    data: str
    blocks: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()

    def module(self, **settings: Any) -> pl.LightningModule:
        """A new module, randomly initialised from torch's global generator."""
        return resolve_name(self.factory)(**{**self.settings, **settings})

    def batches(self, count: int) -> list[Any]:
        """``count`` different batches, the same ones on every call."""
        return resolve_name(self.data)(count)

    @property
    def missing(self) -> list[str]:
        """Required packages that are not installed."""
        return [package for package in self.requires if find_spec(package) is None]


_GPT, _HF, _VIT = "tests.models.gpt", "tests.models.hugging_face", "tests.models.vit"

_CASES = (
    ModelCase("gpt-tied", f"{_GPT}:GPT", f"{_GPT}:batches", "blocks", {"tied": True}),
    ModelCase("gpt-untied", f"{_GPT}:GPT", f"{_GPT}:batches", "blocks", {"tied": False}),
    ModelCase("encoder", "tests.models.encoder:TokenClassifier", "tests.models.encoder:batches", "encoder.layers"),
    ModelCase("llama", f"{_HF}:llama", f"{_HF}:causal_batches", "model.model.layers", requires=("transformers",)),
    ModelCase("gpt2", f"{_HF}:gpt2", f"{_HF}:causal_batches", "model.transformer.h", requires=("transformers",)),
    ModelCase("bert", f"{_HF}:bert", f"{_HF}:masked_batches", "model.bert.encoder.layer", requires=("transformers",)),
    ModelCase("vit-batchnorm", f"{_VIT}:ViT", f"{_VIT}:batches", "blocks"),
    ModelCase("vit-timm", f"{_VIT}:timm_vit", f"{_VIT}:batches", "network.blocks", requires=("timm",)),
    ModelCase("lora-gpt", "tests.models.lora:LoRAGPT", f"{_GPT}:batches", "blocks"),
    ModelCase(
        "lora-peft-llama",
        "tests.models.lora:peft_llama",
        f"{_HF}:causal_batches",
        "model.base_model.model.model.layers",
        requires=("peft", "transformers"),
    ),
    ModelCase("regressor", "tests.models.regression:Regressor", "tests.models.regression:batches", "encoder.layers"),
    ModelCase("two-tower", "tests.models.two_tower:TwoTower", "tests.models.two_tower:batches", "encoder.layers"),
)

MODELS: dict[str, ModelCase] = {case.name: case for case in _CASES}
