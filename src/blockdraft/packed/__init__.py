"""Linear layers whose weights are stored in the form that this CPU multiplies fastest.

``linear``: the same numbers in oneDNN's layout. ``int8``: whole numbers of 8 bits, another model by a little. They
know torch only: nothing about drafts, targets or files.
"""

from __future__ import annotations

from blockdraft.packed.int8 import Int8Linear, can_multiply_int8
from blockdraft.packed.linear import PackedLinear, Separately, can_pack, pack_linears_

__all__ = ["Int8Linear", "PackedLinear", "Separately", "can_multiply_int8", "can_pack", "pack_linears_"]
