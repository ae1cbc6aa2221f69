from __future__ import annotations

import pytest
import torch

from piebald.core.errors import SettingError
from piebald.core.parameters import Layout, matching
from piebald.models import build_model, names

NETWORKS = [name for name in names() if name != "pretrained"]  # which needs weights: test_pretrained.py
SHAPES = {"cnn_1d": (2, 30), "cnn_1d_bn": (2, 30)}  # the others read images


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "outputs", "count"),
    [
        ("leaf_cnn", 62, 6_603_710),  # LEAF's FEMNIST network
        ("small_cnn", 10, 17_042),
        ("metis_cnn", 10, 64 * 26 + 64 * 1601 + 64 * 49 * 384 + 384 + 384 * 192 + 192 + 1930),
        ("logistic", 10, 7_850),
        ("mlp", 10, 784 * 128 + 128 + 1290),
        ("cnn_bn", 10, 144 + 32 + 4608 + 64 + 32 * 49 * 10 + 10),
    ],
)
def test_parameters_at_28x28(name: str, outputs: int, count: int) -> None:
    assert parameters(build_model(name, (1, 28, 28), outputs)) == count


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_173_962),  # the count that is usual for the CIFAR form
        ("resnet50", 23_520_842),
        # configuration A's convolutions, batch norms, and the last layer
        ("vgg11", 9 * (3 * 64 + 64 * 128 + 128 * 256 + 256**2 + 256 * 512 + 3 * 512**2) + 2 * 2752 + 5130),
    ],
)
def test_parameters_at_cifar(name: str, count: int) -> None:
    assert parameters(build_model(name, (3, 32, 32), 10)) == count


@pytest.mark.parametrize(("name", "numbers"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_residual_networks_have_the_form_for_imagenet(name: str, numbers: int) -> None:
    """The counts are those of torchvision's with 1,000 classes; a side is 32 times shorter before it is averaged."""
    network = build_model(name, (3, 64, 64), 1000, stem="imagenet").eval()
    assert sum(part.numel() for part in network.parameters()) == numbers
    x = torch.zeros(1, 3, 64, 64)
    for layer in network.features[:-2]:
        x = layer(x)
    assert x.shape[2:] == (2, 2)
    with pytest.raises(SettingError, match="stem"):
        build_model(name, (3, 64, 64), 10, stem="mnist")


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vgg11", "cnn_1d_bn", "mlp_bn", "cnn_bn"])
def test_batch_norm_is_where_distfl_looks_for_it(name: str) -> None:
    model = build_model(name, SHAPES.get(name, (3, 8, 8)), 4)
    assert any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in model.modules())


@pytest.mark.parametrize("name", NETWORKS)
def test_every_model_maps_a_batch_to_logits(name: str) -> None:
    shape = SHAPES.get(name, (3, 9, 8))
    model = build_model(name, shape, 5)
    assert model.training
    x = torch.rand(4, *shape)
    assert model(x).shape == (4, 5)
    assert model.eval()(x[:1]).shape == (1, 5)


@pytest.mark.parametrize("name", NETWORKS)
def test_same_seed_same_numbers_and_global_state_is_left_alone(name: str) -> None:
    shape = SHAPES.get(name, (1, 8, 8))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = build_model(name, shape, 3, seed=5)
    assert torch.equal(torch.rand(3), expected)
    again, other = build_model(name, shape, 3, seed=5), build_model(name, shape, 3, seed=6)
    layout = Layout.of(first)
    assert torch.equal(layout.flatten(first), layout.flatten(again))
    assert not torch.equal(layout.flatten(first), layout.flatten(other))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_classifier_is_the_last_layer(name: str) -> None:
    model = build_model(name, SHAPES.get(name, (1, 8, 8)), 3)
    assert matching(model, ["classifier"]) == {"classifier.weight", "classifier.bias"}


@pytest.mark.full
@pytest.mark.parametrize("name", NETWORKS)
def test_many_models_at_once(name: str) -> None:
    model = build_model(name, SHAPES.get(name, (1, 8, 8)), 3).eval()
    layout = Layout.of(model)
    vectors = torch.stack([layout.flatten(model), layout.flatten(model) * 0.5])
    x = torch.rand(2, 4, *SHAPES.get(name, (1, 8, 8)))

    def one(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, layout.views(vector), (x,))

    together = torch.func.vmap(one)(vectors, x)
    for client in range(2):
        torch.testing.assert_close(together[client], one(vectors[client], x[client]))


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "settings", "message"),
    [
        ("mpl", (4,), 2, {}, "there is no model 'mpl': did you mean 'mlp'"),
        ("mlp", (4,), 2, {"hiden": 3}, "no setting of model 'mlp' called 'hiden': did you mean 'hidden'"),
        ("mlp", (4,), 2, {"hidden": 3}, "hidden must be a list"),
        ("mlp", (4,), 2, {"hidden": (3, 0)}, "hidden must be a list whose entries are each"),
        ("mlp", (4,), 0, {}, "outputs must be a whole number of at least 1, got 0"),
        ("mlp", (), 2, {}, "input_shape must be the shape of one input"),
        ("mlp", 4, 2, {}, "input_shape must be a table or a list"),
        ("leaf_cnn", (28, 28), 2, {}, r"reads inputs \[channels, height, width\], got \[28, 28\]"),
        ("leaf_cnn", (1, 3, 28), 2, {}, "needs sides of at least 4"),
        ("leaf_cnn", (1, 8, 8), 2, {"channels": (3,)}, r"channels must be a list of 2 widths, like \[32, 64\]"),
        ("cnn_bn", (1, 8, 8), 2, {"channels": "ab"}, "channels must be a list"),
        ("cnn_1d", (1, 3), 2, {}, "needs sides of at least 4"),
        ("cnn_1d", (1, 8), 2, {"kernel": 2.5}, "kernel must be a whole number"),
        ("logistic", (4,), 2, {"hidden": 3}, "no setting of model 'logistic' called 'hidden'"),
        ("logistic", (4,), 2, {"seed": "x"}, "seed must be a whole number, got 'x'"),
    ],
)
def test_bad_settings_are_one_sentence(name, shape, outputs, settings, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        build_model(name, shape, outputs, **settings)
    assert "\n" not in str(caught.value)
