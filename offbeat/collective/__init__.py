"""Along which paths?

* `algorithm` - the noun: `Algorithm`, a collective as data, with its proof
* `trees` - algorithms from spanning trees
* `paths` - a network, as methods see it
* `ring` - one after the other
* `multitree` - a tree per root, all at once
"""

from offbeat.collective.algorithm import Algorithm, Chunk, Op
from offbeat.collective.multitree import MultiTree
from offbeat.collective.ring import Ring

__all__ = ["Algorithm", "Chunk", "MultiTree", "Op", "Ring"]
