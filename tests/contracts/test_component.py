"""The kind of a component, which names it in files and on the command line."""

from __future__ import annotations

import pytest

from piebald import Recipe
from piebald.contracts.component import Component, build
from piebald.vertical import encryption, kernels


@pytest.mark.parametrize(
    ("component", "kind"),
    [
        (kernels.LinearKernel, "linear"),
        (kernels.PolynomialKernel, "polynomial"),
        (kernels.GaussianKernel, "gaussian"),
        (encryption.BfvBackend, "bfv"),
        (encryption.FixedBackend, "fixed"),
        (encryption.PlainBackend, "plain"),
    ],
)
def test_the_kind_is_the_class_name_without_the_name_of_the_axis(component, kind):
    assert component.kind == kind
    assert type(build(component.axis, kind)) is component


def test_only_the_name_of_the_own_axis_is_left_out():
    class ToyKernelTrainer(kernels.Kernel):
        pass

    class Toy(kernels.Kernel):
        pass

    registered = kernels.Kernel.registry["kernel"]
    try:
        assert ToyKernelTrainer.kind == "toy_kernel_trainer"
        assert Toy.kind == "toy"
    finally:
        for toy in (ToyKernelTrainer, Toy):
            del registered[toy.kind]


def test_a_component_is_printed_with_its_name_and_settings() -> None:
    """Also one without settings, of which pydantic's text is empty."""
    for axis in Recipe.axes:
        for component in Component.registry[axis].values():
            ours = component.__module__.startswith("piebald.")
            if ours and not any(field.is_required() for field in component.model_fields.values()):
                assert str(component()) == repr(component())
                assert component.__name__ in str(component())
