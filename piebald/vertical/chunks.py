"""Fixed chunks of rows, and a bound on what the other party is told about the rows of one chunk.

A step's messages depend on a party's rows through sums over a batch.  If batches were drawn anew for each step, sums
over many different batches would determine single rows by linear algebra, so each row is always together with the same
others: rows are divided once, and each step takes the next chunk.  While the weights stand still, any number of steps
tells the sums over each chunk and nothing else.

Weights do not stand still, so the other party is told sums of different functions of the same rows.  The bound grants
it even all weights of all steps: with `told` numbers about a chunk whose other rows have more unknown numbers, the
equations leave every single row open, since a change of it can be made up for by the others.  (The sums treat all rows
alike, so the derivatives by one row's numbers lie in the span of those by the others' as long as these are at least as
many as the equations.)  Beyond the bound, only the secrecy of the weights is left.  The bound counts numbers: it does
not cover a party that knows some of the rows from elsewhere.

A column whose values repeat, as 0 and 1, words or whole numbers do, has no derivatives, and far less to find out than
a number: a few sums can determine how many rows there are of each kind.  Such columns count by their information: the
binary logarithm of how many collections of rows there are, over the binary digits that a number that is told has.
Where more digits are told than that, rows can be determined.  Where fewer are, not all of them can; single ones may.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from piebald.core.randomness import generator
from piebald.vertical.party_data import Ints, PartyHolding
from piebald.vertical.party_secret import PartySecret
from piebald.vertical.protocol import Role
from piebald.vertical.transfer_settings import TransferSettings

Chunks = list[NDArray[np.int64]]


def own_chunks(holding: PartyHolding, rows: int, secret: PartySecret, by_label: bool = True) -> Chunks:
    """Chunks of a party's own rows, without the co-occurring ones, which have chunks of their own.

    Rows that are left over are never used.

    Args:
        holding: the party's data, with at least so many rows that are not co-occurring.
        rows: number of rows in a chunk.
        secret: the party's secret.
        by_label: whether each chunk of the source gets nearly the same share of positives, so that none tells the mean
            of very few rows of a label.  Then the label of one row says where others are; else nothing but a row's
            number and the secret says where it is.
    """
    alone = holding.alone
    count = len(alone) // rows
    chosen = alone[secret.permutation(len(alone), "own chunks")[: count * rows]]
    if holding.y is not None and by_label:
        chosen = chosen[np.argsort(holding.y.numpy()[chosen], kind="stable")]
    return [chosen[place::count] for place in range(count)]


def common_chunks(overlap: NDArray[np.int64], rows: int, seed: int) -> Chunks:
    """Chunks of the co-occurring rows, the same at both parties, so drawn from the seed."""
    order = generator(seed, "transfer", "overlap").permutation(len(overlap))
    return [overlap[order[start : start + rows]] for start in range(0, len(overlap) - rows + 1, rows)]


@dataclass(frozen=True, slots=True)
class Exposure:
    """What the other party is told about one chunk.

    Attributes:
        rows: the chunk in words.
        told: numbers told in the whole run, at most: a run may not tell more than its plan (`ToldLedger`).
        unknown: unknown numbers of all rows of the chunk but one, rounded down.
        steps: steps of the run.
    """

    rows: str
    told: int
    unknown: int
    steps: int

    @property
    def holds(self) -> bool:
        """Whether the run stays within the bound."""
        return self.told <= self.unknown

    @property
    def most_steps(self) -> int:
        """About how many steps stay within the bound."""
        return self.steps * self.unknown // self.told if self.told else self.steps


def unknown_numbers(x: Tensor, rows: int, digits: int) -> float:
    """The least count of told numbers that can determine so many rows.

    Args:
        x: rows of the same kind, which show how many values each column can have.
        rows: how many are not known.
        digits: binary digits of a number that is told.
    """
    values = [len(np.unique(column)) for column in x.numpy().T]
    repeat = [count < 0.99 * len(x) for count in values]
    two = [place for place, count in enumerate(values) if repeat[place] and count <= 2]
    # Columns of two values may belong together, as those of a word do, so their combinations are counted.
    kinds = [len(np.unique(x[:, two].numpy(), axis=0))] if two else []
    kinds += [count for place, count in enumerate(values) if repeat[place] and count > 2]
    entropy = sum(math.log2(count) for count in kinds)
    # Sums tell a collection, not an order: of k kinds there are (rows + k - 1) choose rows.
    collections = rows * entropy - math.lgamma(rows + 1) / math.log(2)
    if entropy < 30:
        count = 2.0**entropy
        collections = (math.lgamma(rows + count) - math.lgamma(count) - math.lgamma(rows + 1)) / math.log(2)
    return rows * (len(values) - sum(repeat)) + max(collections, 0.0) / digits


def exposures(role: Role, holding: PartyHolding, settings: TransferSettings) -> list[Exposure]:
    """What the other party is told about each kind of chunk of this party."""
    terms, widths = settings.terms(role), settings.network.aligned
    alone, common = len(holding.alone) // settings.batch, len(holding.overlap) // settings.overlap_batch

    def uses(chunks: int, counted: Callable[[int], bool] = lambda step: True) -> int:
        """Uses of the first chunk, which is used most, at the steps that count."""
        return sum(counted(step) for step in range(0, settings.steps, max(chunks, 1)))

    def exposure(words: str, rows: int, used: int, told: int, of: Ints) -> Exposure:
        # A row is its features, of which so many uses show at most `used` times its hidden units.
        others = max(rows - 1, 0)
        unknown = min(unknown_numbers(holding.x[of], others, settings.backend.digits), others * used * sum(widths))
        return Exposure(f"{rows} of the {role}'s {words}", told, int(unknown), settings.steps)

    own, both, watched = uses(alone), uses(common), uses(common, settings.watches) + 1  # or the last step's chunk
    found = [
        exposure("own rows", settings.batch, own, own * sum(term.told_own for term in terms), holding.alone),
        exposure(
            "co-occurring rows",
            settings.overlap_batch,
            both,
            sum(both * term.told_common + watched * term.told_watched for term in terms),
            holding.overlap,
        ),
    ]
    if holding.y is not None:
        share = float((holding.y[holding.alone] > 0).double().mean())
        fewer = int(settings.batch * min(share, 1 - share))
        found.append(exposure("own rows of the rarer label", fewer, own, own * widths[-1], holding.alone))
    return [one for one in found if one.told]


def warning(role: Role, found: list[Exposure]) -> str:
    """A sentence if some chunk is beyond the bound, else ""."""
    beyond = [one for one in found if not one.holds]
    if not beyond:
        return ""
    worst = max(beyond, key=lambda one: one.told / max(one.unknown, 1))
    other = "target" if role == "source" else "source"
    since = f"beyond about {worst.most_steps:,} steps" if worst.most_steps else "from the first step on"
    return (
        f"{worst.steps} steps tell the {other} {worst.told:,} numbers about a chunk of {worst.rows}, of which "
        f"{worst.unknown:,} are unknown: {since}, only the secrecy of the weights protects single rows "
        "(docs/explanation/transfer.md)"
    )
