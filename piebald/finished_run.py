"""What a run leaves in the hands of who started it: its tables and its models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from piebald.client_work import ClientWork
from piebald.contracts import Clients
from piebald.errors import SettingError
from piebald.report.store import RunStore
from piebald.report.tables import History
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.serving import personal_model
from piebald.runtimes.engines.stack import PRIVATE
from piebald.server.best_version import ModelSnapshot
from piebald.sharing.base import Sharing


class Run(History):
    """A finished run: its tables, and its models.  Its run folder stays open for reading until `close`.

    Its models are those of the last commit, or of the best one where the run was asked to keep that.

    Attributes:
        work: the model, its layout and the objective that clients were given.
        groups: the global models [s] by the group's number.
        main: the number of the group whose model stands for the run.
    """

    def __init__(
        self,
        source: RunStore | Path,
        work: ClientWork,
        clients: Clients,
        version: int,
        models: ModelSnapshot,
        share: Sharing,
    ) -> None:
        super().__init__(source)
        self.work = work
        self.main = models.main
        first = {0: work.initial[: work.layout.shared]}  # where nobody is in a group yet
        self.groups: Mapping[int, Tensor] = dict(sorted((first | dict(models.clusters)).items()))
        self._clients = clients
        self._version = version
        self._group_of = models.cluster_of
        self._share = share

    def model(self, client: int | None = None) -> nn.Module:
        """A copy of the user's module, ready to use.

        Args:
            client: None gives the global model (of the main group where there are several); its private layers, if
                any, are as they were at the start.  A number gives that client's personal model: with its private
                layers, fine-tuned, or Ditto's, as the recipe has it.

        Raises:
            SettingError: the recipe makes personal models and the run was not kept in a folder.
        """
        module = copy.deepcopy(self.work.model)
        self.work.layout.load(module, self.start() if client is None else self._personal(client))
        return module.eval()

    def start(self, group: int | None = None) -> Tensor:
        """What a newcomer starts from [p]: a group's global model with the first private numbers."""
        return torch.cat(
            [self.groups[self.main if group is None else group], self.work.initial[self.work.layout.shared :]]
        )

    def _personal(self, client: int) -> Tensor:
        if not 0 <= client < len(self._clients):
            raise SettingError(f"client must be a number from 0 to {len(self._clients) - 1}, got {client}")
        layout = self.work.layout
        remembered = self.work.initial_state()
        if layout.private:
            remembered[PRIVATE] = self._share.initial_private(self.work.initial[layout.shared :], layout, client)
        if remembered:
            if self.meta.get("runtime", {}).get("kind") == "federation":
                raise SettingError(
                    f"what client {client} remembers never left its site, where its model is: look into its credentials"
                )
            if self.path is None:
                raise SettingError("what clients remember is kept in a run folder only: run with out='some/folder'")
            remembered |= self._store.memory(client, self._version)  # who never took part remembers the start
        engine = make_engine("sequential", self.work, self._clients, torch.device("cpu"), bfloat16=False)
        community = self.groups[self._group_of.get(client, self.main)]
        return personal_model(engine, client, self._version, community, remembered)
