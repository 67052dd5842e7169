"""Tests of nets of groups: trained together, each is what a loop of torch makes of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from offbeat.groups import SGD, Adam, AdamW, Grid, GroupDataError, GroupedTrainer, Net, Small
from offbeat.groups.fitting import BucketTask, GroupStatus
from offbeat.groups.mixing import mixed
from offbeat.groups.search import configs, searched
from offbeat.groups.stacked_module import StackedModule
from tests.groups.test_trainer import sales

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that share the kernels of such small nets are many times slower where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mlp(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 1))


def mlp_with_norm(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Branching(nn.Module):
    """A module with a branch on its data, in which nothing depends on the branch."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.body = mlp(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(x if x.sum() > 0 else x + 0)
        return made


def task_of(sizes: list[int], features: int = 4, kind: str = "squared", seed: int = 0) -> BucketTask:
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(sum(sizes), features))
    y = np.sin(x[:, 0]) + x[:, 1]
    if kind != "squared":
        y = (y > 0).astype(np.float64) if kind == "log" else chance.poisson(np.exp(y / 2)).astype(np.float64)
    return BucketTask(x, y, np.cumsum([0, *sizes]), mixed(np.arange(len(sizes)), 7))


def torch_loss(kind: str, margins: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if kind == "squared":
        return nn.functional.mse_loss(margins, target) / 2
    if kind == "log":
        return nn.functional.binary_cross_entropy_with_logits(margins, target)
    return nn.functional.poisson_nll_loss(margins, target)


def by_loop(task: BucketTask, group: int, net: Any) -> np.ndarray:
    """The weights that torch's own modules and optimizers end with, on the batches that are documented."""
    features, target = torch.from_numpy(task.features).float(), torch.from_numpy(task.target).float()
    text = repr((net.optimizer, net.loss, net.batch, net.epochs, net.seed))
    seed = mixed(task.hashes[[group]], xxh3_64_intdigest(text.encode()))
    begin, end = task.offsets[group : group + 2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(net.seed)
        module = net.make(task.features.shape[1])
    trained = [value for value in module.parameters() if value.requires_grad]
    initial = StackedModule(net.make, task.features.shape[1], net.seed).initial(seed)[0]
    nn.utils.vector_to_parameters(initial, trained)
    settings = {name: value for name, value in vars(net.optimizer).items() if name != "lr"}
    optimizer = getattr(torch.optim, type(net.optimizer).__name__)(trained, lr=net.optimizer.lr, **settings)
    for epoch in range(net.epochs):
        order = begin + np.argsort(mixed(seed, 1 + epoch, np.arange(end - begin)))
        for at in range(0, len(order), net.batch):
            rows = torch.from_numpy(order[at : at + net.batch])
            optimizer.zero_grad()
            torch_loss(net.loss, module(features[rows])[:, 0], target[rows]).backward()
            optimizer.step()
    frozen = [value for value in module.parameters() if not value.requires_grad and value.numel() > 1]
    return nn.utils.parameters_to_vector([*trained, *frozen]).detach().numpy()


@pytest.mark.parametrize("loss", ["squared", "log", "poisson"])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.05, momentum=0.9), Adam(lr=0.01), AdamW(lr=0.01)], ids=repr)
def test_models_are_those_of_a_loop(loss: str, optimizer: Any) -> None:
    task = task_of([40, 64, 7, 33, 90], kind=loss)
    net = Net(mlp, optimizer, loss, batch=16, epochs=3)
    found = net.fit(task, [net])
    assert found.steps[:, 0].tolist() == [9, 12, 3, 9, 18], "a batch never crosses groups"
    for group in range(5):
        np.testing.assert_allclose(found.coefficients[group, 0], by_loop(task, group, net), rtol=1e-6, atol=1e-6)


def test_all_configurations_train_together_and_as_alone() -> None:
    task = task_of([40, 25, 64])
    search = Net(mlp, AdamW(lr=Grid(1e-2, 1e-3), weight_decay=Grid(0.0, 0.1)), batch=Grid(8, 16), epochs=Grid(1, 4))
    assert searched(search) == {
        "optimizer.lr": Grid(1e-2, 1e-3),
        "optimizer.weight_decay": Grid(0.0, 0.1),
        "batch": Grid(8, 16),
        "epochs": Grid(1, 4),
    }
    each = configs(search)
    assert (len(each), each[1]) == (16, Net(mlp, AdamW(lr=1e-2, weight_decay=0.0), batch=8, epochs=4))
    found = search.fit(task, each)
    for at, config in enumerate(each):
        np.testing.assert_allclose(found.coefficients[1, at], by_loop(task, 1, config), rtol=1e-6, atol=1e-6)


