"""Tests of the page about the models of groups."""

from __future__ import annotations

import re
import xml.dom.minidom

import pyarrow as pa
import pytest

from offbeat.groups import Grid, GroupedTrainer, Linear, Small
from offbeat.report.groups_page import groups_page
from tests.groups.test_trainer import sales


@pytest.mark.parametrize("l2", [1.0, Grid(0.1, 10.0)])
def test_it_shows_what_became_of_the_groups(l2: float | Grid) -> None:
    table = sales(6)
    odd = pa.table({**{name: table[name].slice(0, 1) for name in table.column_names}, "shop": ["<i>odd</i>"]})
    trainer = GroupedTrainer(
        Linear(l2=l2), by=["country", "shop"], target="sold", features=["price", "day"], small=Small(2)
    )
    fitted = trainer.fit(pa.concat_tables([table, odd]))
    page = groups_page(fitted.models, fitted.results, title="Models of <b>")
    for picture in (pictures := re.findall(r"<svg.*?</svg>", page, re.DOTALL)):
        xml.dom.minidom.parseString(picture)
    assert len(pictures) == (3 if isinstance(l2, Grid) else 2)
    assert "<b>7</b><span>groups" in page
    assert "<b>1</b><span>too small" in page
    assert "&lt;i&gt;odd&lt;/i&gt;" in page
    assert "<i>odd" not in page
    assert "Models of &lt;b&gt;" in page
    told = "Groups with the largest loss of a held-out row" if isinstance(l2, Grid) else "Groups with the largest loss"
    assert told in page
