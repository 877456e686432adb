"""Modules with the habits of published code: own losses, own schedules, inner methods, loops of generation."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import BatchList
from tests.models.base import ExampleModule
from tests.models.gpt import CONTEXT, VOCABULARY, Block
from tests.models.gpt import batches as token_batches


class Validated(ExampleModule):
    """Brings its own validation data, of which the last batch is shorter."""

    def val_dataloader(self) -> DataLoader[Any]:
        [first, second] = token_batches(2, rows=3, seed=11)
        return DataLoader(BatchList([first, second[:1]]), batch_size=None)


class SequenceToSequence(Validated):
    """A transformers encoder-decoder whose loss is made here, from logits, smoothed by hand, with frozen embeddings.

    Validation generates in a loop with a cache, runs forward once more, and returns strings.
    """

    smoothing = 0.1

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        from transformers import BartConfig, BartForConditionalGeneration

        self.network = BartForConditionalGeneration(
            BartConfig(
                vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
                dropout=0.0, init_std=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
                forced_eos_token_id=None,
            )
        )  # fmt: skip
        for embedding in (self.network.model.shared, self.network.model.encoder.embed_positions):
            embedding.requires_grad_(False)
        self.generated: list[list[int]] = []

    def loss(self, batch: Tensor) -> Tensor:
        source, target = batch, batch.flip(1)
        logits = self.network(input_ids=source, decoder_input_ids=target[:, :-1], use_cache=False).logits
        assert logits.shape[-1] == self.network.config.vocab_size
        log_probabilities = logits.log_softmax(dim=-1)
        wanted = target[:, 1:].unsqueeze(-1)
        likelihood = -log_probabilities.gather(-1, wanted).squeeze(-1)
        smooth = -log_probabilities.mean(dim=-1)
        return ((1 - self.smoothing) * likelihood + self.smoothing * smooth).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        return {"loss": loss, "text": [str(row.tolist()) for row in batch]}

    def validation_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:  # type: ignore[override]
        tokens = self.network.generate(input_ids=batch, max_new_tokens=4, num_beams=1, do_sample=False)
        self.generated += tokens.tolist()
        loss = self.loss(batch)
        self.log("val_loss_epoch", loss, sync_dist=True, batch_size=len(batch))
        return {"loss": loss, "text": [str(row.tolist()) for row in tokens]}


class FusedAttention(nn.Module):
    """Query, key and value of each head side by side, as in a well-known tutorial."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_attention: bool = False) -> Any:
        rows, length, width = x.shape
        qkv = self.qkv_proj(x).reshape(rows, length, self.heads, 3 * width // self.heads).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -9e15)
        attention = F.softmax(scores, dim=-1)
        output = self.o_proj((attention @ v).permute(0, 2, 1, 3).reshape(rows, length, width))
        return (output, attention) if return_attention else output


class EncoderBlock(nn.Module):
    """Norms after the residual additions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.self_attn = FusedAttention(width, heads)
        self.linear_net = nn.Sequential(nn.Linear(width, 32), nn.ReLU(inplace=True), nn.Linear(32, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.self_attn(x, mask=mask))
        return self.norm2(x + self.linear_net(x))


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderBlock(width, 4) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


class PositionalEncoding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        angles = torch.arange(16)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("table", table[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.size(1)]


class Predictor(Validated):
    """Abstract: children by name, and a schedule that is kept, not returned, and stepped with the optimizer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        width = 16
        self.input_net = nn.Sequential(nn.Dropout(0.0), nn.Linear(VOCABULARY, width))
        self.positional_encoding = PositionalEncoding(width)
        self.transformer = Encoder(width)
        self.output_net = nn.Sequential(
            nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(inplace=True), nn.Linear(width, VOCABULARY)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None, add_positional_encoding: bool = True) -> Tensor:
        x = self.input_net(x)
        if add_positional_encoding:
            x = self.positional_encoding(x)
        return self.output_net(self.transformer(x, mask=mask))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.lr_scheduler.step()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError


class ReversePredictor(Predictor):
    def _calculate_loss(self, batch: Tensor, mode: str) -> Tensor:
        tokens = batch[:, :-1]
        logits = self.forward(F.one_hot(tokens, VOCABULARY).float())
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.flip(1).flatten())
        self.log(f"{mode}_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._calculate_loss(batch, mode="train")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._calculate_loss(batch, mode="val")


class PixelBlock(nn.Module):
    """``nn.MultiheadAttention`` on ``[length, rows, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((len(x), len(x)), -float("Inf"), device=x.device, dtype=x.dtype).triu(diagonal=1)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class PixelGPT(Validated):
    """The step turns rows into sequence-first order; centroids are no optimizer's; the classifier is used on demand."""

    def __init__(self, classify: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        width = 16
        self.classify = classify
        self.centroids = nn.Parameter(torch.linspace(0, 1, VOCABULARY), requires_grad=False)
        self.sos = nn.Parameter(0.1 * torch.randn(width))
        self.token_embeddings = nn.Embedding(VOCABULARY, width)
        self.position_embeddings = nn.Embedding(CONTEXT + 1, width)
        self.layers = nn.ModuleList(PixelBlock(width, 4) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.clf_head = nn.Linear(width, 3)

    def forward(self, x: Tensor, classify: bool = False) -> Any:
        length, rows = x.shape
        h = self.token_embeddings(x)
        start = torch.ones(1, rows, h.shape[-1], device=x.device) * self.sos
        h = torch.cat([start, h[:-1]], dim=0)
        h = h + self.position_embeddings(torch.arange(length, device=x.device)).unsqueeze(-2).expand_as(h)
        for layer in self.layers:
            h = layer(h)
        h = self.ln_f(h)
        logits = self.head(h)
        return (self.clf_head(h.mean(dim=0)), logits) if classify else logits

    def loss(self, batch: Tensor) -> Tensor:
        pixels = self.centroids[batch]
        tokens = (pixels[..., None] - self.centroids).square().argmin(dim=-1)
        tokens = tokens.reshape(len(batch), -1).transpose(0, 1).contiguous()
        if not self.classify:
            return F.cross_entropy(self(tokens).view(-1, VOCABULARY), tokens.view(-1))
        classes, logits = self(tokens, classify=True)
        generative = F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1))
        return generative + F.cross_entropy(classes, batch[:, 0] % 3)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for n, p in self.named_parameters() if n != "centroids"], lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Inner(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)

    def encode(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.emb.weight)
        for layer in self.layers:
            x = layer(x)
        return x

    def head(self, hidden: Tensor) -> Tensor:
        return self.out(self.norm(hidden))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self.head(self.encode(tokens))[:, -1:].argmax(-1)], dim=1)
        return tokens


