"""One pipeline stage of Inkling."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from lora_plugin_inkling.model.fields import InklingFields
from lora_plugin_inkling.model.layer import InklingLayer
from lora_plugins_sdk import LoraError
from lora_plugins_sdk.hosts.rms_norm import TorchRMSNorm


class NormedEmbedding(LanguageModelEmbedding):
    """Token embeddings, normalised; `norm.weight` `[h]`."""

    def __init__(self, config: Any, vocabulary: int, longest: int, tp_group: Any) -> None:
        super().__init__(config, vocabulary, longest, position_embedding_type="none", tp_group=tp_group)
        self.norm = TorchRMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """[b, s] -> [s, b, h]; under sequence parallelism [s / tp, b, h]."""
        return self.norm(super().forward(input_ids, position_ids))  # type: ignore[arg-type]


class MupNorm(TorchRMSNorm):
    """The final norm, divided by the muP width: what the output layer reads, and an adapter on it."""

    def __init__(self, config: Any, hidden_size: int, *, width: float, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return super().forward(x) / self.width


class InklingModel(LanguageModule):
    """Embedding (first stage), layers, final norm and output layer (last stage).

    Args:
        config: megatron-core's TransformerConfig.
        fields: the model's own.
        vocabulary: rows of the embedding, a multiple of the TP size.
        outputs: rows of the output layer, likewise; may be fewer.
        longest: tokens of the longest sequence.
        pre_process, post_process: whether this is the first and the last stage.
    """

    def __init__(
        self,
        config: Any,
        fields: InklingFields,
        *,
        vocabulary: int,
        outputs: int,
        longest: int,
        pre_process: bool,
        post_process: bool,
    ) -> None:
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = False
        tp_group = self.pg_collection.tp
        if pre_process:
            self.embedding = NormedEmbedding(config, vocabulary, longest, tp_group)
        layers = get_num_layers_to_build(config)
        self.decoder = TransformerBlock(
            config=config,
            spec=TransformerBlockSubmodules(
                layer_specs=[ModuleSpec(module=InklingLayer, params={"fields": fields})] * layers,
                layer_norm=ModuleSpec(module=MupNorm, params={"width": fields.mup_width}),  # type: ignore[arg-type]
            ),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=self.pg_collection,
        )
        if post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=tp_group,
            )

    def set_input_tensor(self, input_tensor: Any) -> None:
        """The previous stage's output, from megatron-core's schedules: a tensor or a list of one."""
        (tensor,) = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        self.decoder.set_input_tensor(tensor)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
    ) -> Tensor:
        """Token ids [b, s], right-padded -> logits [b, s, outputs / tp] on the last stage, else [s, b, h] (SP: s / tp).

        Positions count from 0 in every sequence; `position_ids` is taken for megatron-core's callers and not read.

        Args:
            decoder_input: in place of the embedding's output.

        Raises:
            LoraError: an attention mask, which this model does not have.
        """
        if attention_mask is not None:
            raise LoraError(
                "attention_mask",
                reason="Inkling here attends causally over whole right-padded sequences",
                cure="pass None and pad on the right",
            )
        if self.pre_process and decoder_input is None:
            decoder_input = self.embedding(input_ids, position_ids)
        hidden = self.decoder(hidden_states=decoder_input, attention_mask=None)
        if not self.post_process:
            return hidden
        logits, _ = self.output_layer(hidden)
        return logits.transpose(0, 1).contiguous()