def test_a_group_alone_has_the_same_model() -> None:
    task = task_of([40, 64, 7, 33, 90])
    net = Net(mlp, AdamW(lr=0.01), batch=16, epochs=3)
    among = net.fit(task, [net]).coefficients
    for group in range(5):
        alone = net.fit(task.groups(np.array([group])), [net]).coefficients
        np.testing.assert_allclose(alone[0], among[group], rtol=1e-6, atol=1e-6)


def test_parts_of_a_byte_budget_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of([40, 64, 7, 33, 90])
    net = Net(mlp, AdamW(lr=0.01), batch=16, epochs=3)
    together = net.fit(task, [net]).coefficients
    shapes = []
    initial = StackedModule.initial

    def counted(self: StackedModule, seeds: np.ndarray) -> torch.Tensor:
        shapes.append(len(seeds))
        return initial(self, seeds)

    monkeypatch.setattr(StackedModule, "initial", counted)
    monkeypatch.setattr("offbeat.groups.net_training._MOST_BYTES", 12_000)
    np.testing.assert_allclose(net.fit(task, [net]).coefficients, together, rtol=1e-6, atol=1e-6)
    assert len(shapes[1:]) > 1, "the first one is the trial's"
    assert sum(shapes[1:]) == 5


def test_groups_of_very_unequal_sizes_are_not_padded_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(*keys: Any) -> np.ndarray:
        made = mixed(*keys)
        sizes.append(made.size)
        return made

    task = task_of([2000, *[2] * 200])
    net = Net(mlp, SGD(lr=0.01), epochs=1)
    monkeypatch.setattr("offbeat.groups.net_training.mixed", counted)
    net.fit(task, [net])
    assert sum(sizes) == 2400


def test_initial_weights_are_functions_of_the_seed_in_torchs_bound() -> None:
    def make(features: int) -> nn.Module:
        head = nn.Linear(50, 1)
        nn.init.zeros_(head.weight)
        return nn.Sequential(nn.Linear(features, 50), nn.LayerNorm(50), head)

    module = StackedModule(make, 16, 0)
    rows = module.initial(np.arange(40, dtype=np.uint64))
    assert torch.equal(rows[7:9], module.initial(np.arange(7, 9, dtype=np.uint64)))
    values = module.views(rows, module.trained)
    first = values["0.weight"]
    assert 0.2499 < first.max() <= 0.25, "1 / sqrt(16)"
    assert -0.25 <= first.min() < -0.2499
    assert abs(first.std() - 0.25 / 3**0.5) < 2e-3
    assert not torch.equal(first[0], first[1])
    assert (values["1.weight"] == 1).all()
    assert (values["2.weight"] == 0).all(), "make has set it"
    assert values["2.bias"].unique().numel() == 40


def test_batch_norm_is_trained_one_by_one() -> None:
    task = task_of([40, 33, 64, 1])
    net = Net(mlp_with_norm, SGD(lr=0.1, momentum=0.9), batch=8, epochs=2)
    with pytest.warns(UserWarning, match="one by one, not together: BatchNorm1d: "):
        found = net.fit(task, [net])
    assert found.steps[:, 0].tolist() == [10, 8, 16, 2], "a last batch of one row is left out"
    assert found.status.tolist() == [GroupStatus.OK] * 3 + [GroupStatus.NOT_CONVERGED], "one row has no variance"
    count = len(found.coefficients[0, 0]) - 16
    np.testing.assert_allclose(found.coefficients[0, 0, :count], by_loop(task, 0, net), rtol=1e-6, atol=1e-6)
    statistics = found.coefficients[:3, 0, count:]
    assert (np.ptp(statistics, axis=0) > 0).all(), "each model has its own"
    assert found.losses[:3].max() < 1.0


