"""Models whose layers differ: each layer has the sites and base weights of its type, and no other."""

from dataclasses import replace
from typing import Any

import pytest
from sdk_hybrid import HF_CONFIG, IN_PROJ, LAYER_TYPES, LAYERED

from lora_plugins_sdk import (
    BaseWeight,
    Concat,
    LayerTypes,
    LoraConfig,
    LoraError,
    RunFacts,
    SelectedPlugin,
    Site,
    derive_table,
)
from lora_plugins_sdk.targets import candidates

PLUGIN = SelectedPlugin.of(LAYERED)
LINEAR_LEAVES = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "gate"}
FULL_LEAVES = {"q_proj", "k_proj", "v_proj", "gate"}


def config(**changes: Any) -> dict[str, Any]:
    return HF_CONFIG | {"num_hidden_layers": 3} | changes


def leaves(hf_config: dict[str, Any]) -> list[set[str]]:
    """Of each layer."""
    found: list[set[str]] = [set() for _ in range(hf_config["num_hidden_layers"])]
    for one in candidates(LAYERED, hf_config):
        assert one.layer is not None
        found[one.layer].add(one.projection.leaf)
    return found


@pytest.mark.parametrize(
    ("hf_config", "full"),
    [
        (config(layer_types=["full_attention", "linear_attention", "full_attention"]), {0, 2}),
        (config(full_attention_interval=2), {1}),
        (config(full_attention_interval=1), {0, 1, 2}),
        (config(num_hidden_layers=8), {3, 7}),
        (config(layer_types=["linear_attention"] * 3, full_attention_interval=1), set()),
    ],
    ids=["listed", "every-second", "all", "fallback", "list-wins"],
)
def test_each_layer_has_the_projections_of_its_type(hf_config: dict[str, Any], full: set[int]) -> None:
    for layer, found in enumerate(leaves(hf_config)):
        assert found == (FULL_LEAVES if layer in full else LINEAR_LEAVES), layer


def test_the_table_has_rows_where_the_site_exists() -> None:
    table = derive_table(PLUGIN, config(full_attention_interval=3), LoraConfig(rank=2), RunFacts())
    found = {(row.layer, row.host_module.rsplit(".", 1)[-1]) for row in table.rows}
    assert found == {(0, "in_proj"), (1, "in_proj"), (2, "linear_qkv")}


def test_sizes_of_a_type_that_no_layer_has_are_not_asked_for() -> None:
    """Configs of models that have experts in every layer give any width of dense ones, or none."""
    missing = {key: value for key, value in config().items() if key != "num_key_value_heads"}
    every = missing | {"layer_types": ["linear_attention"] * 3}
    assert derive_table(PLUGIN, every, LoraConfig(rank=2), RunFacts()).rows
    with pytest.raises(LoraError, match="num_key_value_heads"):
        derive_table(PLUGIN, missing | {"layer_types": ["full_attention"] * 3}, LoraConfig(rank=2), RunFacts())


def test_a_target_of_a_type_that_no_layer_has() -> None:
    hf_config = config(layer_types=["linear_attention"] * 3)
    with pytest.raises(LoraError, match=r"target 'q_proj'.*matches no projection of this model"):
        PLUGIN.normalize_targets(hf_config, LoraConfig(target_modules=("q_proj",)))
    picked = PLUGIN.normalize_targets(hf_config, LoraConfig(target_modules=("all-linear", "mlp.gate")))
    assert len(picked) == 3 * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 2}, r"config key 'layer_types': is no list of 3 types"),
        ({"layer_types": "linear_attention"}, r"config key 'layer_types': is no list of 3 types"),
        (
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            r"names layers of type sliding_attention; this architecture knows linear_attention, full_attention",
        ),
        ({"full_attention_interval": 0}, r"full_attention_interval=0: is no number of layers"),
    ],
)
def test_a_config_that_does_not_say_which_layers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LoraError, match=message):
        candidates(LAYERED, config(**changes))


def test_a_list_that_must_be_there() -> None:
    listed = replace(LAYER_TYPES, every=None).only("linear_attention")
    architecture = replace(LAYERED, sites=(replace(IN_PROJ, layers=listed),), base_weights=())
    with pytest.raises(LoraError, match=r"config key 'layer_types': is missing"):
        candidates(architecture, config())


