"""What is sent?

* `codec` - the noun: `Codec`, and `Exchange`, the generator it speaks through
* `dense` - the gradient as it is
* `cast` - the gradient in 16 bits
"""

from offbeat.codec.cast import Cast
from offbeat.codec.codec import Codec, Exchange, Exchanged, Rescales, State
from offbeat.codec.dense import Dense

__all__ = ["Cast", "Codec", "Dense", "Exchange", "Exchanged", "Rescales", "State"]
