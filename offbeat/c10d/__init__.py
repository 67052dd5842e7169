"""Who else can sum along planned paths? Whoever uses torch.distributed: `init_process_group("offbeat")`.

* `process_group` - a process group of torch: sums along paths (`offbeat.fabric.path_collectives`), the rest by Gloo
* `members` - who makes it, before there is one, and why one of them stands still
* `calls` - who has called what, and who has not; the reason why a call does not come to its end

`offbeat_torch`, beside this package, makes the name known when torch is imported.
"""

from offbeat.c10d.process_group import OffbeatGroup, make_group

__all__ = ["OffbeatGroup", "make_group"]