EXEMPT = replace(LAYER_TYPES, key=None, exempt="linear_ids")


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"full_attention_interval": 1, "linear_ids": [1]}, {0, 2}),
        ({"full_attention_interval": 2, "linear_ids": [0]}, {1}),
        ({"full_attention_interval": 2, "linear_ids": [1]}, set()),
        ({"full_attention_interval": 1, "linear_ids": None}, {0, 1, 2}),
        ({"full_attention_interval": 3, "layer_types": ["full_attention"] * 3}, {2}),
    ],
    ids=["all-but-one", "not-in-question", "none-left", "null", "no-list-is-read"],
)
def test_layers_exempt_from_the_interval(changes: dict[str, Any], full: set[int]) -> None:
    architecture = replace(LAYERED, sites=(replace(IN_PROJ, layers=EXEMPT.only("full_attention")),), base_weights=())
    assert {one.layer for one in candidates(architecture, config(**changes))} == full
    with pytest.raises(LoraError, match=r"config key 'linear_ids': is no list of numbers from 0 to 2"):
        candidates(architecture, config(linear_ids=[3]))


FORMS = LayerTypes(types=("linear_attention", "full_attention"), numbers="full_ids", first="linear_first")


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"full_ids": [2, 0]}, {0, 2}),
        ({"full_ids": []}, set()),
        ({"linear_first": 1}, {1, 2}),
        ({"linear_first": 3}, set()),
        ({"full_ids": [1, 2], "linear_first": 1, "layer_types": None}, {1, 2}),
        ({"full_ids": [2], "layer_types": ["linear_attention"] * 2 + ["full_attention"]}, {2}),
    ],
    ids=["numbers", "no-numbers", "first", "all-first", "two-forms", "list-too"],
)
def test_other_forms_of_the_list(changes: dict[str, Any], full: set[int]) -> None:
    architecture = replace(LAYERED, sites=(replace(IN_PROJ, layers=FORMS.only("full_attention")),), base_weights=())
    assert {one.layer for one in candidates(architecture, config(**changes))} == full


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_ids": [3]}, r"config key 'full_ids': is no list of numbers from 0 to 2"),
        ({"full_ids": [-1]}, r"config key 'full_ids': is no list of numbers from 0 to 2"),
        ({"full_ids": [True]}, r"config key 'full_ids': is no list of numbers from 0 to 2"),
        ({"full_ids": "1"}, r"config key 'full_ids': is no list of numbers from 0 to 2"),
        ({"linear_first": 4}, r"config key 'linear_first': is no number from 0 to 3"),
        ({"linear_first": "2"}, r"config key 'linear_first': is no number from 0 to 3"),
        ({}, r"config key 'layer_types': is missing, and there is no 'full_ids' or 'linear_first' either"),
        (
            {"full_ids": [1], "linear_first": 1},
            r"config keys 'full_ids' and 'linear_first': contradict each other: layer 2 is linear_attention by the "
            r"first and full_attention by the second",
        ),
    ],
)
def test_other_forms_that_say_nothing_or_two_things(changes: dict[str, Any], message: str) -> None:
    architecture = replace(LAYERED, sites=(replace(IN_PROJ, layers=FORMS.only("full_attention")),), base_weights=())
    with pytest.raises(LoraError, match=message):
        candidates(architecture, config(**changes))


def test_declarations_that_contradict_themselves() -> None:
    with pytest.raises(LoraError, match=r"layer type 'sliding': is none of linear_attention, full_attention"):
        LAYER_TYPES.only("sliding")
    with pytest.raises(LoraError, match=r"are not two"):
        LayerTypes(types=("a", "b", "c"), every="3")
    with pytest.raises(LoraError, match=r"are not two, and numbers='ids' tells two apart"):
        LayerTypes(types=("a", "b", "c"), numbers="ids")
    with pytest.raises(LoraError, match=r"have exempt='ids' and no `every` to be exempt from"):
        LayerTypes(types=("a", "b"), exempt="ids")
    layers = LAYER_TYPES.only("linear_attention")
    with pytest.raises(LoraError, match=r"site 'output_layer': exists once and is declared for layers"):
        Site(path="output_layer", kind=IN_PROJ.kind, projections=IN_PROJ.projections, layers=layers)
    with pytest.raises(LoraError, match=r"base weight 'norm.weight': exists once and is declared for layers"):
        BaseWeight(host="norm.weight", hf=("norm.weight",), layers=layers)
    with pytest.raises(LoraError, match=r"declares sections of 2 tensors and is made of 1"):
        BaseWeight(host="conv.weight", hf=("conv.weight",), pack=Concat(), sections=(("8",), ("8",)))
    with pytest.raises(LoraError, match=r"its linear is 'gating', which cannot return a normed input"):
        replace(IN_PROJ, method="gating", fused_norm=True)


def test_sections_that_do_not_add_up() -> None:
    wrong = replace(IN_PROJ.projections[0], out_dim="25")
    architecture = replace(LAYERED, sites=(replace(IN_PROJ, projections=(wrong,)),), base_weights=())
    with pytest.raises(LoraError, match=r"have 24 rows, its out_dim 25 25"):
        derive_table(SelectedPlugin.of(architecture), config(), LoraConfig(rank=2), RunFacts())
