"""More architectures, each with a habit that tensor parallelism has to cope with; named in ``ARCHITECTURES``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import ModelCase
from tests.models.base import ExampleModule
from tests.models.encoder import TokenClassifier
from tests.models.gpt import GPT, VOCABULARY
from tests.models.hugging_face import LENGTH, LanguageModel
from tests.models.hugging_face import VOCABULARY as HF_VOCABULARY

_SIZES: dict[str, Any] = {
    "vocab_size": HF_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.1,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def causal(architecture: str, implementation: str = "sdpa", module: dict[str, Any] | None = None, **sizes: Any) -> Any:
    """A causal language model of transformers by the prefix of its classes' names."""
    import transformers

    config = getattr(transformers, f"{architecture}Config")(**{**_SIZES, **sizes})
    model = getattr(transformers, f"{architecture}ForCausalLM")._from_config(config, attn_implementation=implementation)
    return LanguageModel(model, **(module or {}))


def opt(**settings: Any) -> LanguageModel:
    return causal("OPT", module=settings, ffn_dim=64, dropout=0.0, word_embed_proj_dim=32, init_std=0.1)


def llama_kv(kv_heads: int, implementation: str = "sdpa", **settings: Any) -> LanguageModel:
    return causal("Llama", implementation, module=settings, num_key_value_heads=kv_heads)


def qwen3(**settings: Any) -> LanguageModel:
    """Norms of single heads, whose weights every rank uses for its own heads."""
    return causal("Qwen3", module=settings, num_key_value_heads=2, head_dim=8)


def olmo2(**settings: Any) -> LanguageModel:
    """A norm over all heads of the queries together."""
    return causal("Olmo2", module=settings, num_key_value_heads=4)


def phi3(**settings: Any) -> LanguageModel:
    """Packed query, key and value of different sizes, and a packed gate."""
    return causal("Phi3", module=settings, num_key_value_heads=2)


def gpt_neox(**settings: Any) -> LanguageModel:
    """Query, key and value packed within each head; attention and MLP in parallel."""
    return causal("GPTNeoX", module=settings, hidden_dropout=0.0, attention_dropout=0.0, use_parallel_residual=True)


def gemma2(**settings: Any) -> LanguageModel:
    return causal("Gemma2", "eager", module=settings, num_key_value_heads=2, head_dim=8)