def test_what_cannot_be_vmapped_has_the_same_models() -> None:
    task = task_of([40, 33, 64])
    net = Net(Branching, Adam(lr=0.01), batch=16, epochs=2)
    with pytest.warns(UserWarning, match=r"one by one, not together: Branching: .*data-dependent control flow"):
        found = net.fit(task, [net])
    for group in range(3):
        np.testing.assert_allclose(found.coefficients[group, 0], by_loop(task, group, net), rtol=1e-6, atol=1e-6)
    margins = net.margins(found.coefficients[:, 0], task.features, task.group)
    plain = Net(mlp, Adam(lr=0.01)).margins(found.coefficients[:, 0], task.features, task.group)
    np.testing.assert_allclose(margins, plain, rtol=1e-6, atol=1e-6)


class Centred(nn.Module):
    """A module that centres batches, in evaluation mode too if `always`."""

    def __init__(self, features: int, *, always: bool = False) -> None:
        super().__init__()
        self.body, self.always = mlp(features), always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(x - x.mean(0) if self.training or self.always else x)
        return made


def test_rows_that_mix_are_found() -> None:
    net = Net(Centred, Adam(lr=0.01), batch=16, epochs=2)
    task = task_of([40, 23])
    with pytest.warns(UserWarning, match="an output depends on other rows of its batch"):
        found = net.fit(task, [net])
    np.testing.assert_allclose(found.coefficients[1, 0], by_loop(task, 1, net), rtol=1e-6, atol=1e-6)
    always = Net(lambda features: Centred(features, always=True))
    with pytest.raises(GroupDataError, match="depends on other rows of the table"):
        always.fit(task, [always])


class Warming(nn.Module):
    """A module that counts its steps, and whose outputs grow with them; it has a frozen scale, too."""

    def __init__(self, features: int, *, in_place: bool = True) -> None:
        super().__init__()
        self.body, self.in_place = mlp(features), in_place
        self.scale = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.in_place:
            self.count += 1
        elif self.training:
            self.count = self.count + 1
        made: torch.Tensor = self.body(x) * self.scale
        return made * (self.count / (self.count + 1) if self.training else 1)


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_change_are_each_models_own(in_place: bool) -> None:
    net = Net(lambda features: Warming(features, in_place=in_place), SGD(lr=0.05), batch=16, epochs=2)
    task = task_of([40, 23])
    with pytest.warns(UserWarning, match="the buffer 'count' changes in training"):
        found = net.fit(task, [net])
    for group in range(2):
        np.testing.assert_allclose(found.coefficients[group, 0, :-1], by_loop(task, group, net), rtol=1e-6, atol=1e-6)
    assert (found.coefficients[:, 0, -1] == 2).all(), "frozen"


def test_convolutions_with_frozen_layers_train_together() -> None:
    def make(features: int) -> nn.Module:
        first = nn.Conv1d(1, 4, 3, padding=1)
        first.requires_grad_(False)
        convolutions = [first, nn.Tanh(), nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()]
        return nn.Sequential(nn.Unflatten(1, (1, features)), *convolutions, nn.Linear(4 * features - 8, 1))

    net = Net(make, AdamW(lr=0.01), batch=16, epochs=2)
    task = task_of([40, 23], features=6)
    found = net.fit(task, [net])
    for group in range(2):
        expected = by_loop(task, group, net)
        np.testing.assert_allclose(found.coefficients[group, 0], expected, rtol=1e-6, atol=2e-6)


def test_dropout_draws_for_each_model() -> None:
    net = Net(lambda features: nn.Sequential(nn.Dropout(0.5), nn.Linear(features, 1)), SGD(lr=0.1), epochs=1)
    task = task_of([32, 32])
    state = torch.get_rng_state()
    found = net.fit(task, [net])
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"
    assert np.array_equal(net.fit(task, [net]).coefficients, found.coefficients)
    margins = net.margins(found.coefficients[:, 0], task.features, task.group)
    mine = task.features[:32] @ found.coefficients[0, 0, :4] + found.coefficients[0, 0, 4]
    np.testing.assert_allclose(margins[:32], mine, rtol=1e-4, atol=1e-5)


def test_bad_groups_have_a_status_and_no_model() -> None:
    task = task_of([20, 20, 0, 20], kind="log")
    task.features[3, 1] = np.nan
    task.target[20:40] = 1.0
    net = Net(mlp, loss="log", epochs=1)
    found = net.fit(task, [net])
    kinds = [GroupStatus.NOT_FINITE, GroupStatus.ONE_CLASS, GroupStatus.NO_ROWS, GroupStatus.OK]
    assert found.status.tolist() == kinds
    assert np.isnan(found.coefficients[:, 0]).all(1).tolist() == [True, True, True, False]


