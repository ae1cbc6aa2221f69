"""Fixed chunks of rows, and a bound on the numbers about the rows of one chunk that the other party learns.

A step's messages depend on a party's rows through sums over a batch.  If batches were drawn anew for each step, sums
over many different batches would determine single rows by linear algebra, so each row is always together with the same
others: rows are divided once, and each step takes the next chunk.  While the weights stand still, any number of steps
discloses the sums over each chunk and nothing else.

Weights do not stand still, so the other party learns sums of different functions of the same rows.  The bound grants
it even all weights of all steps: if the other rows of a chunk have more unknown numbers than were disclosed about it,
the equations leave every single row open, since the others can make up for a change of it.  (The sums treat all rows
alike, so the derivatives by one row's numbers lie in the span of those by the others' as long as these are at least as
many as the equations.)  Beyond the bound, only the secrecy of the weights is left.  The bound counts numbers: it does
not cover a party that knows some of the rows from elsewhere.

A column whose values repeat, as 0 and 1, words or whole numbers do, has no derivatives, and far less to find out than
a number: a few sums can determine how many rows there are of each kind.  Such columns count by their information: the
binary logarithm of the number of collections of rows, over the binary digits of a disclosed number.  Where more digits
are disclosed than that, rows can be determined.  Where fewer are, not all of them can; single ones may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.randomness import generator
from piebald.vertical.disclosure_ledger import plan
from piebald.vertical.party_data import Ints, PartyHolding
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_settings import TransferSettings

Chunks = list[NDArray[np.int64]]


def own_chunks(data: PartyHolding, rows: int, secret: PartySecret, by_label: bool = True) -> Chunks:
    """Return chunks of a party's own rows, without the co-occurring ones, which have chunks of their own.

    Rows that are left over are never used.

    Args:
        data: the party's data, with at least so many rows that are not co-occurring.
        rows: number of rows in a chunk.
        secret: the party's secret.
        by_label: give each chunk of the source nearly the same share of positives, so that none discloses the mean of
            very few rows of a label.  Then the chunk of a row depends on the labels of others, too; else only on its
            number and the secret.
    """
    alone = data.alone
    count = len(alone) // rows
    chosen = alone[secret.permutation(len(alone), "own chunks")[: count * rows]]
    if data.y is not None and by_label:
        chosen = chosen[np.argsort(data.y.numpy()[chosen], kind="stable")]
    # dealt out one by one, so that sorted labels spread evenly over all chunks
    return [chosen[index::count] for index in range(count)]


def common_chunks(overlap: NDArray[np.int64], rows: int, seed: int) -> Chunks:
    """Return chunks of the co-occurring rows, the same at both parties, so drawn from the seed."""
    order = generator(seed, "transfer", "overlap").permutation(len(overlap))
    # rows that do not fill a chunk are never used, or their sums would be those of few rows
    return [overlap[order[start : start + rows]] for start in range(0, len(overlap) - rows + 1, rows)]


@dataclass(frozen=True, slots=True)
class Exposure:
    """The numbers about one chunk that the other party learns.

    Attributes:
        rows: the chunk in words.
        disclosed: numbers disclosed in the whole run, at most those of its plan (`DisclosureLedger`).
        unknown: unknown numbers of all rows of the chunk but one, rounded down.
        steps: steps of the run.
    """

    rows: str
    disclosed: int
    unknown: int
    steps: int

    @property
    def holds(self) -> bool:
        """True if the run stays within the bound."""
        return self.disclosed <= self.unknown

    @property
    def most_steps(self) -> int:
        """The approximate number of steps within the bound."""
        return self.steps * self.unknown // self.disclosed if self.disclosed else self.steps


def unknown_numbers(x: Tensor, rows: int, digits: int) -> float:
    """Return the least count of disclosed numbers that can determine some rows.

    Args:
        x: rows of the same kind, from which the number of values of each column is taken.
        rows: number of unknown rows.
        digits: binary digits of a disclosed number.
    """
    values = [len(np.unique(column)) for column in x.numpy().T]
    # a column in which nearly all values differ has as many unknown numbers as rows
    repeat = [count < 0.99 * len(x) for count in values]
    two = [index for index, count in enumerate(values) if repeat[index] and count <= 2]
    # columns of two values may belong together, as those of a word do, so their combinations are counted.
    kinds = [len(np.unique(x[:, two].numpy(), axis=0))] if two else []
    kinds += [count for index, count in enumerate(values) if repeat[index] and count > 2]
    entropy = sum(math.log2(count) for count in kinds)
    # sums show a collection and no order: of k kinds there are (rows + k - 1) choose rows.
    collections = rows * entropy - math.lgamma(rows + 1) / math.log(2)
    # beyond, kinds are so many that nearly all rows differ, and the terms of lgamma would cancel
    if entropy < 30:
        count = 2.0**entropy
        collections = (math.lgamma(rows + count) - math.lgamma(count) - math.lgamma(rows + 1)) / math.log(2)
    return rows * (len(values) - sum(repeat)) + max(collections, 0.0) / digits


def exposures(role: Role, data: PartyHolding, settings: TransferSettings) -> list[Exposure]:
    """Return the exposure of each kind of chunk of this party."""
    terms, widths = settings.terms(role), (1,) if settings.method.joint else settings.network.aligned
    alone, common = len(data.alone) // settings.batch, len(data.overlap) // settings.overlap_batch
    uses = plan(settings.steps, alone, common)

    def exposure(words: str, rows: int, used: int, disclosed: int, of: Ints) -> Exposure:
        # a row is its features, of which so many uses show at most `used` times its hidden units.
        remaining = max(rows - 1, 0)
        unknown = min(unknown_numbers(data.x[of], remaining, settings.backend.digits), remaining * used * sum(widths))
        return Exposure(f"{rows} of the {role}'s {words}", disclosed, int(unknown), settings.steps)

    # of the first chunk, which is used most
    own_uses, common_uses = uses.get(("own", 0), 0), uses.get(("common", 0), 0)
    # or the last step's chunk
    watched = sum(map(settings.watches, range(0, settings.steps, max(common, 1)))) + 1
    own_numbers = own_uses * sum(term.disclosed_own for term in terms)
    common_numbers = sum(common_uses * term.disclosed_common + watched * term.disclosed_watched for term in terms)
    chunks = [
        exposure("own rows", settings.batch, own_uses, own_numbers, data.alone),
        exposure("co-occurring rows", settings.overlap_batch, common_uses, common_numbers, data.overlap),
    ]
    if data.y is not None and not settings.method.joint:
        share = float((data.y[data.alone] > 0).double().mean())
        fewer = int(settings.batch * min(share, 1 - share))
        numbers = own_uses * widths[-1]
        chunks.append(exposure("own rows of the rarer label", fewer, own_uses, numbers, data.alone))
    return [chunk for chunk in chunks if chunk.disclosed]


def warning(role: Role, chunks: list[Exposure]) -> str:
    """Return a sentence if some chunk is beyond the bound, else ""."""
    beyond = [chunk for chunk in chunks if not chunk.holds]
    if not beyond:
        return ""
    worst = max(beyond, key=lambda chunk: chunk.disclosed / max(chunk.unknown, 1))
    partner = "target" if role == "source" else "source"
    since = f"beyond about {worst.most_steps:,} steps" if worst.most_steps else "from the first step on"
    return (
        f"{worst.steps} steps tell the {partner} {worst.disclosed:,} numbers about a chunk of {worst.rows}, of which "
        f"{worst.unknown:,} are unknown: {since}, only the secrecy of the weights protects single rows "
        "(docs/explanation/transfer.md)"
    )
