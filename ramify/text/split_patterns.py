"""Regular expressions that split text before it is tokenized, as the families' own tokenizers have them.

They are known to take linear time in the backend, which backtracks: what one alternative looks at in vain the next one
takes whole, or no more than three characters are looked at.
"""

from __future__ import annotations

_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}" + _SYMBOLS_AND_SPACES
QWEN2 = _CONTRACTIONS_AND_WORDS + r"\p{N}" + _SYMBOLS_AND_SPACES

LINEAR_PATTERNS = frozenset({GPT2, LLAMA3, QWEN2, r"\p{N}{1,3}", r"\p{N}", r"[\r\n]"})
