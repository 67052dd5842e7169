"""One model of sales for each of 400 stores, and how well each predicts the weeks that it has not seen.

    python examples/groups.py                             in this process
    offbeat run --workers 4 examples/groups.py            by four workers: rows go to those that fit them

The table is generated: stores of very unequal sizes, in eight regions, whose sales depend on price, promotions and the
day of the week, in each in another way. A table of your own is named by --data, with the same columns.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import pyarrow as pa

from offbeat.groups import Grid, GroupedTrainer, HoldOut, Poisson, Ranks, Small

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday")


def panel(stores: int, seed: int = 0) -> pa.Table:
    """A row for each article, store and day."""
    chance = np.random.default_rng(seed)
    rows = np.minimum(120 * (1 + chance.pareto(1.1, stores)), 200_000).astype(np.int64)
    store = chance.permutation(np.repeat(np.arange(stores), rows))
    count = len(store)
    price, promotion, day = chance.normal(size=count), chance.random(count) < 0.15, chance.integers(0, 7, count)
    level, slope, lift = (chance.normal(mean, 0.4, stores) for mean in (1.0, -0.6, 0.5))
    rhythm = chance.normal(0, 0.3, (stores, 7))
    mean = np.exp(level[store] + slope[store] * price + lift[store] * promotion + rhythm[store, day])
    columns = {name: (day == number).astype(np.int8) for number, name in enumerate(DAYS)}
    return pa.table(
        {
            "region": pa.array(np.array([f"region {number % 8}" for number in range(stores)])[store]),
            "store": store,
            "week": chance.integers(0, 104, count),
            "price": price,
            "promotion": promotion,
            **columns,
            "sold": chance.poisson(np.minimum(mean, 1e4)),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", type=int, default=400)
    parser.add_argument("--data", help="a file, folder or pattern of Parquet, CSV or Arrow files")
    parser.add_argument("--out", default="stores.models", help="the file of the models")
    options = parser.parse_args()
    table = options.data or panel(options.stores)
    trainer = GroupedTrainer(
        Poisson(l2=Grid(0.1, 1, 10, 100)),
        by=["region", "store"],
        target="sold",
        features=["price", "promotion", *DAYS],
        validation=HoldOut(0.2, by="week"),
        small=Small(min_rows=50, fallback="global"),
        executor=Ranks(),
    )
    fitted = trainer.fit(table)
    if int(os.environ.get("RANK", "0")):
        return
    models = fitted.models
    chosen = sorted((row["values"], row["counts"]) for row in models["l2"].value_counts().to_pylist())
    print(f"{models.num_rows} models; " + ", ".join(f"{count} with l2={l2:g}" for l2, count in chosen))
    fitted.save(options.out)
    print(f"Models are in {options.out}: see them by `offbeat groups show {options.out}`.")


if __name__ == "__main__":
    main()
