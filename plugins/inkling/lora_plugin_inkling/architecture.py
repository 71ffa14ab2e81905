"""Inkling: its sites, as data."""

from __future__ import annotations

from lora_plugin_inkling.model.config_spellings import REFUSED, SPELLINGS
from lora_plugin_inkling.model.layer_kinds import DENSE, GLOBAL, SLIDING, SPARSE
from lora_plugin_inkling.model.tiny_config import QUICKSTART_CONFIG, TINY_CONFIG
from lora_plugin_inkling.model.weights import BASE_WEIGHTS
from lora_plugin_inkling.official import OFFICIAL
from lora_plugins_sdk import Architecture, Concat, Multimodal, OnlyLayers, Projection, Site, SiteKind

_HF = "model.layers.{layer}"
_HOST = "decoder.layers.{layer}"
# transformers' embedding normalises what it looks up; the adapter is on the weight, before the norm.
_EMBEDDING = Projection(hf="model.embed_tokens", in_dim="vocab_size", out_dim="hidden_size", by_weight=True)


def _attention(host: str, layers: OnlyLayers, prefix: str) -> tuple[Site, Site]:
    """The two linears of one kind of attention; the sizes of the sliding kind have a prefix in the config."""
    heads, groups, width = (f"{prefix}{key}" for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    outs = {"q": f"{heads} * {width}", "k": f"{groups} * {width}", "v": f"{groups} * {width}", "r": f"{heads} * d_rel"}
    projections = tuple(
        Projection(hf=f"{_HF}.self_attn.{name}_proj", in_dim="hidden_size", out_dim=out) for name, out in outs.items()
    )
    output = Projection(hf=f"{_HF}.self_attn.o_proj", in_dim=outs["q"], out_dim="hidden_size")
    return (
        Site(
            path=f"{_HOST}.{host}.linear_qkvr",
            kind=SiteKind.COLUMN,
            fused_norm=True,
            layers=layers,
            projections=projections,
        ),
        Site(path=f"{_HOST}.{host}.linear_proj", kind=SiteKind.ROW, layers=layers, projections=(output,)),
    )


def _mlp(
    host: str, hf: str, width: str, layers: OnlyLayers, *, experts: str | None = None, stack: str | None = None
) -> tuple[Site, Site]:
    """The two linears of a gated MLP; `{expert}` in `hf` for routed experts, a stack for shared ones."""
    gate_up = tuple(
        Projection(hf=f"{_HF}.{hf}.{name}_proj", in_dim="hidden_size", out_dim=width, stack=stack)
        for name in ("gate", "up")
    )
    down = Projection(hf=f"{_HF}.{hf}.down_proj", in_dim=width, out_dim="hidden_size", stack=stack)
    fused = [f"{_HF}.mlp.experts.{name}_proj" if experts else None for name in ("gate_up", "down")]
    return (
        Site(
            path=f"{_HOST}.{host}.linear_fc1",
            kind=SiteKind.COLUMN,
            fused_norm=layers is DENSE,
            layers=layers,
            projections=gate_up,
            experts=experts,
            fused_hf=fused[0],
        ),
        Site(
            path=f"{_HOST}.{host}.linear_fc2",
            kind=SiteKind.ROW,
            layers=layers,
            projections=(down,),
            experts=experts,
            fused_hf=fused[1],
        ),
    )


ARCHITECTURE = Architecture(
    name="inkling",
    model_types=("inkling_text", "inkling_mm_model"),
    refuses=REFUSED,
    multimodal=Multimodal(),
    left_alone=("model.vision_tower.*", "model.audio_tower.*", "model.visual.*", "model.audio.*", "model.mtp.*"),
    vocabulary="unpadded_vocab_size",
    fallbacks={"unpadded_vocab_size": "vocab_size"},
    spellings=SPELLINGS,
    adapter_schemas=(OFFICIAL,),
    tiny_config=TINY_CONFIG,
    quickstart_config=QUICKSTART_CONFIG,
    # Log scaling begins at a position, and transformers' model counts them without `position_ids`.
    left_padding=False,
    # Queries and keys of unit length hardly choose, and the factors before them would hardly move.
    tiny_values={"*.q_norm.weight": 2.0, "*.k_norm.weight": 2.0},
    lacks={"context-parallel": "a short convolution needs the tokens before its own, which another rank would have"},
    sites=(
        *_attention("self_attention", GLOBAL, ""),
        *_attention("sliding_attention", SLIDING, "swa_"),
        *_mlp("mlp", "mlp", "intermediate_size", DENSE),
        *_mlp("mlp.experts", "mlp.experts.{expert}", "moe_intermediate_size", SPARSE, experts="n_routed_experts"),
        *_mlp(
            "mlp.shared_experts",
            "mlp.shared_experts",
            "n_shared_experts * moe_intermediate_size",
            SPARSE,
            stack="n_shared_experts",
        ),
        Site(
            path="embedding.word_embeddings",
            kind=SiteKind.ROW,
            pack=Concat(pad=True),
            projections=(_EMBEDDING,),
            embedding=True,
            all_linear=False,
        ),
        Site(
            path="output_layer",
            kind=SiteKind.COLUMN,
            pack=Concat(pad=True),
            projections=(
                Projection(hf="lm_head", in_dim="hidden_size", out_dim="unpadded_vocab_size", padded_to="vocab_size"),
            ),
            all_linear=False,
        ),
    ),
    base_weights=BASE_WEIGHTS,
)
