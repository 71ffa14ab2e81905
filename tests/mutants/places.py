"""Where faults are seeded: one host linear of each kind in the kit's tiny model, neither first nor last."""

from lora_plugins_sdk.testing import Layout

QKV = "decoder.layers.1.self_attention.linear_qkv"
PROJ = "decoder.layers.1.self_attention.linear_proj"
FC1 = "decoder.layers.2.mlp.linear_fc1"
FC2 = "decoder.layers.2.mlp.linear_fc2"
EMBEDDING = "embedding.word_embeddings"
HEAD = "output_layer"
ANYWHERE = "*"

TP2 = Layout(tp=2)
TP2_SP = Layout(tp=2, sequence_parallel=True)
PP2 = Layout(pp=2)
DP2 = Layout(dp=2)
CP2 = Layout(cp=2)
