"""Gated units against the paper's equation written out, their twins, and what may be set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from piebald.core.errors import SettingError
from piebald.core.parameters import Layout, matching
from piebald.models import Conditioning, GatedConvolution, GatedUnit, build_model


def drawn(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with all numbers drawn, conditioning among them."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


def written_out(unit: GatedUnit, x: Tensor, v_f: Tensor, v_g: Tensor, c: Tensor) -> Tensor:
    """h = tanh(W_f x + V_f c + b_f) * sigmoid(W_g x + V_g c + b_g), row by row and unit by unit."""
    units = len(v_f)
    w, b = unit.product.weight, unit.bias()
    h = torch.zeros(len(x), units)
    for row in range(len(x)):
        for k in range(units):
            f = w[k] @ x[row] + v_f[k] @ c + b[k]
            g = w[units + k] @ x[row] + v_g[k] @ c + b[units + k]
            h[row, k] = f.tanh() * g.sigmoid()
    return h


@settings(deadline=None, max_examples=40)
@given(client=st.integers(0, 2), units=st.integers(1, 5), inputs=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_unit_is_the_equation_with_a_one_hot_client(client: int, units: int, inputs: int, seed: int) -> None:
    """A shared matrix with who one is, and the private vectors that are that client's columns, are the same unit."""
    shared = drawn(GatedUnit(inputs, units, clients=3), seed)
    c = functional.one_hot(torch.tensor(client), 3).float()
    shared.conditioning.client.copy_(c)
    x = torch.randn(4, inputs, generator=torch.Generator().manual_seed(seed))
    expected = written_out(shared, x, shared.conditioning.filter, shared.conditioning.gate, c)
    torch.testing.assert_close(shared(x), expected, atol=1e-5, rtol=1e-4)

    private = GatedUnit(inputs, units, bias=True)
    private.product.load_state_dict(shared.product.state_dict())
    private.bias.load_state_dict(shared.bias.state_dict())
    with torch.no_grad():
        private.conditioning.filter.copy_(shared.conditioning.filter[:, client])
        private.conditioning.gate.copy_(shared.conditioning.gate[:, client])
    torch.testing.assert_close(private(x), expected, atol=1e-5, rtol=1e-4)
    assert expected.abs().max() <= 1


@pytest.mark.parametrize("axes", [1, 2])
def test_a_convolution_adds_a_clients_vectors_at_every_position(axes: int) -> None:
    unit = drawn(GatedConvolution(3, 4, kernel=3, axes=axes, dilation=2, bias=True))
    x = torch.randn(2, 3, *[7] * axes, generator=torch.Generator().manual_seed(1))
    convolve = functional.conv1d if axes == 1 else functional.conv2d
    f, g = (
        convolve(functional.pad(x, [2, 2] * axes), w, b, dilation=2)
        for w, b in zip(unit.product.weight.chunk(2), (unit.bias.filter, unit.bias.gate), strict=True)
    )
    own = [vector.reshape(-1, *[1] * axes) for vector in (unit.conditioning.filter, unit.conditioning.gate)]
    torch.testing.assert_close(unit(x), (f + own[0]).tanh() * (g + own[1]).sigmoid(), atol=1e-5, rtol=1e-4)


def test_a_stranger_has_no_conditioning() -> None:
    x = torch.randn(5, 3)
    shared, private = GatedUnit(3, 2, clients=4), GatedUnit(3, 2, bias=True)
    none = GatedUnit(3, 2, filter=False, gate=False)
    drawn(shared.conditioning)
    for unit in (shared, none):
        unit.product.load_state_dict(private.product.state_dict())
        unit.bias.load_state_dict(private.bias.state_dict())
    assert none.conditioning is None
    torch.testing.assert_close(private(x), none(x))
    torch.testing.assert_close(shared(x), none(x))


@pytest.mark.parametrize(("filter", "gate"), [(True, False), (False, True)])
def test_switches_leave_one_half_alone(filter: bool, gate: bool) -> None:
    conditioning = drawn(Conditioning(3, filter, gate))
    both = conditioning()
    unit = GatedUnit(2, 3, filter, gate)
    assert [name for name, _ in unit.bias.named_parameters()] == ["gate" if filter else "filter"]
    assert GatedUnit(2, 3).bias is None
    assert [name for name, _ in conditioning.named_parameters()] == ["filter" if filter else "gate"]
    assert torch.equal(both[:3] != 0, torch.tensor([filter] * 3))
    assert torch.equal(both[3:] != 0, torch.tensor([gate] * 3))


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("units", [(64, 64), (128, 128), (32, 16), (9,)])
def test_twins(units: tuple[int, ...]) -> None:
    gated, plain, matched = (
        build_model(name, (20,), 5, units=units, **more)
        for name, more in (("gated_classifier", {}), ("plain_classifier", {}), ("plain_classifier", {"matched": True}))
    )
    private = matching(gated, ["conditioning"])
    conditioning = sum(p.numel() for name, p in gated.named_parameters() if name in private)
    head = count(gated.classifier)
    assert conditioning == 2 * sum(units)
    assert count(gated) - head == 2 * (count(plain) - head)  # the paper: gates double the parameters
    one_unit_more = 2 * (max(20, *units) + max(units) + 6)
    assert abs(count(matched) - count(gated)) <= one_unit_more
    assert Layout.of(gated, private).shared == count(gated) - conditioning


@pytest.mark.parametrize("shape", [(2, 12), (2, 12, 8)])
def test_the_convolutional_classifier_reads_signals_and_images(shape: tuple[int, ...]) -> None:
    model = build_model("gated_cnn", shape, 3, units=(4, 6))
    assert model(torch.randn(5, *shape)).shape == (5, 3)
    private = matching(model, ["conditioning"])
    assert {name.rpartition(".")[2] for name in private} == {"filter", "gate"}
    assert len(private) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: GatedUnit(0, 2), "inputs must be a whole number of at least 1, got 0"),
        (lambda: GatedUnit(2, 2, clients=0), "clients must be a whole number of at least 1, got 0"),
        (lambda: GatedUnit(2, 2, gate="yes"), "gate must be true or false, got 'yes'"),
        (lambda: GatedConvolution(2, 2, axes=3), "axes must be 1 .signals. or 2 .images., got 3"),
        (lambda: build_model("gated_classifier", (4,), 2, dropout=1.0), "dropout must be a finite number"),
        (lambda: build_model("gated_cnn", (1, 2), 2), "gated_cnn needs sides of at least 4"),
    ],
)
def test_what_cannot_be_is_one_sentence(wrong, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        wrong()
