"""Did a run keep what offbeat promises? Proved from its history alone, by other code than the run itself.

* `verify` - all of a run, law by law
* `log_files` - which files belong to which job
* `replicas` - law 1: equal parameters
* `policy_replay` - laws 2 and 3: what a coordinator decided, held against its policy
* `invariants` - what became of each contribution, kept from events and actions alone: what policies are checked by
* `updates` - law 2: what shards made of that, over all lives of a server
* `exchanges` - laws 2 and 3 where there is no server: what workers gave, and what the means were made of
* `grants` - law 3 where a switch's table lets workers go on
* `replacements` - law 2: what was put in place of the parameters, all took over together
* `contributions` - what became of each, one by one
* `rejections` - how many of whose contributions a rule has rejected
* `compare_runs` - law 5: the same again, in two runs
* `findings` - what was found
"""

from offbeat.audit.compare_runs import compare
from offbeat.audit.contributions import ContributionFate
from offbeat.audit.findings import LAWS, AuditResult, Violation
from offbeat.audit.rejections import rejections
from offbeat.audit.verify import contributions, verify

__all__ = ["LAWS", "AuditResult", "ContributionFate", "Violation", "compare", "contributions", "rejections", "verify"]