def t5(**settings: Any) -> LanguageModel:
    """Encoder and decoder, cross-attention, a position bias that the first block makes for all."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=HF_VOCABULARY, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False, initializer_factor=1.0,
    )  # fmt: skip
    return LanguageModel(T5ForConditionalGeneration(config), **settings)


class HuggingFaceViT(ExampleModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(
            ViTConfig(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=8,
                patch_size=2, num_labels=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                initializer_range=0.1,
            )
        )  # fmt: skip

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(pixel_values=batch[0], labels=batch[1]).loss


class XTransformer(ExampleModule):
    """A decoder of x-transformers: einops, a gated feed-forward layer, rotary positions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        from x_transformers import Decoder, TransformerWrapper

        self.network = TransformerWrapper(
            num_tokens=VOCABULARY,
            max_seq_len=16,
            attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, ff_glu=True, rotary_pos_emb=True),
        )

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.network(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class CrossAttention(ExampleModule):
    """``nn.TransformerDecoder``: self-attention with a causal mask and attention to a memory."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=False, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        tokens, memory = self.embedding(batch[:, :-1]).transpose(0, 1), self.embedding(batch.flip(1)).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens), dtype=tokens.dtype)
        hidden = self.decoder(tokens, memory, tgt_mask=mask, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).transpose(0, 1).flatten(0, 1), batch[:, 1:].flatten())


class GatedBlock(nn.Module):
    """Separate queries, keys and values with rotary positions, a gated MLP, ``nn.RMSNorm`` before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        y = self.attention_norm(x)
        q, k, v = (layer(y).view(rows, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        angles = torch.arange(length)[:, None] / 10.0 ** torch.arange(q.shape[-1] // 2)
        q, k = (rotated(t, angles.cos(), angles.sin()) for t in (q, k))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(rows, length, width))
        y = self.mlp_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class LlamaStyle(GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(tied=False, **settings)
        self.blocks = nn.ModuleList(GatedBlock(16, 4) for _ in range(3))


class NormFirst(TokenClassifier):
    """``nn.TransformerEncoder`` with its norms before attention and MLP, and one at its end."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        layer = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16), enable_nested_tensor=False)


class SixHeads(GPT):
    """Heads that only 2 and 3 divide; the MLP's width is divisible by 4."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(tied=True, width=24, heads=6, blocks=2, **settings)


_HERE, _HF, _VIT, _GPT = (
    "tests.tensor_parallel.architectures",
    "tests.models.hugging_face",
    "tests.models.vit",
    "tests.models.gpt",
)


def _case(name: str, factory: str, data: str, blocks: str, *requires: str, **settings: Any) -> ModelCase:
    return ModelCase(name, f"{_HERE}:{factory}", data, blocks, settings, requires)


_TEXT = f"{_HF}:causal_batches"
_CASES = (
    *(
        _case(f"llama-kv{n}-{how}", "llama_kv", _TEXT, "model.model.layers", "transformers",
              kv_heads=n, implementation=how)
        for n, how in ((4, "sdpa"), (2, "eager"), (1, "sdpa"), (1, "eager"))
    ),
    _case("qwen3", "qwen3", _TEXT, "model.model.layers", "transformers"),
    _case("olmo2", "olmo2", _TEXT, "model.model.layers", "transformers"),
    _case("phi3", "phi3", _TEXT, "model.model.layers", "transformers"),
    _case("gpt-neox", "gpt_neox", _TEXT, "model.gpt_neox.layers", "transformers"),
    _case("gemma2", "gemma2", _TEXT, "model.model.layers", "transformers"),
    _case("opt", "opt", _TEXT, "model.model.decoder.layers", "transformers"),
    _case("t5", "t5", _TEXT, "model.encoder.block", "transformers"),
    _case("hf-vit", "HuggingFaceViT", f"{_VIT}:batches", "model.vit.layers", "transformers"),
    _case("x-transformers", "XTransformer", f"{_GPT}:batches", "network.attn_layers.layers", "x_transformers"),
    _case("nn-decoder", "CrossAttention", f"{_GPT}:batches", "decoder.layers"),
    _case("llama-style", "LlamaStyle", f"{_GPT}:batches", "blocks"),
    _case("norm-first", "NormFirst", "tests.models.encoder:batches", "encoder.layers"),
    _case("six-heads", "SixHeads", f"{_GPT}:batches", "blocks"),
)  # fmt: skip

ARCHITECTURES: dict[str, ModelCase] = {case.name: case for case in _CASES}


def family(model: str, sizes: dict[str, Any], config: str = "", implementation: str = "eager", **settings: Any) -> Any:
    """A model of transformers by its class's name, from tiny sizes without dropout."""
    import transformers

    name = config or model.partition("For")[0]
    tiny = {**_SIZES, "attention_dropout": 0.0, "hidden_dropout": 0.0, **sizes}
    configuration = getattr(transformers, f"{name}Config")(**tiny)
    return LanguageModel(
        getattr(transformers, model)._from_config(configuration, attn_implementation=implementation), **settings
    )


def _family(name: str, model: str, **sizes: Any) -> ModelCase:
    settings = {"model": model, "sizes": sizes}
    return ModelCase(name, f"{_HERE}:family", _TEXT, "", settings, ("transformers",))


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SEQUENCES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "init_std": 0.1, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
# Each with a habit: attention weights among a block's outputs (bloom, mpt), a class of its own for linear layers
# (falcon), one block called many times (albert), a table handed to the blocks (deberta), tables of positions that are
# called with a shape (pegasus), groups of heads in one projection (falcon), a norm for each head (stablelm).
FAMILIES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        _family("bloom", "BloomForCausalLM", n_layer=2, n_head=4),
        _family("mpt", "MptForCausalLM", d_model=32, n_heads=4, n_layers=2, max_seq_len=16),
        _family("falcon-groups", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2),
        _family("falcon-alibi", "FalconForCausalLM", new_decoder_architecture=False, multi_query=False, alibi=True,
                parallel_attn=False, bias=True),
        _family("falcon-one-key", "FalconForCausalLM", new_decoder_architecture=False, multi_query=True),
        _family("albert", "AlbertForMaskedLM", embedding_size=16, **_NO_DROPOUT),
        _family("deberta", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"],
                type_vocab_size=0, **_NO_DROPOUT),
        _family("deberta-v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"],
                share_att_key=True, position_buckets=4, norm_rel_ebd="layer_norm", type_vocab_size=0, **_NO_DROPOUT),
        _family("pegasus", "PegasusForConditionalGeneration", **_SEQUENCES),
        _family("stablelm", "StableLmForCausalLM", num_key_value_heads=2, qk_layernorm=True),
        _family("mixtral", "MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, output_router_logits=True),
        _family("gpt-neo", "GPTNeoForCausalLM", num_layers=2, num_heads=4, window_size=4, resid_dropout=0.0,
                attention_types=[[["global", "local"], 1]], embed_dropout=0.0),
    )
}  # fmt: skip
