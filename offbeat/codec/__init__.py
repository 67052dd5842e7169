"""What is sent?

* `codec` - the noun: `Codec`, and `Exchange`, the generator it speaks through
* `dense` - the gradient as it is
* `cast` - the gradient in 16 bits
* `error_feedback` - whatever another codec sends, and next time what it has not sent
"""

from offbeat.codec.cast import Cast
from offbeat.codec.codec import Codec, Exchange, Exchanged, Rescales, State
from offbeat.codec.dense import Dense
from offbeat.codec.error_feedback import ErrorFeedback, innermost

__all__ = ["Cast", "Codec", "Dense", "ErrorFeedback", "Exchange", "Exchanged", "Rescales", "State", "innermost"]
