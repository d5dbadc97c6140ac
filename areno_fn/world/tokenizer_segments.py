"""`encode_segments`: a text cut into pieces, each piece with its own tokens.

A response must not change the tokens of its prompt: while sampling, the model sees the prompt's tokens as they
are without any response. So each piece is what its tokens add to those of the pieces before it. Where a token
would reach over a cut, the piece after the cut is tokenised alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from areno_fn.contracts.errors import DataError
from areno_fn.world.tokenizer import Tokenizer


def encode_segments(tokenizer: Tokenizer, segments: Sequence[str], where: str) -> list[list[int]]:
    """The tokens of each segment; the first segment's are those of the segment on its own.

    Args:
        segments: pieces of one text, in order.
        where: the row, for messages.

    Raises:
        DataError: the tokens of the pieces do not read like the text, because the tokenizer adds or drops
            characters (a leading space, for example) where a text begins.
    """
    pieces: list[list[int]] = []
    ids: list[int] = []
    text = ""
    whole: list[int] = []
    for segment in segments:
        text += segment
        whole = tokenizer.encode(text)
        piece = whole[len(ids) :] if whole[: len(ids)] == ids else tokenizer.encode(segment)
        pieces.append(piece)
        ids = ids + piece
    if ids != whole and tokenizer.decode(ids) != tokenizer.decode(whole):
        raise DataError(
            f"{where}: a token reaches from the prompt into the response, and this tokenizer cannot cut it without "
            "changing the text; end the prompt where a word ends, and begin the response with the space"
        )
    return pieces
