"""Prompts and completions in the words of another tokenizer than the one that they were drawn with."""

from __future__ import annotations

from areno_fn.contracts.errors import DataError
from areno_fn.world import data_schema
from areno_fn.world.chat import ends
from areno_fn.world.data_row import Row
from areno_fn.world.examples import begun, turns_for
from areno_fn.world.tokenizer import Tokenizer


def encode_judged(row: Row, completion: str, finished: bool, tokenizer: Tokenizer) -> list[int]:
    """The tokens by which a reward model of this tokenizer judges a completion.

    Where the prompt is a conversation for this tokenizer, they are those of its chat template: of the conversation with
    the completion as the assistant's turn, or, where the completion was cut off, of the opening and what there is of the
    turn. Any other prompt and its completion are one text, behind the BOS where the tokenizer starts with one; a finished
    one ends with the end token, once.

    Raises:
        DataError: the template refuses the messages.
    """
    prompt = data_schema.prompt(row)
    turns = turns_for(prompt, tokenizer)
    if turns is None:
        ids = begun(tokenizer.encode(f"{prompt.text or ''}{completion}"), tokenizer)
        return [*ids, *tokenizer.eos_ids[:1]] if finished and not ends(ids[-1:], tokenizer) else ids
    try:
        if finished:
            return tokenizer.encode(tokenizer.render([*turns, {"role": "assistant", "content": completion}], False))
        return tokenizer.encode(f"{tokenizer.render(turns, True)}{completion}")
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
