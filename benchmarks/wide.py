"""One line for a number of tokens and a load: the layer, its variants and its parts side by side,
forward and forward+backward in one cell.
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.rows import (
    CEILING,
    OURS,
    UNEVEN,
    VARIANT,
    Row,
    key_of,
    number,
    of_model,
    text_of,
    varying,
)

_OF_LOAD = ("skew", "trace", "trace_step", "trace_layer", *UNEVEN)


def has_parts(rows: Sequence[Row]) -> list[Row]:
    """The rows of cases in which ours was measured beside its parts."""
    cases = {key_of(row.case) for row in rows if row.impl == OURS and "ratio" in row.metrics}
    return [row for row in rows if key_of(row.case) in cases]


def lines(rows: Sequence[Row]) -> list[str]:
    """The table of such rows, in Markdown. Times are medians, in ms; the ratio is of the time to
    the longer of the two parts alone."""
    directions = list(dict.fromkeys(row.case["direction"] for row in rows))
    impls = list(dict.fromkeys(row.impl for row in rows))
    ours = [impl for impl in impls if impl == OURS or impl.startswith(VARIANT)]
    grouped: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        rest = {key: value for key, value in row.case.items() if key != "direction"}
        group = grouped.setdefault(key_of(rest), {})
        group[row.impl, row.case["direction"]] = row
    known = (*_OF_LOAD, "direction", "tokens", *of_model(rows))
    keys = [key for key in varying(rows) if key not in known]

    def cells(group: Mapping[tuple[str, str], Row], impl: str, metric: str) -> str:
        found = [group.get((impl, direction)) for direction in directions]
        values = [row.metrics.get(metric) if row else None for row in found]
        if not any(values):
            return ""
        return " / ".join("-" if value is None else number(value[0]) for value in values)

    columns: list[tuple[str, Callable[[Row, Mapping[tuple[str, str], Row]], str]]] = [
        *((key, lambda row, _, key=key: text_of(row.case.get(key, ""))) for key in keys),
        ("tokens", lambda row, _: number(row.case["tokens"])),
        ("load", lambda row, _: _load(row)),
        ("busiest rank", lambda row, _: text_of(row.case.get("busiest_rank", ""))),
        *((_short(i), lambda _, group, i=i: cells(group, i, "time")) for i in impls),
        *((_ratio_of(i), lambda _, group, i=i: cells(group, i, "ratio")) for i in ours),
    ]
    table = [[heading for heading, _ in columns], ["---"] * len(columns)]
    for group in sorted(grouped.values(), key=_place):
        first = next(iter(group.values()))
        table.append([cell(first, group) for _, cell in columns])
    head = f"Each cell: {' / '.join(directions)}; times in ms."
    return [head, "", *("| " + " | ".join(line) + " |" for line in table)]


def _place(group: Mapping[tuple[str, str], Row]) -> tuple[str, int]:
    """A model's lines stand together, by tokens, in whatever run they were measured."""
    case = next(iter(group.values())).case
    return text_of(case.get("model", "")), case["tokens"]


def _load(row: Row) -> str:
    if trace := row.case.get("trace"):
        return f"trace {trace}"
    return f"skew {row.case['skew']:g}" if "skew" in row.case else "by the logits"


def _short(impl: str) -> str:
    """`ep_moe, pipeline_chunks 2` -> `pipeline_chunks 2`; `ceiling: compute alone` -> `compute
    alone`"""
    return impl.removeprefix(VARIANT).removeprefix(f"{CEILING}: ")


def _ratio_of(impl: str) -> str:
    return "ratio" if impl == OURS else f"ratio, {_short(impl)}"
