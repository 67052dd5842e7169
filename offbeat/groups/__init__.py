"""One model for each group of a table: learning over groups (Kingpin), batched on one machine.

After "Towards an Optimized GROUP BY Abstraction for Large-Scale Machine Learning" (Li and Kumar, PVLDB 14(11), 2021).

* input: `table_input` - tables that are read in batches; `group_index` - keys, sorted, and their rows; `buckets` -
  files of groups of similar sizes, the unit of tasks
* models: `glm` - the specs `Linear`, `Logistic` and `Poisson`; `families` - their losses; `newton` - many of them
  solved at once; `summed_newton` - one whose rows are in several places; `mixing` - random numbers that are functions
  of keys
* hyper-parameters: `search` - values to try, and the rows by which one is chosen; `search_methods` - which are tried,
  and how long; `overrides` - those of single groups
* nets: `net` - the spec `Net`; `stacked_module` - many models of a torch module; `net_training` - their training in
  lockstep, `net_rungs` - and of which some stop early; `optimizers` - `SGD`, `Adam` and `AdamW`
* other libraries: `estimator` - the spec `Estimator`, anything of scikit-learn; `linear_estimators` - which of them
  Newton solves; `sklearn` - `GroupedClassifier` and `GroupedRegressor`, estimators with a model for each group;
  `split_rows` - their X; `shrinkage` - the averages of a group and those around it; `trees` - the
  spec `Trees`, LightGBM
* trees of split groups: `feature_bins` - the bins that several places agree on; `tree_growing` - boosting by sums over
  bins; `tree_text` - the trees as LightGBM writes them
* a fit: `trainer` - from a table to models; `group_job` - of one bucket, with the choice of a configuration;
  `fitting` - what a spec makes of its rows; `records` - arrays of all groups; `fitted` - tables of models, and
  predictions; `parents` - models of the groups around a group; `saved` - a file of them
* forecasts: `cost` - how a fit will go, and how long it takes
* where: `this_process`; `processes` - of this machine; `fit_folder` - what an ended fit has left;
  `fit_description` - by which fits are compared
* several workers: `ranks` - those of a job; `job_meeting` - where they meet; `shared_fit` - the part of each;
  `partition` - who has which rows of which group; `row_exchange` - rows on their way there; `carrier` - what travels
  between workers; `table_messages` - tables that do
* split groups: `summing` - fits whose rows are in several places, `split_sums` - over a carrier; `hopping` - models
  that visit shards, `split_hops` - over a carrier; `unit_scheduler` - the order of visits in an epoch
"""

try:
    import pyarrow  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("Cannot learn over groups: pyarrow is missing. `pip install 'offbeat[groups]'`.") from error

from offbeat.groups.cost import FitForecast
from offbeat.groups.estimator import Estimator
from offbeat.groups.fitted import FittedGroups
from offbeat.groups.glm import Linear, Logistic, Poisson
from offbeat.groups.group_job import Small
from offbeat.groups.net import Net
from offbeat.groups.optimizers import SGD, Adam, AdamW
from offbeat.groups.processes import Processes
from offbeat.groups.ranks import Ranks
from offbeat.groups.search import Grid, HoldOut, LogUniform, Uniform
from offbeat.groups.search_methods import GridSearch, Halving, Pooled, RandomSearch
from offbeat.groups.table_input import GroupDataError
from offbeat.groups.this_process import ThisProcess
from offbeat.groups.trainer import GroupedTrainer
from offbeat.groups.trees import Trees

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Estimator",
    "FitForecast",
    "FittedGroups",
    "Grid",
    "GridSearch",
    "GroupDataError",
    "GroupedTrainer",
    "Halving",
    "HoldOut",
    "Linear",
    "LogUniform",
    "Logistic",
    "Net",
    "Poisson",
    "Pooled",
    "Processes",
    "RandomSearch",
    "Ranks",
    "Small",
    "ThisProcess",
    "Trees",
    "Uniform",
]
