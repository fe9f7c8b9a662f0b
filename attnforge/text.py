"""Conversion between text and token ids with a bundle's tokenizer, and the inputs that texts become."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import TOKENIZER, Bundle, TensorSpec
from attnforge.errors import BundleError, InputError, UsageError, extra, raised_as, shortened

UNFINISHED = "\ufffd"
"""Decoded text of a character whose bytes are incomplete."""

IDS, MASK, TYPES = INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Names of the inputs that texts become."""


def read_texts(file: Path) -> list[str]:
    """Return the lines of a text file that are not empty.

    Raises:
        InputError: the file cannot be read as UTF-8, or has no text.
    """
    with raised_as(InputError, f"{file} cannot be read as UTF-8 text"):
        texts = [line for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    if not texts:
        raise InputError(f"{file} has no text; give one on each line")
    return texts


def check_no_input(name: str, value: Any, names: Collection[str]) -> None:
    """Check that an array whose name is not that of an input can be left out: token types that are all 0, as tokenizers
    give them and models without that input assume.

    Raises:
        InputError: it cannot; says which inputs the model has.
    """
    hint = ""
    if name == TYPES and IDS in names:
        if not (value.any() if hasattr(value, "any") else np.any(np.asarray(value, object))):
            return
        hint = f", and takes all token types for 0; deploy it with -o inputs={','.join((*names, TYPES))} to give others"
    raise InputError(f"the model has no input {shortened(name)!r}; it takes {', '.join(names)}{hint}")


class Tokenizer:
    """The tokenizer of a bundle that was deployed with one, or of a file. Any number of threads may use it at once.

    Args:
        source: the bundle, or a `tokenizer.json` of the `tokenizers` library.

    Raises:
        UsageError: the bundle has no tokenizer.
        UnavailableError: the `tokenizers` library is not installed.
        BundleError: the file is not one of that library's.
    """

    def __init__(self, source: Bundle | str | os.PathLike[str]) -> None:
        file, read = (source.path / TOKENIZER, source.read) if isinstance(source, Bundle) else (Path(source), None)
        if isinstance(source, Bundle) and TOKENIZER not in source.manifest.files:
            raise UsageError(
                f"{source.path} has no tokenizer; give token ids (--ids), or deploy with a tokenizer.json (--tokenizer)"
            )
        library = extra("tokenizers", "hf").Tokenizer
        with raised_as(BundleError, f"{file} is not a tokenizer"):
            self._library: Any = library.from_str((file.read_bytes() if read is None else read(TOKENIZER)).decode())
        self._padding = (self._library.padding or {}).get("pad_id", 0)
        self._library.no_padding()
        self._library.no_truncation()  # and no change after that, since threads share it
        self._truncating = functools.lru_cache(1)(functools.partial(_truncating, self._library))

    def ids(self, text: str) -> list[int]:
        """Encode a text to token ids."""
        return list(self._library.encode(text).ids)

    def inputs(self, texts: Sequence[str], specs: Sequence[TensorSpec]) -> dict[str, Array]:
        """Encode texts to a model's inputs: ids, padded to the longest text, and a mask and token types if the model
        takes them. Texts are truncated to the tokens that the model takes.

        Args:
            texts: the texts, one per sample.
            specs: the model's inputs.

        Raises:
            InputError: the model takes other inputs, or these are not texts.
        """
        texts = list(texts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InputError(f"one or more texts are needed, not {shortened(repr(texts), 40)}; give a list of strings")
        named = {spec.name: spec for spec in specs}
        if IDS not in named or not named.keys() <= set(INPUTS):
            raise InputError(f"texts become {', '.join(INPUTS)}; the model takes {', '.join(named)}: give arrays")
        least, most = named[IDS].range_of(1)
        encoded = self._truncating(most).encode_batch(texts)
        length = max(least, *(len(text.ids) for text in encoded))
        for text in encoded:
            text.pad(length, pad_id=self._padding)
        rows = {IDS: [text.ids for text in encoded], MASK: [text.attention_mask for text in encoded],
                TYPES: [text.type_ids for text in encoded]}  # fmt: skip
        return {name: np.array(rows[name], spec.dtype) for name, spec in named.items()}

    def batches(self, texts: Sequence[str], specs: Sequence[TensorSpec]) -> list[dict[str, Array]]:
        """Encode any number of texts to batches of a model's inputs, as few and as equal as the model takes; one text
        each for a model without a mask, which would take padding for text. Too few texts are repeated."""
        each_alone = all(spec.name != MASK for spec in specs)
        return [self.inputs(batch, specs) for batch in specs[0].in_batches(texts, smallest=each_alone)]

    def text(self, ids: list[int]) -> str:
        """Decode token ids to text."""
        return str(self._library.decode(ids))

    def stream(self, prompt: list[int], following: Iterable[int]) -> Iterator[str]:
        """Decode new tokens incrementally and yield the text that each adds. A character that spans several tokens is
        yielded when it is complete. Only the tokens of the previous piece are decoded again, as context: they decide
        about spaces between tokens.

        Args:
            prompt: token ids of the prompt.
            following: new token ids, as they are generated.
        """
        last, new = list(prompt), list[int]()
        shown = text = self.text(last).rstrip(UNFINISHED)
        for token in following:
            new.append(token)
            text = self.text([*last, *new])
            if text.startswith(shown) and text != shown and not text.endswith(UNFINISHED):
                yield text[len(shown) :]
                last, new = new, []
                shown = text = self.text(last)
        if text.startswith(shown) and text != shown:
            yield text[len(shown) :]


def _truncating(library: Any, tokens: int) -> Any:
    """A copy of a tokenizer that truncates texts."""
    library = copy.deepcopy(library)
    library.enable_truncation(tokens)
    return library
