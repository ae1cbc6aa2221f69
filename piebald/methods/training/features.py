"""Requirements of methods that use a model's features."""

from __future__ import annotations

from piebald.contracts.model_spec import ModelSpec
from piebald.core.parameters import head


def no_features(kind: str, spec: ModelSpec) -> str | None:
    """Return why the features of a model are not known, or None: they are what goes into its last linear layer."""
    if head(spec.model) is not None:
        return None
    return (
        f"{kind} compares features, which are what goes into a model's last linear layer, but this model "
        f"({type(spec.model).__name__}) has no layer before a linear one: take a model that ends with a linear layer"
    )
