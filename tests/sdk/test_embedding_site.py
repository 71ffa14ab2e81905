"""An embedding's adapter on megatron-core's VocabParallelEmbedding, against a plain lookup; hosts that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sdk_toy import HF_CONFIG
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_plugins_sdk import (
    Architecture,
    Concat,
    LoraConfig,
    LoraError,
    PeftAdapter,
    Projection,
    SelectedPlugin,
    Site,
    SiteKind,
    adapter_of,
    attach,
    detach,
    disable_adapters,
    export_adapter,
    import_adapter,
    reduce_grads,
)
from lora_plugins_sdk.embedding_branch import LookupBranch, LookupGeometry
from lora_plugins_sdk.hosts.sizes import padded_vocab_size
from lora_plugins_sdk.peft_parameters import from_parameters, hf_parameters, to_parameters
from lora_plugins_sdk.region import Collective, Region
from lora_plugins_sdk.testing import Layout, current_run, run_world

VOCABULARY, HIDDEN = HF_CONFIG["vocab_size"], HF_CONFIG["hidden_size"]  # odd: padded under TP2
LORA = LoraConfig(rank=2, alpha=6, target_modules=("embed_tokens",))
SITE = Site(
    path="embedding.word_embeddings",
    kind=SiteKind.ROW,
    pack=Concat(pad=True),
    projections=(Projection(hf="model.embed_tokens", in_dim="vocab_size", out_dim="hidden_size"),),
    embedding=True,
    all_linear=False,
)
PLUGIN = SelectedPlugin.of(Architecture(name="toy", model_types=("toy",), sites=(SITE,)))
LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True)]
# Padded further: one process too, and a last rank with nothing but padding.
PADDED = [
    Layout(make_vocab_size_divisible_by=5),
    Layout(tp=2, make_vocab_size_divisible_by=5),
    Layout(tp=2, sequence_parallel=True, make_vocab_size_divisible_by=8),
]
# Under TP2 token 7 is padding, and 8 and -1 are no tokens at all: megatron-core gives zeros for those.
IDS = torch.tensor([[0, 6, 3, 3, 5, 1], [4, 2, 0, 6, 6, 3]])
STRANGE = torch.tensor([[0, 7, 3, 8, 5, 7], [-1, 2, 7, 6, 6, 3]])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, A, B, UPSTREAM = (
    draw(16, HIDDEN, seed=1),
    draw(2, 16, seed=2),
    draw(HIDDEN, 2, seed=3),
    draw(2, 6, HIDDEN, seed=4),
)


def host(*, scatter: bool | None = None, size: int | None = None) -> Any:
    """`embedding.word_embeddings` alone, as the run has it."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    run = current_run()
    config = ModelParallelConfig(
        tensor_model_parallel_size=run.facts.tp,
        sequence_parallel=run.facts.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    model: Any = nn.Module()
    model.embedding = nn.Module()
    model.embedding.word_embeddings = embedding = VocabParallelEmbedding(
        padded_vocab_size(VOCABULARY, run.facts) if size is None else size,
        HIDDEN,
        init_method=nn.init.zeros_,
        reduce_scatter_embeddings=run.facts.sequence_parallel if scatter is None else scatter,
        config=config,
    )
    rows = len(embedding.weight)
    if size is None:
        embedding.weight.data.copy_(WEIGHT[run.tp_rank * rows :][:rows])
    return model


def looked_up(ids: Tensor) -> dict[str, Tensor]:
    """This rank's output, its gradients, and the output without the adapter and after it."""
    run, model = current_run(), host()
    embedding = model.embedding.word_embeddings
    attach(model, PLUGIN, HF_CONFIG, LORA, run)
    a, b = adapter_of(model).parameters()
    # The columns of the padding too: nothing may read them.
    a.data.copy_(A[:, run.tp_rank * a.shape[1] :][:, : a.shape[1]])
    b.data.copy_(B)
    upstream = UPSTREAM
    if run.facts.sequence_parallel:
        upstream = upstream.transpose(0, 1).chunk(run.facts.tp)[run.tp_rank]
    output = embedding(ids)
    (output * upstream).sum().backward()
    reduce_grads(model)
    assert a.grad is not None and b.grad is not None and embedding.weight.grad is None
    with torch.no_grad(), disable_adapters(model):
        without = embedding(ids)
    detach(model)
    assert torch.equal(embedding(ids), without) and "forward" not in vars(embedding)
    return {"output": output.detach(), "without": without, "A": a.grad, "B": b.grad}


@pytest.mark.world
@pytest.mark.mcore_matrix
@pytest.mark.parametrize("layout", LAYOUTS + PADDED, ids=str)
def test_the_same_as_a_plain_lookup(layout: Layout) -> None:
    """B1, B42: outputs and gradients under every split; padding and what is no token get no delta and no gradient."""
    ids, rows = IDS if layout.tp == 1 else STRANGE, padded_vocab_size(VOCABULARY, layout)
    a, b = A.clone().requires_grad_(True), B.clone().requires_grad_(True)
    base = WEIGHT[ids.clamp(0, rows - 1)] * ((ids >= 0) & (ids < rows)).unsqueeze(-1)
    known = ((ids >= 0) & (ids < VOCABULARY)).unsqueeze(-1)
    expected = base + LORA.alpha / LORA.rank * (a.t()[ids.clamp(0, 6)] @ b.t()) * known
    (expected * UPSTREAM).sum().backward()
    ranks = run_world(looked_up, layout, ids)

    def whole(name: str) -> Tensor:
        if layout.sequence_parallel:
            return torch.cat([one[name] for one in ranks]).transpose(0, 1)
        return ranks[-1][name]

    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(whole("output"), expected.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(whole("without"), base)
    columns = torch.cat([one["A"] for one in ranks], dim=1)
    torch.testing.assert_close(columns[:, :VOCABULARY], a.grad[:, :VOCABULARY], rtol=1e-5, atol=1e-5)
    assert columns.shape[1] == rows and not columns[:, VOCABULARY:].any(), (
        "a trained column of padding would be lost in every export"
    )
    for one in ranks:
        torch.testing.assert_close(one["B"], b.grad, rtol=1e-5, atol=1e-5)
        assert torch.equal(one["B"], ranks[0]["B"])


class Additions(TorchDispatchMode):
    """Notes in which dtype terms are added up by index."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_add_.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_terms_of_a_frequent_token_are_added_up_in_float32(dtype: torch.dtype) -> None:
    """A GPU's bfloat16 sum of equal terms stands still after a few hundred; a CPU's does not show that."""
    none = Region(forward=Collective.NONE, backward=Collective.NONE, tokens_split=False)
    geometry = LookupGeometry(first=0, count=8, region=none, group=None)
    a, b = (torch.ones(shape, dtype=dtype, requires_grad=True) for shape in ((2, 8), (4, 2)))
    output = LookupBranch.apply(torch.zeros(1024, 4, dtype=dtype), torch.full((1024,), 3), geometry, 1.0, a, b)
    with Additions() as seen:
        output.sum().backward()
    assert seen.dtypes == [torch.float32]
    assert a.grad is not None and a.grad.dtype == dtype
    assert a.grad[:, 3].tolist() == [4096.0, 4096.0] and int(a.grad.count_nonzero()) == 2


def fresh_and_imported() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    run, model = current_run(), host()
    adapter = attach(model, PLUGIN, HF_CONFIG, LORA, run)
    fresh = export_adapter(model)
    tensors = dict(zip(fresh.tensors, (A[:, :VOCABULARY], B), strict=True))
    adapter.parameters()[0].data.fill_(5.0)
    import_adapter(model, PeftAdapter(tensors=tensors, config=fresh.config))
    return dict(fresh.tensors), dict(export_adapter(model).tensors), adapter.parameters()[0].detach()


@pytest.mark.world
@pytest.mark.parametrize("layout", [Layout(tp=2), *PADDED], ids=str)
def test_files_have_no_padding(layout: Layout) -> None:
    """B5, B42: one draw under every split; what is imported comes back, and its padding is zero."""
    ((expected, *_),) = run_world(fresh_and_imported, Layout())
    a, b = (f"base_model.model.model.embed_tokens.lora_embedding_{one}" for one in "AB")
    assert not expected[a].any() and 0.5 < expected[b].std() < 1.5, "as PEFT draws them"
    ranks = run_world(fresh_and_imported, layout)
    for fresh, imported, _ in ranks:
        assert all(torch.equal(fresh[name], tensor) for name, tensor in expected.items())
        assert torch.equal(imported[a], A[:, :VOCABULARY]) and torch.equal(imported[b], B)
    columns = torch.cat([mine for *_, mine in ranks], dim=1)
    assert columns.shape == (2, padded_vocab_size(VOCABULARY, layout))
    assert torch.equal(columns[:, :VOCABULARY], A[:, :VOCABULARY]) and not columns[:, VOCABULARY:].any()


def refused(host_is: str) -> tuple[str, bool]:
    """The message of attaching to another host than the run's, and whether that left everything as it was."""
    run = current_run()
    model = host(**{"scattered otherwise": {"scatter": not run.facts.sequence_parallel}}.get(host_is, {}))
    if host_is == "padded otherwise":
        model = host(size=20)
    if host_is == "no vocabulary-parallel one":
        model.embedding.word_embeddings = nn.Embedding(*model.embedding.word_embeddings.weight.shape)
    try:
        attach(model, PLUGIN, HF_CONFIG, LORA, run)
    except LoraError as error:
        embedding = model.embedding.word_embeddings
        untouched = (
            embedding.weight.requires_grad and not hasattr(embedding, "lora") and "forward" not in vars(embedding)
        )
        return str(error), untouched
    return "attached", False


@pytest.mark.world
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.parametrize(
    ("host_is", "message"),
    [
        ("scattered otherwise", "and the run's sequence_parallel={sp}: its output would be scattered by another"),
        ("padded otherwise", "its weight has shape (10, 12), the HF config and run give (4, 12)"),
        ("padded otherwise", "ParallelRun.from_megatron(make_vocab_size_divisible_by=10)"),
        ("no vocabulary-parallel one", "is no VocabParallelEmbedding of megatron-core"),
    ],
)
def test_hosts_that_do_not_fit(host_is: str, message: str, layout: Layout) -> None:
    """Every rank says so, before anything is changed."""
    for said, untouched in run_world(refused, layout, host_is):
        assert message.format(sp=layout.sequence_parallel) in said and "embedding.word_embeddings" in said
        assert untouched


def test_peft_takes_the_weight_where_the_module_does_more() -> None:
    """Its form of a parameter `[vocabulary, hidden]`: the factors turned and exchanged, and back."""
    projection = replace(SITE.projections[0], by_weight=True)
    architecture = Architecture(name="toy", model_types=("toy",), sites=(replace(SITE, projections=(projection,)),))
    a, b = (f"base_model.model.model.embed_tokens.lora_embedding_{one}" for one in "AB")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["embed_tokens"]}
    saved = PeftAdapter(tensors={a: A[:, :VOCABULARY], b: B}, config=config)
    parameters = hf_parameters(architecture, HF_CONFIG)
    turned = to_parameters(saved, parameters)
    first, second = (f"base_model.model.model.embed_tokens.lora_{one}.weight" for one in "AB")
    assert turned.tensors.keys() == {first, second} and turned.config["target_modules"] == []
    assert turned.config["target_parameters"] == ["model.embed_tokens.weight"]
    assert turned.tensors[first].shape == (2, HIDDEN) and turned.tensors[second].shape == (VOCABULARY, 2)
    torch.testing.assert_close(turned.tensors[second] @ turned.tensors[first], (B @ A[:, :VOCABULARY]).t())
    back = from_parameters(turned, parameters)
    assert back.tensors.keys() == saved.tensors.keys() and back.config["target_modules"] == ["model.embed_tokens"]
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in saved.tensors.items())
    wrong = replace(turned, tensors={first: turned.tensors[first], second: turned.tensors[second][1:]})
    with pytest.raises(LoraError, match=r"embed_tokens\.weight: its factors have shapes \[2, 12\] and \[6, 2\]"):
        from_parameters(wrong, parameters)
