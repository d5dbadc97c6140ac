"""The checksum of pieces, against hashlib on the whole."""

from __future__ import annotations

import hashlib
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from areno_fn.ckpt.digest import Digest


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=5000), max_size=6))
def test_it_is_the_sum_of_the_pieces_in_their_order(pieces: list[bytes]) -> None:
    with Digest() as digest:
        for number, piece in enumerate(pieces):
            digest.update(memoryview(piece) if number % 2 else piece)
        assert digest.hexdigest() == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checksum")]


def test_it_may_be_asked_between_two_pieces() -> None:
    with Digest() as digest:
        digest.update(b"a")
        assert digest.hexdigest() == hashlib.sha256(b"a").hexdigest()
        digest.update(b"b")
        assert digest.hexdigest() == hashlib.sha256(b"ab").hexdigest()
