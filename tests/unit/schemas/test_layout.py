"""kiln.schemas.delta.layout: every table is laid out by columns that it has."""

from __future__ import annotations

from kiln.schemas.delta.layout import LAYOUTS
from kiln.schemas.delta.tables import TABLES


def test_every_table_is_laid_out_by_columns_that_it_has() -> None:
    assert set(LAYOUTS) == set(TABLES)
    for name, layout in LAYOUTS.items():
        types = {column.name: column.type for column in TABLES[name].columns}
        assert set(layout.order) <= set(types), name
        assert layout.age is None or types[layout.age] == "timestamp", name
