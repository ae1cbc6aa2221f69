"""The clients of an experiment file: their rows from its source, and inputs as the model reads them."""

from __future__ import annotations

from piebald.contracts import Clients
from piebald.contracts.component import Component
from piebald.core.errors import SettingError
from piebald.data.clients.prepared import SitesPrepared, columns_of, prepared
from piebald.data.clients.published_rows import with_published
from piebald.data.clients.standardise import Standardisation, standardised
from piebald.data.embeddings.embedded import embedded_by
from piebald.data.partition.by_owner import by_only_owner
from piebald.data.partition.split import unseen_numbers
from piebald.data.preparation.settings import PrepareSettings
from piebald.data.sets.dataset import DataSet
from piebald.experiments.fields import ExperimentFields
from piebald.experiments.sections import Kind


def partition_of(fields: ExperimentFields) -> Component | None:
    """Build the partition; None where the source has clients."""
    if fields.partition is not None:
        return fields.component("partition", fields.partition)
    if fields.data.client is not None:
        return fields.component("partition", Kind(kind="by_owner"), owner=fields.data.client)
    return None


def clients_of(fields: ExperimentFields, partition: Component | None) -> Clients:
    """Return the clients with their rows as the source has them, and the rows that all of them have."""
    clients = _own_rows(fields, partition)
    try:
        return with_published(clients, fields.data)
    except SettingError as error:
        raise SettingError(f"{fields.places.at('data', 'public')}: {error}") from None


def _own_rows(fields: ExperimentFields, partition: Component | None) -> Clients:
    """Return the clients: the partition's of the data, or those that the source has already."""
    from piebald.data.clients.sites import Sites
    from piebald.data.partition import Partition, RemotePartition

    if isinstance(partition, RemotePartition):
        settings = fields.prepare if isinstance(fields.prepare, PrepareSettings) else PrepareSettings()
        agreed, length = settings.agreed, settings.length
        with fields.errors_placed("split", {}):
            if agreed is None and length is not None and isinstance(partition, Sites):
                partition = partition.of_text(length)
            if agreed is None or not isinstance(partition, Sites):
                return partition.clients_elsewhere().divided_by(fields.split)
            sites = partition.prepared(agreed).clients_elsewhere().divided_by(fields.split)
        return SitesPrepared(sites, agreed)
    with fields.errors_placed("data", fields.data):
        rows = fields.data.load(fields.split, coded=wants_preparation(fields))
    if not isinstance(rows, DataSet):
        if fields.partition is not None:
            raise SettingError(
                f"{fields.places.at('partition')}: {fields.data.source} has clients already: remove [partition]"
            )
        return rows
    partition = partition or by_only_owner(rows)
    if partition is None:
        raise SettingError(f"{fields.document.name} needs a section [partition] with a kind, or a client in [data]")
    assert isinstance(partition, Partition)
    with fields.errors_placed("partition", fields.partition or {}):
        return partition.split(rows, fields.split)


def wants_preparation(fields: ExperimentFields) -> bool:
    """Return whether columns of tables are to be prepared.

    An extractor, or constants of standard scores, want numbers as they are.
    """
    plain = fields.extractor is not None or isinstance(fields.data.standardise, Standardisation)
    if fields.prepare not in (None, "none") and (plain or fields.data.standardise is not None):
        name = "extractor" if fields.extractor is not None else "data.standardise"
        raise SettingError(
            f"{fields.places.at('prepare')}: prepare scales inputs, and {name} changes them as well: leave one out"
        )
    return fields.prepare != "none" and not plain


def as_the_model_reads(fields: ExperimentFields, clients: Clients) -> Clients:
    """Return the clients with their inputs behind the extractor of the file, and as standard scores.

    Raises:
        SettingError: the rows cannot be read so.
    """
    at, standardise = fields.places.at, fields.data.standardise
    if columns_of(clients) is not None:
        settings = fields.prepare if isinstance(fields.prepare, PrepareSettings) else PrepareSettings()
        seeds = fields.seeds or [fields.seed]
        # clients that any of the seeds holds out, since all runs share one preparation
        held_out = {number for seed in seeds for number in unseen_numbers(clients.names, fields.unseen, seed)}
        try:
            return prepared(
                clients,
                settings,
                fields.data.target or "target",
                held_out,
                origin=str(fields.data.source or "the rows"),
            )
        except SettingError as error:
            raise SettingError(f"{at('prepare')}: {error}") from None
    if fields.prepare not in (None, "none") and not fields.rows_at_sites:
        raise SettingError(
            f"{at('prepare')}: prepare is for the columns of tables, and these inputs are arrays: leave it out, or set "
            "standardise = 'federated' in [data]"
        )
    if fields.extractor is not None:
        try:
            clients = embedded_by(clients, fields.extractor)
        except SettingError as error:
            raise SettingError(f"{at('extractor')}: {error}") from None
    if standardise is None:
        return clients
    if standardise == "federated" and fields.unseen:
        raise SettingError(
            f"{at('unseen')}: unseen holds clients out, whose rows would count in data.standardise = 'federated': give "
            "constants, standardise = { mean = [...], deviation = [...] }, or leave one of them out"
        )
    try:
        return standardised(clients, standardise if isinstance(standardise, Standardisation) else None)
    except SettingError as error:
        raise SettingError(f"{at('data', 'standardise')}: {error}") from None
