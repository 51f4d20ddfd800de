"""A transform of Parquet tables, which a test imports as well."""


def third_dropped(table):
    """Drops some rows, repeats others: by their content alone."""
    x = table.column("row").to_numpy()
    return table.take([i for i in range(len(x)) for _ in range(x[i] % 3)])
