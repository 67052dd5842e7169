"""Runs a plan for real: gradients out of autograd, through codec and fabric, back into `.grad`.

* `reducer` - hooks on the parameters, buckets issued in order during backward, the fence at its end
* `flat` - one bucket's memory: the gradients are views into it
* `sparse` - gradients that are no dense tensors
* `buffers` - BatchNorm statistics and other buffers, kept equal
* `waiting` - the one primitive for every blocking wait, and the report when it takes too long
* `agreement` - what the workers must have in common before the first step
* `meter` - one record per step, written by a background thread
"""

from offbeat.engine.agreement import agree_on, gather_texts
from offbeat.engine.buffers import Buffers
from offbeat.engine.meter import Meter, MetricsFile
from offbeat.engine.reducer import Reducer
from offbeat.engine.waiting import Awaited, Waiter

__all__ = ["Awaited", "Buffers", "Meter", "MetricsFile", "Reducer", "Waiter", "agree_on", "gather_texts"]
