"""Types of fields, with their bounds: nothing that comes from the network is taken without."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Model = Annotated[int, msgspec.Meta(ge=0, lt=256)]
Samples = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]  # neither NaN nor infinite, as are seconds
Factor = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]  # of a vector; neither NaN nor infinite
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
SECRET_BYTES = 16
Secret = Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES)]  # by which a process is known again; empty for none
Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
Dtype = Annotated[str, msgspec.Meta(max_length=16)]
