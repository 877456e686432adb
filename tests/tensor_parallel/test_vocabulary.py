"""Embeddings, logits and losses over a vocabulary that is split: values and gradients are those of the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

from lightning_effi.tensor_parallel.collectives import TensorGroup, take
from lightning_effi.tensor_parallel.layers.apply import AppliedPlan
from lightning_effi.tensor_parallel.layers.outside import WeightsOutsideLayers
from lightning_effi.tensor_parallel.planning.plan import LayerPlan
from lightning_effi.tensor_parallel.rules import on_gather
from lightning_effi.tensor_parallel.rules.vocabulary import on_loss
from lightning_effi.tensor_parallel.split import Split, gathered, wrap
from tests.harness import WorkerError, run_distributed

ROWS, WIDTH = 6, 8


class Model(nn.Module):
    """A table, a body and a head, which is tied or has a bias."""

    def __init__(self, vocabulary: int, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocabulary, WIDTH, padding_idx=1)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.table(tokens)).tanh())


Loss = Callable[[Model, Tensor, Tensor], Tensor]


def compare(name: str, loss: Loss, vocabulary: int, tied: bool = False, gathers: bool | None = None) -> None:
    """Value and all gradients of ``loss(model, tokens, target)``, in parts and whole."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocabulary, (ROWS,), generator=generator)
    tokens[:2] = torch.tensor([1, vocabulary - 1])
    target = torch.randint(vocabulary, (ROWS,), generator=generator)
    plain, parallel = Model(vocabulary, tied).double(), Model(vocabulary, tied).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    layers = [LayerPlan(end, "vocab", (vocabulary,)) for end in ("table", "head")]
    applied = AppliedPlan(parallel, layers, mesh)
    assert (parallel.table.weight is parallel.head.weight) == tied
    expected = loss(plain, tokens, target)
    calls: list[str] = []
    with on_gather(lambda function, _: calls.append(function)), WeightsOutsideLayers(applied.group):
        actual = gathered(loss(parallel, tokens, target))
    if gathers is not None:
        assert bool(calls) == gathers, f"{name}: gathered for {calls}"
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{name}: {text}")
    pull = torch.randn(expected.shape, dtype=expected.dtype, generator=generator)
    expected.backward(pull)
    actual.backward(pull)
    for (key, ours), theirs in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        gradient = ours.grad if theirs.grad is not None else theirs.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(gradient, theirs.grad, msg=lambda text, k=key: f"{name}: gradient of {k}: {text}")


# -- the loss --------------------------------------------------------------------------------------------------------


def compare_losses(vocabulary: int) -> None:
    weight = torch.rand(vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 0.5
    cases = product(("mean", "sum", "none"), (0.0, 0.1), (None, weight), (-100, None))
    for reduction, smoothing, class_weight, ignored in cases:

        def hard(model: Model, tokens: Tensor, target: Tensor, r=reduction, s=smoothing, w=class_weight, i=ignored):
            index = int(target[2]) if i is None else i  # a class that occurs, or the usual -100
            target = target.masked_fill(torch.arange(ROWS) == 4, index)
            return F.cross_entropy(model(tokens), target, w, ignore_index=index, reduction=r, label_smoothing=s)

        def soft(model: Model, tokens: Tensor, target: Tensor, r=reduction, s=smoothing, w=class_weight):
            wanted = torch.linspace(0, 1, ROWS * vocabulary).double().view(ROWS, vocabulary).softmax(-1)
            return F.cross_entropy(model(tokens), wanted, w, reduction=r, label_smoothing=s)

        name = f"{reduction}, smoothing {smoothing}, weights {class_weight is not None}, ignored {ignored}"
        compare(name, hard, vocabulary, gathers=False)
        if ignored is None:
            compare(f"probabilities, {name}", soft, vocabulary, gathers=False)


@pytest.mark.parametrize(
    ("world_size", "vocabulary"),
    [(2, 17), *(pytest.param(*case, marks=pytest.mark.full) for case in [(2, 16), (4, 16), (4, 17)])],
)
def test_cross_entropy_equals_that_of_the_whole(world_size: int, vocabulary: int) -> None:
    run_distributed(compare_losses, world_size, vocabulary)


def compare_low_precision() -> None:
    group = TensorGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, 17, generator=generator).bfloat16().requires_grad_()
    target, weight = torch.randint(17, (ROWS,), generator=generator), torch.rand(17, generator=generator)
    for autocast in (False, True):
        weight = weight if autocast else weight.bfloat16()
        parts = wrap(take(logits, 1, (17,), group), Split(group, 1, (17,), yields=True))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = [F.cross_entropy(given, target, weight, label_smoothing=0.1) for given in (parts, logits)]
        assert losses[0].dtype == losses[1].dtype
        torch.testing.assert_close(losses[0], losses[1])
        ours, theirs = (torch.autograd.grad(loss, logits)[0] for loss in losses)
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=1e-4)


