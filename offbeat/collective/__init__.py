"""Along which paths?

* `algorithm` - the noun: `Algorithm`, a collective as data, with its proof
* `trees` - algorithms from spanning trees
* `paths` - a network, as methods see it
* `cost_model` - how long an algorithm takes on it
* `bounds` - how long any would take at least
* `ring` - one after the other
* `water_filling` - parts as large as the link of who sums them up
* `multitree` - a tree per root, all at once
"""

from offbeat.collective.algorithm import Algorithm, Chunk, Op
from offbeat.collective.bounds import Bounds, bound
from offbeat.collective.cost_model import cost
from offbeat.collective.multitree import MultiTree
from offbeat.collective.ring import Ring
from offbeat.collective.water_filling import WaterFilling

__all__ = ["Algorithm", "Bounds", "Chunk", "MultiTree", "Op", "Ring", "WaterFilling", "bound", "cost"]
