"""The kinds of attention and of MLP that a layer may have, as its config names them. Needs no torch."""

from __future__ import annotations

from lora_plugins_sdk import LayerTypes

ATTENTION = LayerTypes(types=("hybrid", "hybrid_sliding"), numbers="local_layer_ids")
MLP = LayerTypes(types=("dense", "sparse"), key="mlp_layer_types", first="dense_mlp_idx")
GLOBAL, SLIDING = (ATTENTION.only(one) for one in ATTENTION.types)
DENSE, SPARSE = (MLP.only(one) for one in MLP.types)
