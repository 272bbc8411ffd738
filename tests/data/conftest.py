"""The byte-level tokenizers and sizes that the tests of data share."""

from byte_tokenizers import chatml, llama3, spec, tokenizer_with  # noqa: F401  fixtures
