"""What a run leaves in the hands of who started it: its tables and its models."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from piebald.contracts import Clients, Work
from piebald.errors import SettingError
from piebald.report.store import RunStore
from piebald.report.tables import History
from piebald.runtimes.engines.choose import make_engine
from piebald.runtimes.engines.serve import PRIVATE, personal_model


class Run(History):
    """A finished run: its tables, and its models.  Its run folder stays open for reading until `close`.

    Attributes:
        work: the model, its layout and the task that clients were given.
    """

    def __init__(self, source: RunStore | Path, work: Work, clients: Clients, version: int, community: Tensor) -> None:
        super().__init__(source)
        self.work = work
        self._clients = clients
        self._version = version
        self._community = community

    def model(self, client: int | None = None) -> nn.Module:
        """A copy of the user's module, ready to use.

        Args:
            client: None gives the community model; its private layers, if any, are as they were at the start.  A number
                gives that client's personal model: with its private layers, fine-tuned, or Ditto's, as the recipe has
                it.

        Raises:
            SettingError: the recipe makes personal models and the run was not kept in a folder.
        """
        layout, initial = self.work.layout, self.work.initial
        whole = torch.cat([self._community, initial[layout.shared :]])
        module = copy.deepcopy(self.work.model)
        layout.load(module, whole if client is None else self._personal(client))
        return module.eval()

    def _personal(self, client: int) -> Tensor:
        if not 0 <= client < len(self._clients):
            raise SettingError(f"client must be a number from 0 to {len(self._clients) - 1}, got {client}")
        layout, rule = self.work.layout, self.work.rule
        remembered = rule.remember(self.work.initial, layout.shared)
        if layout.private:
            remembered[PRIVATE] = self.work.initial[layout.shared :]
        if remembered:
            if self.path is None:
                raise SettingError("what clients remember is kept in a run folder only: run with out='some/folder'")
            remembered |= self._store.memory(client)  # a client that never took part remembers the start
        engine = make_engine("lean", self.work, self._clients, torch.device("cpu"), bfloat16=False)
        return personal_model(engine, client, self._version, self._community, remembered)
