"""BFV: exact integers modulo t in thousands of slots.  Depth one: ciphertext times plaintext, never two ciphertexts.

Two ways to lay out C S (rows n, inner p, width w padded to a power of two):

`rotate`  slot (r, a) = S[r mod c, a].  Rotated by k blocks it holds S[r + k, a]; times C[r, r + k], summed over k, it
          is row r of C S, for degree / w rows at once.  Baby and giant steps: 14 rotations for 64 columns.  p columns
          make ceil(p / c) such ciphertexts, which share the giant steps.
`gather`  every term C[i, b] S[b, a] has a slot of its own and the owner adds up the *masked* slots; no rotations.  For
          one row or one column.

Masks are uniform modulo t in every slot, and are added as a fresh encryption under the owner's public key.  The owner
knows the randomness of what it sent, so a mask added without encryption would hide the sum but not the coefficients.
Switching to the smallest modulus removes most of the noise, which depends on C as well.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field

from piebald.core.errors import SettingError
from piebald.vertical.encryption.backend import (
    Backend,
    Evaluator,
    FixedPointScale,
    Ints,
    InvalidMessage,
    KeyOwner,
    MessageLength,
    added_integers,
    to_floats,
    to_integers,
    uniform,
)
from piebald.vertical.encryption.seal import PRIMES, STANDARD, SealContext, Unsigned, join, library, split
from piebald.vertical.kernels import Floats, ProductSize

EAGER = 512  # plaintexts encoded before the other party's message arrives; each takes 0.2 to 0.6 MB


class BfvBackend(Backend):
    """The lattice scheme BFV (Fan, Vercauteren 2012) in Microsoft SEAL, through TenSEAL: fast, messages of 0.1 to 12
    MB.

    Attributes:
        degree: number of slots of a ciphertext.  With 16384 the noise left in a result reveals less about the
            evaluator's numbers to the owner, and everything takes two to three times as long.
        columns: largest number of columns rotated as one block; keys for the rotations are sent once.
    """

    degree: Literal[8192, 16384] = 8192
    columns: int = Field(default=64, ge=1, le=512)

    def owner(self, sizes: list[ProductSize]) -> KeyOwner:
        return _BfvOwner(context(self.degree), self, sizes)

    @property
    def security(self) -> str:
        modulus = sum(PRIMES[self.degree])
        level = max(bits for bits, most in STANDARD[self.degree].items() if modulus <= most)
        return f"{level} bits (BFV, degree {self.degree}, modulus of {modulus} bits; HE standard of 2018)"

    def evaluator(self, announcement: bytes, sizes: list[ProductSize]) -> Evaluator:
        return _BfvEvaluator(context(self.degree), self, announcement, sizes)

    def announced(self, sizes: list[ProductSize]) -> MessageLength:
        primes = len(PRIMES[self.degree])
        pair = 2 * primes * 8 * self.degree + 4096  # two polynomials; a key to rotate has one pair less than primes
        return MessageLength(pair * (1 + (primes - 1) * len(self.elements(sizes))) + 4096, exact=False)

    def elements(self, sizes: list[ProductSize]) -> list[int]:
        """Return the powers X -> X^g of the rotations of these products."""
        rotations = sorted({rotation for size in sizes for rotation in _rotations(self.layout(size))})
        return [pow(3, rotation, 2 * self.degree) for rotation in rotations]

    def lengths(self, size: ProductSize) -> tuple[MessageLength, MessageLength, MessageLength]:
        plan = self.layout(size)
        fresh, small = 64 * self.degree + 4096, 16 * self.degree + 4096
        return (
            MessageLength(plan.inputs * (fresh + 8), exact=False),
            MessageLength(plan.outputs * (small + 8), exact=False),
            MessageLength(8 * size.rows * size.width),
        )

    def layout(self, size: ProductSize) -> BfvLayout:
        """The layout of a product of this size."""
        return layout(size, self.degree, self.columns)

    def check(self, size: ProductSize) -> None:
        super().check(size)
        library()
        if power(size.width) > self.degree // 2:
            raise SettingError(
                f"backend 'bfv' takes aligned layers of up to {self.degree // 2} units, got {size.width}"
            )


@dataclass(frozen=True, slots=True)
class BfvLayout:
    """Layout of a product in slots.

    Attributes:
        way: "rotate", or "gather" over the rows of S ("column": one row of C) or its columns ("row": S has one column).
        inputs: number of ciphertexts of S.
        outputs: number of masked ciphertexts.
        block: number of slots of a block: the padded width, or for "row" the padded inner size.
        columns: number of columns rotated as one block, a power of two.
        tail: number of columns of the last block, which may be smaller.
        samples: number of rows of C in one output.
    """

    way: Literal["rotate", "column", "row"]
    inputs: int
    outputs: int
    block: int
    columns: int
    tail: int
    samples: int


def power(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


@functools.cache
def context(degree: int) -> SealContext:
    """Return the context of this degree, one per process; it holds no keys."""
    return SealContext(degree)


def layout(size: ProductSize, degree: int, columns: int = 64) -> BfvLayout:
    """The layout of a product of this size."""
    if size.rows == 1:
        block = power(size.width)
        return BfvLayout("column", math.ceil(size.inner * block / degree), 1, block, 1, 1, 1)
    if size.width == 1 and power(size.inner) <= degree // 2:
        block = power(size.inner)
        # S is repeated over all slots, so one ciphertext serves degree / block rows of C
        return BfvLayout("row", 1, math.ceil(size.rows * block / degree), block, 1, 1, degree // block)
    block = power(size.width)
    # rotations stay within one of the two rows of slots, so the columns must fit into degree / 2
    columns = min(power(size.inner), power(columns), degree // 2 // block)
    samples = degree // block
    inputs = math.ceil(size.inner / columns)
    tail = power(size.inner - (inputs - 1) * columns)
    return BfvLayout("rotate", inputs, math.ceil(size.rows / samples), block, columns, tail, samples)


def steps(columns: int) -> tuple[int, int]:
    """Return the numbers of baby and giant steps, whose product is `columns`."""
    # baby + giant rotations are fewest where both are near the square root of the columns
    baby = 1 << math.ceil(math.log2(columns) / 2)
    return baby, columns // baby


def modular(values: Ints, t: int) -> Unsigned:
    """Return signed integers reduced modulo t."""
    return np.mod(values, t).astype(np.uint64)


def centered(values: Unsigned, t: int) -> Ints:
    """Return integers modulo t as signed integers around zero."""
    signed = values.astype(np.int64)
    return np.where(signed > t // 2, signed - t, signed)


class _BfvOwner(KeyOwner):
    def __init__(self, context: SealContext, backend: BfvBackend, sizes: list[ProductSize]) -> None:
        self.he, self.layout, seal = context, backend.layout, context.seal
        keys = seal.KeyGenerator(context.context)
        secret = keys.secret_key()
        self._encryptor = seal.Encryptor(context.context, secret)
        self._decryptor = seal.Decryptor(context.context, secret)
        elements = backend.elements(sizes)
        galois = context.save(keys.create_galois_keys(elements)) if elements else b""
        public = seal.PublicKey()
        keys.create_public_key(public)
        self.announcement = join([context.save(public), galois])

    def encrypt(self, statistics: Floats, size: ProductSize) -> bytes:
        values = modular(to_integers(statistics, FixedPointScale.of(size).statistics), self.he.t)
        return join([self._encrypted(slots) for slots in _spread(values, self.layout(size), self.he.degree)])

    def _encrypted(self, slots: Unsigned) -> bytes:
        # With the private key, half of the ciphertext is only a seed.
        return self.he.save(self._encryptor.encrypt_symmetric(self.he.encode(slots)))

    def decrypt(self, masked: bytes, size: ProductSize, constant: Floats) -> bytes:
        plan = self.layout(size)
        with self.he.computing("masked result"):
            slots = np.stack([self._decrypt(blob) for blob in split(masked, plan.outputs, "masked result")])
        added = modular(added_integers(constant, size), self.he.t)
        product = _collect(slots, plan, size, self.he.t)
        return ((product + added) % np.uint64(self.he.t)).astype("<u8").tobytes()

    def _decrypt(self, blob: bytes) -> Unsigned:
        plain = self.he.seal.Plaintext()
        self._decryptor.decrypt(self.he.ciphertext(blob, "masked result", self.he.last), plain)
        return self.he.decode(plain)


def _rotations(plan: BfvLayout) -> list[int]:
    """Return the numbers of slots by which ciphertexts are rotated."""
    if plan.way != "rotate":
        return []
    baby, giant = steps(plan.columns)
    return [step * plan.block for step in (*range(1, baby), *range(baby, baby * giant, baby))]


def _spread(values: Unsigned, plan: BfvLayout, degree: int) -> Unsigned:
    """Return the slots [inputs, degree] of the owner's ciphertexts, from S [inner, width]."""
    inner, width = values.shape
    if plan.way == "row":
        padded = np.zeros(plan.block, dtype=np.uint64)
        padded[:inner] = values[:, 0]
        return np.tile(padded, degree // plan.block)[None]
    lines = plan.columns if plan.way == "rotate" else degree // plan.block
    padded = np.zeros((plan.inputs * lines, plan.block), dtype=np.uint64)
    padded[:inner, :width] = values
    blocks = padded.reshape(plan.inputs, lines, plan.block)
    slots = np.tile(blocks, (1, degree // plan.block // lines, 1))
    if plan.way == "rotate":
        # its rotations wrap after `tail` columns, so these are repeated more often than whole blocks
        slots[-1] = np.tile(blocks[-1, : plan.tail], (degree // plan.block // plan.tail, 1))
    return slots.reshape(plan.inputs, degree)


def _collect(slots: Unsigned, plan: BfvLayout, size: ProductSize, t: int) -> Unsigned:
    """Return C S [rows, width] modulo t from the slots [outputs, degree] of masked ciphertexts, or of masks."""
    lines = slots.reshape(-1, plan.block)
    if plan.way == "rotate":
        return lines[: size.rows, : size.width]
    if plan.way == "row":
        return _sum(lines, 1, t)[: size.rows, None]
    return _sum(lines, 0, t)[None, : size.width]


def _sum(values: Unsigned, axis: int, t: int) -> Unsigned:
    """Return a sum modulo t, in two halves, so that up to 2^14 numbers below 2^50 do not overflow."""
    modulus, half = np.uint64(t), np.uint64(2**25)
    high = (values // half).sum(axis) % modulus
    for _ in range(5):  # times 2^25, five digits at a time
        high = high * np.uint64(32) % modulus
    total: Unsigned = (high + (values % half).sum(axis)) % modulus
    return total


class _BfvEvaluator(Evaluator):
    def __init__(
        self, context: SealContext, backend: BfvBackend, announcement: bytes, sizes: list[ProductSize]
    ) -> None:
        self.he, self.layout, seal = context, backend.layout, context.seal
        public, galois = split(announcement, 2, "public key")
        elements = backend.elements(sizes)
        with context.computing("public key"):
            key = context.received(seal.PublicKey(), public, "public key")
            keys = len(elements) * (len(PRIMES[backend.degree]) - 1)
            self._galois = context.received(seal.GaloisKeys(), galois, "public key", keys) if elements else None
            if key.data().size() != 2 or key.data().is_transparent():
                raise InvalidMessage("the public key must have two polynomials, and the second one must not be 0")
            # otherwise a missing key would only show when a product rotates, in the middle of a run
            if self._galois is not None:
                _check_rotations(self._galois, elements)
            elif galois:
                raise InvalidMessage("the public key holds keys for rotations, and no product needs one")
            self._encryptor = seal.Encryptor(context.context, key)

    # Prepared values: plaintexts for each output and each input, or their numbers if plaintexts would fill the memory.

    def prepare(self, coefficients: Floats, size: ProductSize) -> list[list[Any]]:
        values = to_integers(coefficients, FixedPointScale.of(size).coefficients)
        plan, he = self.layout(size), self.he
        if plan.way == "row":
            lines = _padded(values, plan.outputs * plan.samples, plan.block)
            return [[[he.ntt(he.encode(modular(slots, he.t)))]] for slots in lines.reshape(plan.outputs, -1)]
        if plan.way == "column":
            lines = _padded(values, 1, plan.inputs * he.degree // plan.block)
            return [[self._plains(numbers[:, None], plan) for numbers in lines.reshape(plan.inputs, -1)]]
        lines = _padded(values, plan.outputs * plan.samples, plan.inputs * plan.columns)
        later = plan.outputs * plan.inputs * plan.columns > EAGER
        cuts = range(plan.columns, plan.inputs * plan.columns, plan.columns)
        blocks = [
            np.split(rows[:, : (plan.inputs - 1) * plan.columns + plan.tail], cuts, axis=1)
            for rows in np.vsplit(lines, plan.outputs)
        ]
        numbers = [[_diagonals(block, steps(plan.columns)[0]) for block in row] for row in blocks]
        return numbers if later else [[self._plains(block, plan) for block in row] for row in numbers]

    def _plains(self, numbers: Ints, plan: BfvLayout) -> list[Any]:
        columns = np.repeat(modular(numbers, self.he.t), plan.block, axis=0).T  # one number for each block
        return [self.he.ntt(self.he.encode(slots)) for slots in columns]

    def multiply(self, encrypted: bytes, prepared: list[list[Any]], size: ProductSize) -> tuple[bytes, Unsigned]:
        with self.he.computing("statistics"):
            return self._multiply(encrypted, prepared, size)

    def _multiply(self, encrypted: bytes, prepared: list[list[Any]], size: ProductSize) -> tuple[bytes, Unsigned]:
        plan, he = self.layout(size), self.he
        baby = steps(plan.columns)[0]
        sums: list[dict[int, Any]] = [{} for _ in range(plan.outputs)]  # by giant step, in the transformed domain
        for index, blob in enumerate(split(encrypted, plan.inputs, "statistics")):
            count = min(baby, plan.tail if index == plan.inputs - 1 else plan.columns)
            rotated = self._rotated(he.ciphertext(blob, "statistics", he.top), count, plan.block)
            for total, row in zip(sums, prepared, strict=True):
                plains = row[index] if isinstance(row[index], list) else self._plains(row[index], plan)
                for number, plain in enumerate(plains):
                    self._add(total, number // baby, rotated[number % baby], plain)
        masks = uniform(plan.outputs * he.degree, he.t).reshape(plan.outputs, -1)
        stride = baby * plan.block
        blobs = [self._hide(total, stride, mask) for total, mask in zip(sums, masks, strict=True)]
        return join(blobs), _collect(masks, plan, size, he.t)

    def unmask(self, decrypted: bytes, mask: Unsigned, size: ProductSize) -> Floats:
        modulus = np.uint64(self.he.t)
        masked = np.frombuffer(decrypted, "<u8").reshape(size.rows, size.width)
        if np.any(masked >= modulus):
            raise InvalidMessage("the other party's decrypted result is not a number modulo t: the message is damaged")
        # the modulus is added first, as unsigned numbers have no negative differences
        return to_floats(centered((masked + modulus - mask) % modulus, self.he.t), size)

    def _rotated(self, ciphertext: Any, count: int, block: int) -> list[Any]:
        """Return the ciphertext rotated by 0, 1, ... blocks, ready for products."""
        rotations = [ciphertext]
        for step in range(1, count):
            rotations.append(self.he.seal.Ciphertext())
            self.he.evaluator.rotate_rows(ciphertext, step * block, self._galois, rotations[-1])
        for rotated in rotations:
            self.he.evaluator.transform_to_ntt_inplace(rotated)
        return rotations

    def _add(self, sums: dict[int, Any], step: int, ciphertext: Any, plain: Any) -> None:
        if plain.is_zero():  # SEAL refuses this product, whose result would be readable without a key
            return
        term = self.he.seal.Ciphertext()
        self.he.evaluator.multiply_plain(ciphertext, plain, term)
        if step in sums:
            self.he.evaluator.add_inplace(sums[step], term)
        else:
            sums[step] = term

    def _hide(self, sums: dict[int, Any], stride: int, mask: Unsigned) -> bytes:
        """Apply the giant steps and add a fresh encryption of the mask, at the smallest modulus."""
        he = self.he
        total = he.seal.Ciphertext()
        self._encryptor.encrypt_zero(he.second, total)  # at once at the level of the next operations
        he.evaluator.add_plain_inplace(total, he.encode(mask))
        for step, term in sums.items():
            he.evaluator.transform_from_ntt_inplace(term)
            he.evaluator.mod_switch_to_next_inplace(term)  # where the next operations are cheaper
            # the first giant step needs no rotation, and no key for one is sent
            if step:
                he.evaluator.rotate_rows_inplace(term, step * stride, self._galois)
            he.evaluator.add_inplace(total, term)
        he.evaluator.mod_switch_to_inplace(total, he.last)
        return he.save(total)


def _check_rotations(keys: Any, elements: list[int]) -> None:
    """Refuse keys without one of the rotations, or of another form."""
    if keys.size() != len(elements) or not all(keys.has_key(element) for element in elements):
        raise InvalidMessage(f"the public key must hold keys for the {len(elements)} rotations that products need")
    if any(part.data().size() != 2 for element in elements for part in keys.key(element)):
        raise InvalidMessage("each key for a rotation must have two polynomials")


def _padded(values: Ints, rows: int, columns: int) -> Ints:
    lines = np.zeros((rows, columns), dtype=np.int64)
    lines[: values.shape[0], : values.shape[1]] = values
    return lines


def _diagonals(block: Ints, baby: int) -> Ints:
    """Return the numbers [samples, columns] for the plaintexts of all steps, from C [samples, columns] of one output.

    Line r of giant step g and baby step h meets S[r + h] before it is rotated back by g: it is C[r - g, r + h].  A
    ciphertext has two rows of slots that rotate separately, so samples are counted in each half.
    """
    half, columns = len(block) // 2, block.shape[1]
    number, line = np.arange(columns), np.arange(half)[:, None]
    index, column = (line - number // baby * baby) % half, (line + number % baby) % columns
    return np.concatenate([block[index, column], block[half + index, column]])
