"""Along which paths?

* `algorithm` - the noun: `Algorithm`, a collective as data, with its proof
* `rank_part` - what one rank does, as chunks grow; `rounds` - in batches of whole chunks
* `trees` - algorithms from spanning trees
* `paths` - a network, as methods see it; `tour` - the shortest way through all ranks; `rarest_first` - a swarm
* `cost_model` - how long an algorithm takes; `bounds` - how long any takes at least; `slots` - the check of time slots
* `number_check` - what a method may be made with
* `show`, `draw` - an algorithm as text, and as pictures; `schedule_table` - as a rank's network interface holds it

For one switch, or where links do not matter:

* `ring` - one after the other, one way round or both; `ring_2d` - along rows and columns
* `halving_doubling` - pairs, for large vectors; `hdrm` - on a BiGraph
* `double_binary_tree` - two trees, for middling ones
* `recursive_doubling`, `flat_tree` - for small ones
* `water_filling` - parts as large as the link of who sums them up

For any network:

* `multitree` - a tree per root, all at once, for equal links
* `greedy` - trees over unequal links
* `pipelined_trees` - sums go up while results go down
* `programs` - broadcast, reduce and the other collectives
"""

from offbeat.collective.algorithm import Algorithm, Chunk, CollectiveMethod, Op
from offbeat.collective.bounds import Bounds, bound
from offbeat.collective.cost_model import cost
from offbeat.collective.double_binary_tree import DoubleBinaryTree
from offbeat.collective.flat_tree import FlatTree
from offbeat.collective.greedy import Greedy
from offbeat.collective.halving_doubling import HalvingDoubling
from offbeat.collective.hdrm import HDRM
from offbeat.collective.multitree import MultiTree
from offbeat.collective.pipelined_trees import PipelinedTrees
from offbeat.collective.recursive_doubling import RecursiveDoubling
from offbeat.collective.ring import BidirectionalRing, Ring
from offbeat.collective.ring_2d import Ring2D
from offbeat.collective.slots import check_slots
from offbeat.collective.water_filling import WaterFilling

__all__ = [
    "HDRM",
    "Algorithm",
    "BidirectionalRing",
    "Bounds",
    "Chunk",
    "CollectiveMethod",
    "DoubleBinaryTree",
    "FlatTree",
    "Greedy",
    "HalvingDoubling",
    "MultiTree",
    "Op",
    "PipelinedTrees",
    "RecursiveDoubling",
    "Ring",
    "Ring2D",
    "WaterFilling",
    "bound",
    "check_slots",
    "cost",
]
