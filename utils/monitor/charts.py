"""The drawings of the page: rows of `contrast.points` as lines, areas or bars. Names are data in them, never fields."""

from collections.abc import Sequence

import altair
import pandas
import streamlit as st

HEIGHT, WITH_LEGEND = 260, 340  # pixels
LONGEST_OF_TWO = 14  # characters of names that stand beside one another on a telephone


def lines(rows: pandas.DataFrame, *, y: str, alt: str) -> None:
    """Draw a line for each series over the steps."""
    _draw(_over_steps(rows, y).mark_line(), alt, WITH_LEGEND if rows["series"].nunique() > 1 else HEIGHT)


def areas(rows: pandas.DataFrame, *, y: str, alt: str, order: Sequence[str]) -> None:
    """Draw the series on top of one another over the steps, in colours that go by their place in `order`."""
    chart = _over_steps(rows, y, list(order)).mark_area(interpolate="step-after", opacity=0.85)
    _draw(chart, alt, WITH_LEGEND)


def histogram(rows: pandas.DataFrame, *, x: str, alt: str) -> None:
    """Draw the counts of `y` between `x` and `x2`."""
    chart = altair.Chart(rows).mark_bar()
    places = {"x": altair.X("x:Q", title=x, bin="binned"), "x2": "x2:Q", "y": altair.Y("y:Q", title="steps")}
    _draw(chart.encode(**places, tooltip=["x:Q", "x2:Q", "y:Q"]), alt, HEIGHT)


def _over_steps(rows: pandas.DataFrame, y: str, order: list[str] | None = None) -> altair.Chart:
    names = order if order is not None else list(rows["series"].unique())
    columns = 2 if max(map(len, names), default=0) <= LONGEST_OF_TWO else 1
    legend = altair.Legend(title=None, orient="bottom", columns=columns, labelLimit=300) if len(names) > 1 else None
    return altair.Chart(rows).encode(
        x=altair.X(
            "x:Q",
            title="step",
            axis=altair.Axis(format=",d", tickMinStep=1),
            scale=altair.Scale(zero=False, nice=False),
        ),
        y=altair.Y("y:Q", title=y, scale=altair.Scale(zero=order is not None)),
        color=altair.Color("series:N", legend=legend, sort=names, scale=altair.Scale(domain=names)),
        tooltip=[altair.Tooltip("series:N"), altair.Tooltip("x:Q", title="step"), altair.Tooltip("y:Q", title=y)],
    )


def _draw(chart: altair.Chart, alt: str, height: int) -> None:
    st.altair_chart(chart.properties(height=height), alt=alt)