class InnerMethods(Validated):
    """Calls methods of an inner module instead of its forward, single layers, and uses a weight directly."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.model = Inner()
        self.generated: list[list[int]] = []

    def loss(self, batch: Tensor) -> Tensor:
        hidden = self.model.encode(batch[:, :-1])
        loss = F.cross_entropy(self.model.head(hidden).flatten(0, 1), batch[:, 1:].flatten())
        return loss + self.model.layers[0](hidden).square().mean() + self.model.emb.weight.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.generated += self.model.generate(batch[:, :4], 5).tolist()
        self.log("val_loss_epoch", self.loss(batch), sync_dist=True, batch_size=len(batch))


class Projection(nn.Linear):
    """A class of its own for a linear layer, which writes the product and the sum by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight.T
        return x if self.bias is None else x + self.bias


class Positions(nn.Embedding):
    """Is called with the shape of a batch, and looks its rows up itself."""

    def forward(self, shape: torch.Size, past: int = 0) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(past, past + shape[1], device=self.weight.device))


class WeighingBlock(nn.Module):
    """Remembers its attention weights, gives them to whoever called it, and looks at a table of relative positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = Projection(width, 3 * width), Projection(width, width)
        self.relative = nn.utils.parametrizations.weight_norm(nn.Linear(width, width, bias=False))
        self.up, self.down = Projection(width, 2 * width), Projection(2 * width, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        relative = self.relative(table).view(len(table), self.heads, -1).transpose(0, 1)
        index = torch.arange(length)[:, None] - torch.arange(length) + length - 1
        towards = torch.gather(q @ relative.mT, -1, index.expand(rows, self.heads, -1, -1))
        self.seen = weights = ((q @ k.mT + towards) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)))), weights


class SharedBlock(Validated):
    """One block in a list, called three times; the loss looks at the attention of some heads."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        width = 16
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), Positions(CONTEXT, width)
        self.table = nn.Embedding(2 * CONTEXT, width)
        self.layers = nn.ModuleList([WeighingBlock(width, 4)])
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        tokens, sharpness = batch[:, :-1], torch.zeros(())
        x = self.embedding(tokens) + self.positions(tokens.shape)
        for _ in range(3):
            x, weights = self.layers[0](x, self.table.weight[1:])
            sharpness = sharpness + weights[:, 1:3].square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten()) + sharpness

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss_epoch", self.loss(batch), sync_dist=True, batch_size=len(batch))


class AttentionsInAList(Validated):
    """Lists of norms and attentions side by side; the loss looks at the attention of one head."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        width = 16
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), Positions(CONTEXT, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attentions = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        tokens, sharpness = batch[:, :-1], torch.zeros(())
        x = self.embedding(tokens) + self.positions(tokens.shape)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            query = norm(x)
            output, weights = attention(query, x, x, average_attn_weights=False)
            x, sharpness = query + output, sharpness + weights[:, 0].square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten()) + sharpness

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss_epoch", self.loss(batch), sync_dist=True, batch_size=len(batch))


class Generated(pl.Callback):
    """What the module generated in validation, as an observation."""

    observation: list[list[int]]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.observation = list(getattr(pl_module, "generated", []))


def classifying_pixels(**settings: Any) -> PixelGPT:
    return PixelGPT(classify=True, **settings)


class Distilling(InnerMethods):
    """A teacher, another one from the start, follows within ``training_step``; a weight is bounded there."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.teacher = Inner().requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for followed, mine in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
                mine.data.mul_(0.7).add_(followed.data, alpha=0.3)
            weight = self.model.layers[0].mlp[0].weight
            weight.data = weight.data.clamp(-0.05, 0.05)
            targets = self.teacher.encode(batch[:, :-1])
        return self.loss(batch) + F.mse_loss(self.model.encode(batch[:, :-1]), targets)
