"""Whom to believe?

* `rule` - the noun: `Rule`, and what rules have in common; `resilient_rule` - those that are told how many may lie
* `mean` - all alike
* `clipped_mean` - none longer than most
* `median`, `trimmed_mean`, `phocas`, `meamed` - each coordinate by itself
* `krum` - those with the most others near them: `Krum`, `MultiKrum`; `bulyan` - the same, and then each coordinate
* `geometric_median` - the least sum of distances
* `centred_clipping` - near what was agreed before
* `faba` - without the farthest
* `reference_rule` - those that go by a reference on trusted samples: `fltrust` - in its direction
* `loss_rule` - those that go by the loss on trusted samples: `zeno`
* `zeno_plus_plus` - by the angle to a reference, one at a time;
  `zeno_ps` - updates of several steps beside a validator's own
* `kardam` - one at a time, by how fast they change
"""

from offbeat.robust.bulyan import Bulyan
from offbeat.robust.centred_clipping import CentredClipping
from offbeat.robust.clipped_mean import ClippedMean
from offbeat.robust.faba import FABA
from offbeat.robust.fltrust import FLTrust
from offbeat.robust.geometric_median import GeometricMedian
from offbeat.robust.kardam import Kardam, KardamState
from offbeat.robust.krum import Krum, MultiKrum
from offbeat.robust.loss_rule import LossRule
from offbeat.robust.meamed import MeaMed
from offbeat.robust.mean import Mean
from offbeat.robust.median import Median
from offbeat.robust.phocas import Phocas
from offbeat.robust.reference_rule import ReferenceRule
from offbeat.robust.rule import Rule, TooFew, add_scaled, gram_of
from offbeat.robust.trimmed_mean import TrimmedMean
from offbeat.robust.zeno import Zeno
from offbeat.robust.zeno_plus_plus import ZenoPlusPlus
from offbeat.robust.zeno_ps import ZenoPS, ZenoPSAsync

__all__ = [
    "FABA",
    "Bulyan",
    "CentredClipping",
    "ClippedMean",
    "FLTrust",
    "GeometricMedian",
    "Kardam",
    "KardamState",
    "Krum",
    "LossRule",
    "MeaMed",
    "Mean",
    "Median",
    "MultiKrum",
    "Phocas",
    "ReferenceRule",
    "Rule",
    "TooFew",
    "TrimmedMean",
    "Zeno",
    "ZenoPS",
    "ZenoPSAsync",
    "ZenoPlusPlus",
    "add_scaled",
    "gram_of",
]
