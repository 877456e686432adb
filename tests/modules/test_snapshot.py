"""What a rehearsal changes is put back into the very same objects."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_effi.modules.restore import restored
from lightning_effi.modules.user_code import here


class Keeps(nn.Module):
    """Keeps something in every way, and shares it with a block."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = [1, torch.zeros(2)]
        self.by_name: dict[str, Any] = {"inner": [1], "last": None}
        self.counts: dict[str, int] = defaultdict(int, seen=1)
        self.ordered = OrderedDict(b=1, a=2)
        self.ids = {1, 2}
        self.recent = deque([1, 2], maxlen=3)
        self.array = np.arange(3)
        self.number = 1
        self.table = torch.arange(4.0)
        self.register_buffer("reassigned", torch.arange(3.0))
        self.register_buffer("resized", torch.arange(3.0))
        self.register_buffer("moved", torch.arange(3.0))
        self.register_buffer("missing", None, persistent=False)
        self.block = nn.Linear(2, 2)
        self.block.values = self.values  # type: ignore[assignment]

    def step(self) -> None:
        self.values.append(self.block.weight.sum())
        self.values[1].add_(1)
        self.by_name["inner"].append(2)
        self.by_name["new"] = self.by_name.pop("last", None)
        self.counts["seen"] += 1
        self.ordered.move_to_end("b")
        self.ids.add(3)
        self.recent.extend([3, 4])
        self.array += 1
        self.number += 1
        self.table[0] = 7
        self.reassigned = torch.ones(5)
        self.resized.resize_(5).fill_(1)
        self.moved.data = torch.ones(2)
        self.missing = torch.ones(2)
        self.added = torch.ones(2)


def described(module: Keeps) -> Any:
    held = {key: value for key, value in vars(module).items() if not key.startswith("_")} | module._buffers
    return {
        key: (id(value), value.clone() if isinstance(value, Tensor) else repr(value)) for key, value in held.items()
    }


@pytest.mark.parametrize("times", [1, 2])
def test_contents_go_back_into_the_same_objects(times: int) -> None:
    module = Keeps()
    before = described(module)
    inner, table = module.by_name["inner"], module.values[1]
    with restored(module):
        for _ in range(times):
            module.step()
    after = described(module)
    assert list(after) == list(before)
    for key, (identity, value) in before.items():
        assert after[key][0] == identity, key
        assert torch.equal(after[key][1], value) if isinstance(value, Tensor) else after[key][1] == value, key
    assert module.by_name["inner"] is inner
    assert module.values[1] is table
    assert module.block.values is module.values
    module.step()  # works on
    assert len(module.values) == 3


def test_put_back_after_an_error() -> None:
    class Fails(Keeps):
        def step(self) -> None:
            super().step()
            raise KeyError

    module = Fails()
    with pytest.raises(KeyError), restored(module):
        module.step()
    assert module.number == 1
    assert module.missing is None


def test_line_of_user_code_is_named() -> None:
    class Asks(nn.Module):
        def forward(self) -> str:
            return here()

    assert Asks()().startswith(" (test_snapshot.py:")
    assert "in forward: return here()" in nn.Sequential(Asks())[0]()