def test_low_precision_logits_are_summed_in_fp32_and_give_the_dtype_of_torch() -> None:
    run_distributed(compare_low_precision, 2)


def images(model: Model, tokens: Tensor, target: Tensor) -> Tensor:
    """Classes in dim 1, as for segmentation."""
    logits = model(tokens.view(2, 3)).transpose(1, 2)
    return nn.CrossEntropyLoss(label_smoothing=0.2)(logits, target.view(2, 3))


def shifted(model: Model, tokens: Tensor, target: Tensor) -> Tensor:
    """As transformers computes its losses."""
    logits = model(tokens.view(2, 3)).to(torch.float64)
    labels = F.pad(target.view(2, 3), (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.view(-1, logits.size(-1))
    return F.cross_entropy(logits, labels.view(-1).to(logits.device), ignore_index=-100, reduction="sum") / 7


def cut_in_chunks(model: Model, tokens: Tensor, target: Tensor) -> Tensor:
    logits = 30 * torch.tanh(model(tokens) / 30)
    pairs = zip(logits.chunk(2), target.chunk(2), strict=True)
    return torch.stack([F.cross_entropy(part, wanted) for part, wanted in pairs]).mean()


def one_row(model: Model, tokens: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[1], target[1])


def nothing_counts(model: Model, tokens: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens), torch.full_like(target, -100), reduction="sum")


IN_PARTS: dict[str, Loss] = {
    f.__name__: f for f in (images, shifted, cut_in_chunks, one_row, nothing_counts)
}  # fmt: skip


# -- everything else that touches logits -----------------------------------------------------------------------------


def set_to_nothing(logits: Tensor, _: Tensor) -> Tensor:
    logits[..., :3] = -1.0
    logits[0].mul_(2.0)
    return logits


WHOLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, y: x.gather(1, y[:, None]),
    "log_softmax": lambda x, y: x.log_softmax(-1).gather(-1, y[:, None]),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
    "softmax": lambda x, y: x.softmax(dim=-1),
    "topk": lambda x, y: x.topk(3, dim=-1).values,
    "argmax": lambda x, y: x[torch.arange(ROWS), x.argmax(-1)],
    "index": lambda x, y: x[torch.arange(ROWS), y],
    "column": lambda x, y: x[:, 5],
    "slice": lambda x, y: x[:, 2:7],
    "view": lambda x, y: x.reshape(2, -1).sum(-1),
    "logsumexp": lambda x, y: x.logsumexp(-1).square(),
    "mean": lambda x, y: x.mean(),
    "data": lambda x, y: x * x.data.max(1).values[:, None],
    "type": lambda x, y: x.type(torch.float64).max(-1).values,
    "product": lambda x, y: (x.softmax(-1) @ x.mT).sum(-1),
    "written to": set_to_nothing,
    "adjoint": lambda x, y: x.mH[3],
    "one_hot": lambda x, y: (F.one_hot(y, x.shape[-1]) * x).sum(),
    "binary": lambda x, y: F.binary_cross_entropy_with_logits(x, F.one_hot(y, x.size(1)).to(x)),
    "kl": lambda x, y: F.kl_div(F.log_softmax(x, -1), x.detach().softmax(-1).flip(0), reduction="batchmean"),
    "multi_margin": lambda x, y: F.multi_margin_loss(x, y),
    "numbers": lambda x, y: x * torch.tensor(x.tolist()).sum(),
    "repeated": lambda x, y: x.repeat(2, 1),
}


