"""What is sent?

* `codec` - the noun: `Codec`, and `Exchange`, the generator it speaks through; `turn` - which exchange it is, and where
  a codec's random numbers come from; `promises` - what others may rely on; `one_round` - codecs that can be decoded by
  themselves
* `dense` - the gradient as it is
* `cast` - the gradient in 16 bits
* `qsgd` - few bits for each element, and a scale for each group of them
* `sign` - one bit for each element
* `fixed_point` - whole numbers that are added as such
* `topk` - the largest elements
* `random_k` - elements that are drawn
* `grbs` - blocks that are drawn, the same on all workers
* `powersgd` - matrices of low rank
* `error_reset` - whatever another codec sends of the worker's steps, and now and then what replicas have parted by
* `local_offset` - the noun of what leaves its leavings in the worker's own model, at a server: `carry` - and sends them
  later; `look_ahead` - and lets them go
* `error_feedback` - whatever another codec sends, and next time what it has not sent
* `wire_bytes` - the bytes on each link, of whatever a codec sends
"""

from offbeat.codec.carry import Carry
from offbeat.codec.cast import Cast
from offbeat.codec.codec import Codec, Exchange, Exchanged, Rescales, State
from offbeat.codec.dense import Dense
from offbeat.codec.error_feedback import ErrorFeedback, innermost
from offbeat.codec.error_reset import FULL, ErrorReset, PartialSync
from offbeat.codec.fixed_point import FixedPoint
from offbeat.codec.grbs import GRBS
from offbeat.codec.local_offset import LocalOffset
from offbeat.codec.look_ahead import LookAhead
from offbeat.codec.one_round import OneRoundCodec
from offbeat.codec.powersgd import PowerSGD
from offbeat.codec.promises import Promises
from offbeat.codec.qsgd import QSGD
from offbeat.codec.random_k import RandomK
from offbeat.codec.sign import Sign
from offbeat.codec.topk import TopK
from offbeat.codec.turn import Purpose, Turn

__all__ = [
    "FULL",
    "GRBS",
    "QSGD",
    "Carry",
    "Cast",
    "Codec",
    "Dense",
    "ErrorFeedback",
    "ErrorReset",
    "Exchange",
    "Exchanged",
    "FixedPoint",
    "LocalOffset",
    "LookAhead",
    "OneRoundCodec",
    "PartialSync",
    "PowerSGD",
    "Promises",
    "Purpose",
    "RandomK",
    "Rescales",
    "Sign",
    "State",
    "TopK",
    "Turn",
    "innermost",
]