def test_a_model_that_diverges_has_no_model() -> None:
    task = task_of([40, 40])
    task.target[:40] *= 1e20
    net = Net(mlp, SGD(lr=1e20), epochs=3)
    good = Net(mlp, SGD(lr=0.1), epochs=3)
    found = net.fit(task, [net, good])
    assert np.isnan(found.coefficients[:, 0]).all()
    assert not np.isnan(found.coefficients[1, 1]).any(), "others go on"


def test_a_table_of_groups() -> None:
    chance = np.random.default_rng(0)
    count = 6 * 120
    shop, x = np.repeat(np.arange(6), 120), chance.normal(size=(count, 2))
    y = np.where(shop % 2, 1, -1) * x[:, 0] + 0.5 * x[:, 1] ** 2
    table = pa.table({"shop": shop, "a": x[:, 0], "b": x[:, 1], "sold": y, "many": np.where(y > 0, "yes", "no")})
    net = Net(mlp, AdamW(lr=Grid(1e-6, 3e-2)), batch=16, epochs=20)
    fitted = GroupedTrainer(net, by="shop", target="sold", features=["a", "b"]).fit(table)
    assert fitted.models.column_names == ["shop", "rows", "optimizer.lr", "status", "error"]
    assert set(fitted.models["optimizer.lr"].to_pylist()) == {3e-2}
    assert np.mean((fitted.predict(table)["prediction"].to_numpy() - y) ** 2) < 0.05 * y.var()
    kinds = Net(mlp, Grid(SGD(lr=1e-6), AdamW(lr=3e-2)), loss="log", batch=16, epochs=20)
    classes = GroupedTrainer(kinds, by="shop", target="many", features=["a", "b"]).fit(table)
    assert set(classes.models["optimizer"].to_pylist()) == {repr(AdamW(lr=3e-2))}
    right = np.equal(classes.predict(table)["prediction"].to_pylist(), table["many"].to_pylist())
    assert right.mean() > 0.93
    unknown = pa.table({"shop": [0, 99], "a": [0.0, 0.0], "b": [1.0, 1.0]})
    assert fitted.predict(unknown)["model"].to_pylist() == ["group", "none"]
    assert fitted.predict(unknown)["prediction"].to_pylist()[1] is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": "hinge"}, "Cannot minimize the loss 'hinge'"),
        ({"batch": 0}, "Cannot use batch=0"),
        ({"epochs": Grid(1, 2.5)}, r"Cannot use epochs=2\.5"),
        ({"optimizer": torch.optim.SGD}, "use SGD, Adam or AdamW of offbeat.groups"),
        ({"optimizer": AdamW(lr=Grid(1.0, -1.0))}, r"Cannot use lr=-1\.0"),
        ({"seed": Grid(1, 2)}, "Cannot search in `make` or `seed`"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(GroupDataError, match=told):
        GroupedTrainer(Net(mlp, **settings), by="shop", target="sold")


def test_modules_that_cannot_be_used_are_named() -> None:
    task = task_of([20])
    for make, told in (
        (lambda features: 1, "has to return a torch.nn.Module"),
        (lambda features: nn.Linear(features, 2), "has to make one for each row"),
        (lambda features: nn.Identity(), "no parameter that needs a gradient"),
    ):
        net: Any = Net(make)  # type: ignore[arg-type]
        with pytest.raises(GroupDataError, match=told):
            net.fit(task, [net])


def test_a_net_of_all_rows_predicts_for_keys_that_are_not_known() -> None:
    table = sales(4)
    trainer = GroupedTrainer(
        Net(lambda features: torch.nn.Linear(features, 1), optimizer=SGD(0.05), epochs=5),
        by="shop",
        target="sold",
        features=["price", "day"],
        small=Small(fallback="global"),
    )
    strangers = table.set_column(table.column_names.index("shop"), "shop", [["elsewhere"] * table.num_rows])
    found = trainer.fit(table).predict(strangers)
    assert set(found["model"].to_pylist()) == {"global"}
    assert np.corrcoef(found["prediction"].to_numpy(), table["sold"].to_numpy())[0, 1] > 0.7