# -- weights outside their layers ------------------------------------------------------------------------------------

OUTSIDE: dict[str, Loss] = {
    "F.linear": lambda m, x, y: F.cross_entropy(F.linear(m.body(m.table(x)), m.table.weight), y),
    "F.linear, bias": lambda m, x, y: F.linear(m.table(x), m.table.weight, m.body.bias.new_ones(m.head.out_features)),
    "@ weight.T": lambda m, x, y: F.cross_entropy(m.body(m.table(x)) @ m.table.weight.T, y),
    "F.embedding": lambda m, x, y: m.body(F.embedding(x, m.table.weight)),
    "weight[tokens]": lambda m, x, y: m.body(m.table.weight[x]),
    "einsum": lambda m, x, y: torch.einsum("nd,vd->nv", m.body(m.table(x)), m.table.weight),
    "penalty": lambda m, x, y: F.cross_entropy(m(x), y) + sum(p.square().sum() for p in m.parameters()),
    "logits + weight": lambda m, x, y: m(x) + m.table.weight.sum(-1),
}  # fmt: skip


def compare_uses(vocabulary: int, tied: bool) -> None:
    failed = []
    uses = {name: lambda model, tokens, target, u=use: u(model(tokens), target) for name, use in WHOLE.items()}
    for name, loss in {**IN_PARTS, **uses, **OUTSIDE}.items():
        try:
            compare(name, loss, vocabulary, tied, gathers=False if name in IN_PARTS else None)
        except Exception as error:
            failed.append(f"'{name}': {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


_DEFAULT = [(2, 17, False), (2, 16, True), (4, 17, True)]
_OTHERS = [(4, 16, False), (4, 16, True), *((n, v, not tied) for n, v, tied in _DEFAULT)]
_IN_FULL = [pytest.param(*case, marks=pytest.mark.full) for case in _OTHERS]


@pytest.mark.parametrize(("world_size", "vocabulary", "tied"), [*_DEFAULT, *_IN_FULL])
def test_whatever_touches_logits_sees_the_whole(world_size: int, vocabulary: int, tied: bool) -> None:
    run_distributed(compare_uses, world_size, vocabulary, tied)


# -- cost ------------------------------------------------------------------------------------------------------------


def count_messages() -> tuple[int, ...]:
    model = Model(16, tied=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    AppliedPlan(model, [LayerPlan(end, "vocab", (16,)) for end in ("table", "head")], mesh)
    tokens = torch.arange(6)
    counts = []
    with CommDebugMode() as messages, on_loss(lambda: counts.append(1)):
        loss = F.cross_entropy(model(tokens), tokens)
    counts.append(messages.get_total_counts())
    with CommDebugMode() as messages:
        loss.backward()
    counts.append(messages.get_total_counts())
    with torch.no_grad():
        assert type(model(tokens)) is Tensor
    return tuple(counts)


def test_embedding_sends_one_message_loss_two_and_backward_one() -> None:
    assert run_distributed(count_messages, 2) == [(1, 3, 1)] * 2


def look_up(row: int, as_target: bool) -> None:
    model = Model(17, tied=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    AppliedPlan(model, [LayerPlan(end, "vocab", (17,)) for end in ("table", "head")], mesh)
    tokens = torch.tensor([3, row])
    F.cross_entropy(model(tokens % 17), tokens) if as_target else model(tokens)


@pytest.mark.parametrize("as_target", [False, True], ids=["token", "target"])
@pytest.mark.parametrize("row", [17, -1])
def test_rows_that_do_not_exist_are_refused(row: int, as_target: bool) -> None:
    with pytest.raises(WorkerError, match=r"out of (range|bounds)"):
        run_distributed(look_up, 2, row, as_target)
