"""Random keys are the same on every machine, and depend on their words only."""

from __future__ import annotations

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piebald.core.randomness import brief_generator, generator, key, permutation, torch_generator
from tests.fakes import few

words = st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=8)), max_size=4)


def by_hand(*given_words: int | str) -> int:
    """BLAKE2b over tagged words: "s", length (4 bytes), UTF-8 text; or "i", the number in 8 bytes two's complement."""
    message = b""
    for word in given_words:
        if isinstance(word, str):
            text = word.encode("utf-8")
            message += b"s" + len(text).to_bytes(4, "little") + text
        else:
            message += b"i" + word.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")


@few
@given(words)
def test_a_key_is_a_plain_hash_of_its_words(drawn: list[int | str]) -> None:
    assert key(*drawn) == by_hand(*drawn)
    assert 0 <= key(*drawn) < 2**64


@pytest.mark.full
@few
@given(st.lists(st.tuples(words, st.integers(0, 60)), min_size=1, max_size=4))
def test_a_permutation_is_the_first_draw_of_its_words_whatever_was_drawn_before(draws: list[tuple[Any, int]]) -> None:
    for drawn, count in draws:
        assert permutation(count, *drawn).tolist() == generator(*drawn).permutation(count).tolist()


@few
@given(st.lists(st.tuples(words, st.lists(st.integers(1, 40), max_size=3)), min_size=1, max_size=4))
def test_a_brief_generator_draws_as_one_of_its_own_whatever_was_left_of_earlier_draws(
    draws: list[tuple[Any, Any]],
) -> None:
    for drawn, counts in draws:
        brief, own = brief_generator(*drawn), generator(*drawn)
        for count in counts:  # an odd number of 32-bit draws leaves half of a 64-bit one
            assert (
                brief.integers(2**31, size=count, dtype="int32").tolist()
                == own.integers(2**31, size=count, dtype="int32").tolist()
            )
            assert brief.choice(count, 1, replace=False).tolist() == own.choice(count, 1, replace=False).tolist()


def test_threads_do_not_share_a_generator() -> None:
    def many(client: int) -> list[list[int]]:
        return [permutation(40, "order", client, step).tolist() for step in range(200)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(many, range(8))) == [
            [generator("order", client, step).permutation(40).tolist() for step in range(200)] for client in range(8)
        ]


def test_the_hash_is_the_published_blake2b() -> None:
    """RFC 7693, appendix A: so the keys of an old run on another machine are the same."""
    assert hashlib.blake2b(b"abc").hexdigest().startswith("ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b7")


def test_many_words_do_not_collide() -> None:
    keys = [key("order", seed, client, version) for seed, client, version in itertools.product(*[range(30)] * 3)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("one", "two"),
    [((1,), ("1",)), (("ab", "c"), ("a", "bc")), ((1, 2), (2, 1)), (("a", ""), ("a",)), ((), (0,)), ((0,), ("",))],
)
def test_words_that_look_alike_differ(one: tuple[int | str, ...], two: tuple[int | str, ...]) -> None:
    assert key(*one) != key(*two)


def test_numpy_integers_are_integers() -> None:
    assert key(np.int64(5), np.int32(-3)) == key(5, -3)


def test_draws_depend_on_their_words_only() -> None:
    first = generator("order", 1, 2).permutation(50)
    generator("order", 1, 3).permutation(50)
    np.random.default_rng(0).permutation(50)
    assert np.array_equal(generator("order", 1, 2).permutation(50), first)
    assert not np.array_equal(generator("order", 1, 3).permutation(50), first)
    noise = torch.randn(9, generator=torch_generator("stage", 4))
    torch.manual_seed(3)
    assert torch.equal(torch.randn(9, generator=torch_generator("stage", 4)), noise)
    assert not torch.equal(torch.randn(9, generator=torch_generator("stage", 5)), noise)
