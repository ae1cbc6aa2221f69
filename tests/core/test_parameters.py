"""A model as one flat vector: nothing is lost, copied or leaked on the way to the vector and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from piebald.core.errors import ParameterError, SettingError
from piebald.core.parameters import Layout, matching
from tests.fakes import few, seeded


class Tied(nn.Module):
    """An embedding that shares its weight with the decoder."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(words, width), nn.Linear(width, words)
        self.decoder.weight = self.embedding.weight


class Odd(nn.Module):
    """Loose parameters without axes, and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("running", torch.randn(2, 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))


small = st.integers(1, 4)
LAYERS = st.one_of(
    st.builds(nn.Linear, small, small, bias=st.booleans()),
    st.builds(nn.Conv2d, small, small, kernel_size=st.integers(1, 3)),
    st.builds(nn.BatchNorm1d, small, affine=st.booleans(), track_running_stats=st.booleans()),
    st.builds(nn.Embedding, small, small),
    st.builds(nn.GRU, small, small),
    st.builds(Tied, small, small),
    st.builds(Odd),
    st.builds(nn.ReLU),
)


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    """Nested modules, some of whose parameters are frozen; always something to train."""
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 1000)))
        layers = st.recursive(LAYERS, lambda inner: st.lists(inner, max_size=3).map(lambda x: nn.Sequential(*x)))
        module = nn.Sequential(*draw(st.lists(layers, max_size=4)), nn.Linear(2, 2))
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm1d) and layer.running_mean is not None:
                layer.running_mean.normal_()
    for parameter in list(module.parameters())[:-1]:
        parameter.requires_grad_(draw(st.integers(0, 3)) > 0)
    return module


@st.composite
def split_modules(draw: st.DrawFn) -> tuple[nn.Module, Layout]:
    """A module and a layout with some random tensors private."""
    module = draw(modules())
    names = [slot.name for slot in Layout.of(module).slots]
    return module, Layout.of(module, draw(st.sets(st.sampled_from(names))))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """What must be in the vector, by the documentation."""
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return found | {name: b for name, b in module.named_buffers() if b.dtype == torch.float32}


@few
@given(split_modules())
def test_there_and_back(made: tuple[nn.Module, Layout]) -> None:
    module, layout = made
    vector = layout.flatten(module)
    assert vector.shape == (layout.size,) == (sum(t.numel() for t in tensors_of(module).values()),)
    other = torch.arange(layout.size, dtype=torch.float32)
    layout.load(module, other)
    assert torch.equal(layout.flatten(module), other)
    layout.load(module, vector)
    assert torch.equal(layout.flatten(module), vector)


@few
@given(split_modules())
def test_each_number_has_one_position_and_shared_ones_come_first(made: tuple[nn.Module, Layout]) -> None:
    module, layout = made
    expected = tensors_of(module)
    places = [place for slot in layout.slots for place in range(slot.start, slot.stop)]
    assert places == list(range(layout.size))
    assert {slot.name for slot in layout.slots} == set(expected)
    vector = layout.flatten(module)
    front = [slot for slot in layout.slots if slot.name not in layout.private]
    numbers = torch.cat([expected[slot.name].detach().flatten() for slot in front] or [torch.empty(0)])
    assert torch.equal(vector[: layout.shared], numbers)
    assert all(slot.start >= layout.shared for slot in layout.slots if slot.name in layout.private)


@pytest.mark.full
@few
@given(split_modules())
def test_the_trained_slices_are_the_parameters(made: tuple[nn.Module, Layout]) -> None:
    module, layout = made
    marked = torch.zeros(layout.size)
    for span in layout.trained:
        marked[span] += 1
    for slot in layout.slots:
        assert bool((marked[slot.start : slot.stop] == (0 if slot.buffer else 1)).all())
        assert slot.buffer == (slot.name in dict(module.named_buffers()))
    assert len(layout.trained) <= 2


@few
@given(split_modules(), st.integers(0, 3))
def test_views_are_the_vector_itself(made: tuple[nn.Module, Layout], rows: int) -> None:
    _, layout = made
    matrix = torch.zeros(rows, layout.size) if rows else torch.zeros(layout.size)
    for view in layout.views(matrix).values():
        assert view.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
        view += 1.0
    assert bool((matrix == 1).all())
    matrix.zero_()
    assert all(not view.any() for view in layout.views(matrix).values())


@few
@given(made=split_modules())
def test_saved_and_read(made: tuple[nn.Module, Layout], tmp_path_factory: pytest.TempPathFactory) -> None:
    module, layout = made
    path = tmp_path_factory.getbasetemp() / "vector.safetensors"
    vector = layout.flatten(module)
    layout.save(vector, path)
    assert torch.equal(layout.read(path), vector)
    assert {name: list(t.shape) for name, t in load_file(path).items()} == {s.name: list(s.shape) for s in layout.slots}


def test_flatten_copies_and_load_does_not_replace_tensors() -> None:
    module = nn.Linear(2, 3)
    layout, before = Layout.of(module), dict(module.named_parameters())
    vector = layout.flatten(module)
    vector.zero_()
    assert bool(module.weight.any())
    layout.load(module, vector)
    assert not module.weight.any()
    assert dict(module.named_parameters())["weight"] is before["weight"]
    vector += 1
    assert not module.weight.any()


def test_tied_weights_have_one_position() -> None:
    module = Tied(5, 3)
    layout = Layout.of(module)
    assert layout.size == 5 * 3 + 5
    layout.load(module, torch.arange(20, dtype=torch.float32))
    assert module.decoder.weight is module.embedding.weight
    assert torch.equal(module.decoder.weight.flatten(), torch.arange(15.0))


def test_frozen_parameters_and_integer_buffers_stay_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].weight.requires_grad_(False)
    layout = Layout.of(module)
    assert {slot.name for slot in layout.slots} == {
        "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"
    }  # fmt: skip
    frozen = module[0].weight.clone()
    layout.load(module, torch.full((layout.size,), 9.0))
    assert torch.equal(module[0].weight, frozen)
    assert module[1].num_batches_tracked == 0


# -------------------------------------------------------------------------------------------------------------- refused


def half(name: str) -> nn.Module:
    module = nn.BatchNorm1d(2)
    module._buffers[name] = module._buffers[name].half()
    return module


UNSUITABLE = {
    "a double model": (lambda: nn.Linear(2, 2).double(), "weight must be float32, got float64: call model.float"),
    "a half model": (lambda: nn.Linear(2, 2).bfloat16(), "must be float32, got bfloat16"),
    "a half buffer": (lambda: half("running_mean"), "buffer running_mean must be float32, got float16"),
    "nothing to train": (lambda: nn.Linear(2, 2).requires_grad_(False), "Linear has no parameter to train"),
    "nothing at all": (nn.ReLU, "ReLU has no parameter to train"),
    "buffers only": (lambda: nn.BatchNorm1d(2, affine=False), "no parameter to train"),
    "a lazy layer": (lambda: nn.LazyLinear(3), "weight has no shape yet: run the model once"),
    "a lazy buffer": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)),
        "running_mean has no shape yet",
    ),
}


@pytest.mark.parametrize("case", UNSUITABLE)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_models_that_cannot_be_flattened(case: str) -> None:
    make, message = UNSUITABLE[case]
    with pytest.raises(ParameterError, match=message):
        Layout.of(make())


LAYOUT = Layout.of(nn.Linear(2, 3))
VECTORS = {
    "too short": (torch.zeros(8), "must have 9 numbers on its last axis, got shape [8]"),
    "too long": (torch.zeros(2, 10), "got shape [2, 10]"),
    "no axis": (torch.tensor(1.0), "got shape []"),
    "double": (torch.zeros(9, dtype=torch.float64), "must be float32, got float64"),
    "whole numbers": (torch.zeros(9, dtype=torch.int64), "must be float32, got int64"),
}


@pytest.mark.parametrize("case", VECTORS)
def test_vectors_that_do_not_fit(case: str) -> None:
    vector, message = VECTORS[case]
    module = nn.Linear(2, 3)
    before = module.weight.clone()
    for refuse in (LAYOUT.views, LAYOUT.check):
        with pytest.raises(ParameterError) as caught:
            refuse(vector)
        assert message in str(caught.value)
    with pytest.raises(ParameterError):
        LAYOUT.load(module, vector)
    assert torch.equal(module.weight, before)


def test_load_takes_one_vector() -> None:
    with pytest.raises(ParameterError, match=r"one vector of 9 numbers, got shape \[2, 9\]"):
        LAYOUT.load(nn.Linear(2, 3), torch.zeros(2, 9))


@pytest.mark.parametrize(
    "other", [nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 3)), nn.Linear(2, 3, bias=False)], ids=str
)
def test_another_module_is_refused_both_ways(other: nn.Module) -> None:
    with pytest.raises(ParameterError, match=r"weight|bias"):
        LAYOUT.flatten(other)
    with pytest.raises(ParameterError, match=r"weight|bias"):
        LAYOUT.load(other, torch.zeros(9))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    whole = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "a name too many": (whole | {"extra": torch.zeros(1)}, "'extra' is on one side only"),
        "a name too few": ({"weight": torch.zeros(3, 2)}, "'bias' is on one side only"),
        "another shape": (whole | {"weight": torch.zeros(2, 3)}, "weight must be float32 [3, 2], got float32 [2, 3]"),
        "another type": (whole | {"bias": torch.zeros(3).half()}, "bias must be float32 [3], got float16 [3]"),
    }
    for case, (tensors, message) in cases.items():
        path = tmp_path / f"{case}.safetensors"
        save_file(tensors, path)
        with pytest.raises(ParameterError) as caught:
            LAYOUT.read(path)
        assert message in str(caught.value), case


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "vector.safetensors"
    LAYOUT.save(torch.ones(9), path)
    sound = path.read_bytes()
    for damaged in (sound[:-1], sound[: len(sound) // 2], b"", b"nonsense" * 9, b"\xff" * 8 + sound[8:]):
        path.write_bytes(damaged)
        with pytest.raises(ParameterError, match="cannot be read as safetensors"):
            LAYOUT.read(path)
    for missing in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ParameterError, match="cannot be read as safetensors"):
            LAYOUT.read(missing)


# ------------------------------------------------------------------------------------------------------------- patterns


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
        self.middle = nn.Linear(4, 3)
        self.top = nn.Linear(3, 2)


CHOICES: dict[str, tuple[Any, set[str]]] = {
    "the last linear layer": ("classifier", {"top.weight", "top.bias"}),
    "batch norm with its statistics": (
        "batch_norm",
        {"features.1.weight", "features.1.bias", "features.1.running_mean", "features.1.running_var"},
    ),
    "a layer by name": ("middle", {"middle.weight", "middle.bias"}),
    "a layer inside another": ("features.0", {"features.0.weight", "features.0.bias"}),
    "a tensor by name": ("middle.bias", {"middle.bias"}),
    "a shell pattern": ("features.[02].bias", {"features.0.bias", "features.2.bias"}),
    "nothing": ((), set()),
    "two at once": (("top", "middle.bias"), {"top.weight", "top.bias", "middle.bias"}),
}


@pytest.mark.parametrize("case", CHOICES)
def test_patterns_and_roles(case: str) -> None:
    patterns, names = CHOICES[case]
    assert matching(Network(), (patterns,) if isinstance(patterns, str) else patterns) == names


def test_a_name_is_no_prefix_of_another() -> None:
    module = nn.Module()
    module.top, module.top2 = nn.Linear(2, 2), nn.Linear(2, 2)
    assert matching(module, ["top"]) == {"top.weight", "top.bias"}


def test_a_star_is_everything() -> None:
    module = Network()
    assert matching(module, ["*"]) == {slot.name for slot in Layout.of(module).slots}


def test_a_bare_linear_layer_is_its_own_classifier() -> None:
    assert matching(nn.Linear(2, 2), ["classifier"]) == {"weight", "bias"}


@pytest.mark.parametrize("pattern", ["classifier", "decoder", "decoder.weight", "embedding"])
def test_either_name_of_a_tied_weight_selects_it(pattern: str) -> None:
    """Else a private decoder's weight would leave the client under the embedding's name."""
    assert "embedding.weight" in matching(Tied(5, 3), [pattern])


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("midle", "middle"), ("clasifier", "classifier"), ("features.9", "features."), ("batchnorm", "batch_norm")],
)
def test_unknown_names_are_refused_with_the_nearest(pattern: str, hint: str) -> None:
    with pytest.raises(SettingError, match=f"{pattern!r}: did you mean '{hint}"):
        matching(Network(), [pattern])


def test_a_role_without_layers_in_the_model_is_refused() -> None:
    with pytest.raises(SettingError, match="'batch_norm' means the model's batch-norm layers but it has none"):
        matching(nn.Sequential(nn.Linear(2, 2)), ["batch_norm"])


@pytest.mark.parametrize("pattern", ["top", "", "0.weight.x"])
def test_a_pattern_without_effect_is_refused(pattern: str) -> None:
    with pytest.raises(SettingError, match="there is no layer or role"):
        matching(nn.Sequential(nn.Linear(2, 2)), [pattern])


def test_a_frozen_layer_cannot_be_named() -> None:
    module = seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    module[1].requires_grad_(False)
    with pytest.raises(SettingError, match="there is no layer or role"):
        matching(module, ["1"])
