"""Contract tests as functions, for components that others write; Piebald's own components pass them too.

Each function raises an `AssertionError` that says which promise is broken, and needs no test framework:

    from piebald import testing

    def test_my_trainer():
        testing.check_trainer(MyTrainer(strength=0.1))

Piebald's own tests use this room, and nothing that runs does.
"""

from piebald.testing.components import (
    check_aggregator,
    check_clustering,
    check_component,
    check_recipe,
    check_scheduler,
    check_server_optimizer,
    check_sharing,
    check_trainer,
    check_transform,
)
from piebald.testing.data_set import check_data_set, check_partition

__all__ = [
    "check_aggregator",
    "check_clustering",
    "check_component",
    "check_data_set",
    "check_partition",
    "check_recipe",
    "check_scheduler",
    "check_server_optimizer",
    "check_sharing",
    "check_trainer",
    "check_transform",
]
