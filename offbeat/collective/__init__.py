"""Along which paths?

* `algorithm` - the noun: `Algorithm`, a collective as data, with its proof
* `rank_part` - what one rank does
* `trees` - algorithms from spanning trees
* `ring` - one after the other
* `water_filling` - direct shards as large as links have room for
"""

from offbeat.collective.algorithm import Algorithm, Chunk, CollectiveMethod, Op
from offbeat.collective.ring import Ring
from offbeat.collective.water_filling import WaterFilling

__all__ = ["Algorithm", "Chunk", "CollectiveMethod", "Op", "Ring", "WaterFilling"]
