"""GGUF, the files of llama.cpp: read as a Hugging Face folder, and written from one.

`container` is the format. `families` says how tensors and options are called on both sides, `options` makes a
config.json of metadata and back; `tokenizer_files`, `tokenizer_metadata` and `vocabulary` do the same for tokenizers.
`reading` and `writing` put them together. The quantised blocks themselves are those of the library `gguf`.
"""

from .reading import opened, quantised, small_files, summary, unpack
from .writing import KINDS, write

__all__ = ["KINDS", "opened", "quantised", "small_files", "summary", "unpack", "write"]
